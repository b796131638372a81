/* The histogram of up to 2^32 - 1 bytes. Four tables, so that a run of equal bytes does not wait
 * for its own last store. */
#ifndef TORPOR_COUNT_H
#define TORPOR_COUNT_H
#include <stdint.h>
#include <string.h>

static inline void torpor_count(const uint8_t *plain, uint32_t n, uint32_t *counts) {
    uint32_t part[4][256] = {{0}};
    uint32_t i = 0;
    for (; n - i >= 8; i += 8) {
        uint64_t eight;
        memcpy(&eight, plain + i, 8);
        part[0][eight & 255]++, part[1][eight >> 8 & 255]++;
        part[2][eight >> 16 & 255]++, part[3][eight >> 24 & 255]++;
        part[0][eight >> 32 & 255]++, part[1][eight >> 40 & 255]++;
        part[2][eight >> 48 & 255]++, part[3][eight >> 56]++;
    }
    for (; i < n; i++)
        part[0][plain[i]]++;
    for (int s = 0; s < 256; s++)
        counts[s] = part[0][s] + part[1][s] + part[2][s] + part[3][s];
}
#endif
