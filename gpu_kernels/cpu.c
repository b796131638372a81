#include "cpu.h"

static int best, level;

__attribute__((constructor)) static void look(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("popcnt"))
        best = TORPOR_AVX2;
    if (best == TORPOR_AVX2 && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        best = TORPOR_AVX512;
#endif
    level = best;
}

int torpor_cpu_level(void) { return level; }

int torpor_cpu_limit(int wanted) {
    level = wanted < TORPOR_PLAIN ? TORPOR_PLAIN : wanted > best ? best : wanted;
    return level;
}
