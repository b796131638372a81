/* Which instructions the C twins may use: chosen once at load, lowered by the tests. */
#ifndef TORPOR_CPU_H
#define TORPOR_CPU_H

enum { TORPOR_PLAIN = 0, TORPOR_AVX2 = 1, TORPOR_AVX512 = 2 };

/* The level in use; always one that this CPU has. */
int torpor_cpu_level(void);
/* Ask for at most `level`; returns the level in use from now on. Not for use while others run. */
int torpor_cpu_limit(int level);
#endif
