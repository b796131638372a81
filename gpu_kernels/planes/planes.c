/* The C twin of planes.cuh. The loops are plain C: the compiler vectorises one copy for each
 * instruction set, and the copy is chosen at load (cpu.c), so one build serves every x86-64. */
#include "planes.h"

#include <string.h>

#include "../cpu.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "planes.c reads little-endian words; a big-endian build needs byte swaps"
#endif

#define INLINE static inline __attribute__((always_inline))

INLINE uint16_t turn_left(uint16_t top) { return (uint16_t)(top << 1 | top >> 15); }
INLINE uint16_t turn_right(uint16_t top) { return (uint16_t)(top >> 1 | top << 15); }

INLINE uint16_t load16(const uint8_t *from) {
    uint16_t word;
    memcpy(&word, from, 2);
    return word;
}

INLINE void store16(uint8_t *to, uint16_t word) { memcpy(to, &word, 2); }

INLINE void split2(const uint8_t *restrict plain, uint64_t n, int rotate,
                   uint8_t *restrict high, uint8_t *restrict low) {
    for (uint64_t i = 0; i < n; i++) {
        uint16_t word = load16(plain + 2 * i);
        word = rotate ? turn_left(word) : word;
        high[i] = (uint8_t)(word >> 8);
        low[i] = (uint8_t)word;
    }
}

INLINE void join2(const uint8_t *restrict high, const uint8_t *restrict low, uint64_t n,
                  int rotate, uint8_t *restrict plain) {
    for (uint64_t i = 0; i < n; i++) {
        uint16_t word = (uint16_t)(high[i] << 8 | low[i]);
        store16(plain + 2 * i, rotate ? turn_right(word) : word);
    }
}

INLINE void split4(const uint8_t *restrict plain, uint64_t n, int rotate, uint8_t *restrict p0,
                   uint8_t *restrict p1, uint8_t *restrict p2, uint8_t *restrict p3) {
    for (uint64_t i = 0; i < n; i++) {
        uint32_t word;
        memcpy(&word, plain + 4 * i, 4);
        uint16_t top = (uint16_t)(word >> 16);
        top = rotate ? turn_left(top) : top;
        p0[i] = (uint8_t)(top >> 8);
        p1[i] = (uint8_t)top;
        p2[i] = (uint8_t)(word >> 8);
        p3[i] = (uint8_t)word;
    }
}

INLINE void join4(const uint8_t *restrict p0, const uint8_t *restrict p1,
                  const uint8_t *restrict p2, const uint8_t *restrict p3, uint64_t n, int rotate,
                  uint8_t *restrict plain) {
    for (uint64_t i = 0; i < n; i++) {
        uint16_t top = (uint16_t)(p0[i] << 8 | p1[i]);
        top = rotate ? turn_right(top) : top;
        uint32_t word = (uint32_t)top << 16 | (uint32_t)p2[i] << 8 | p3[i];
        memcpy(plain + 4 * i, &word, 4);
    }
}

/* Eight planes are rare (doubles, long integers): one plane at a time keeps few streams open. */
INLINE void split8(const uint8_t *restrict plain, uint64_t n, int rotate,
                   uint8_t *const *planes) {
    uint8_t *restrict p0 = planes[0], *restrict p1 = planes[1];
    for (uint64_t i = 0; i < n; i++) {
        uint16_t top = load16(plain + 8 * i + 6);
        top = rotate ? turn_left(top) : top;
        p0[i] = (uint8_t)(top >> 8);
        p1[i] = (uint8_t)top;
    }
    for (int p = 2; p < 8; p++) {
        uint8_t *restrict to = planes[p];
        for (uint64_t i = 0; i < n; i++)
            to[i] = plain[8 * i + 7 - p];
    }
}

INLINE void join8(const uint8_t *const *planes, uint64_t n, int rotate,
                  uint8_t *restrict plain) {
    for (uint64_t i = 0; i < n; i++) {
        uint16_t top = (uint16_t)(planes[0][i] << 8 | planes[1][i]);
        top = rotate ? turn_right(top) : top;
        uint64_t word = (uint64_t)top << 48 | (uint64_t)planes[2][i] << 40 |
                        (uint64_t)planes[3][i] << 32 | (uint64_t)planes[4][i] << 24 |
                        (uint64_t)planes[5][i] << 16 | (uint64_t)planes[6][i] << 8 |
                        planes[7][i];
        memcpy(plain + 8 * i, &word, 8);
    }
}

INLINE void split_any(const uint8_t *plain, uint64_t n, int width, int rotate,
                      uint8_t *const *p) {
    if (width == 2 && rotate)
        split2(plain, n, 1, p[0], p[1]);
    else if (width == 2)
        split2(plain, n, 0, p[0], p[1]);
    else if (width == 4 && rotate)
        split4(plain, n, 1, p[0], p[1], p[2], p[3]);
    else if (width == 4)
        split4(plain, n, 0, p[0], p[1], p[2], p[3]);
    else
        split8(plain, n, rotate, p);
}

INLINE void join_any(const uint8_t *const *p, uint64_t n, int width, int rotate,
                     uint8_t *plain) {
    if (width == 2 && rotate)
        join2(p[0], p[1], n, 1, plain);
    else if (width == 2)
        join2(p[0], p[1], n, 0, plain);
    else if (width == 4 && rotate)
        join4(p[0], p[1], p[2], p[3], n, 1, plain);
    else if (width == 4)
        join4(p[0], p[1], p[2], p[3], n, 0, plain);
    else
        join8(p, n, rotate, plain);
}

#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))

AVX2 static void split_avx2(const uint8_t *s, uint64_t n, int w, int r, uint8_t *const *p) {
    split_any(s, n, w, r, p);
}
AVX2 static void join_avx2(const uint8_t *const *p, uint64_t n, int w, int r, uint8_t *d) {
    join_any(p, n, w, r, d);
}
AVX512 static void split_avx512(const uint8_t *s, uint64_t n, int w, int r, uint8_t *const *p) {
    split_any(s, n, w, r, p);
}
AVX512 static void join_avx512(const uint8_t *const *p, uint64_t n, int w, int r, uint8_t *d) {
    join_any(p, n, w, r, d);
}
#endif

int torpor_planes_split(const uint8_t *plain, uint64_t elements, int width, int rotate,
                        uint8_t *const *planes) {
    if (width != 2 && width != 4 && width != 8)
        return -1;
#if defined(__x86_64__)
    if (torpor_cpu_level() == TORPOR_AVX512)
        return split_avx512(plain, elements, width, rotate, planes), 0;
    if (torpor_cpu_level() == TORPOR_AVX2)
        return split_avx2(plain, elements, width, rotate, planes), 0;
#endif
    return split_any(plain, elements, width, rotate, planes), 0;
}

int torpor_planes_join(const uint8_t *const *planes, uint64_t elements, int width, int rotate,
                       uint8_t *plain) {
    if (width != 2 && width != 4 && width != 8)
        return -1;
#if defined(__x86_64__)
    if (torpor_cpu_level() == TORPOR_AVX512)
        return join_avx512(planes, elements, width, rotate, plain), 0;
    if (torpor_cpu_level() == TORPOR_AVX2)
        return join_avx2(planes, elements, width, rotate, plain), 0;
#endif
    return join_any(planes, elements, width, rotate, plain), 0;
}
