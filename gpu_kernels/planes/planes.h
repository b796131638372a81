/* Byte planes: cut elements of 2, 4 or 8 bytes into one plane per byte, and put them back.
 *
 * Format: docs/planes.md. With `rotate`, the top 16 bits of every element turn left by one bit
 * first, so that a float's sign leaves the exponent's byte and joins the mantissa's. Plane 0 is
 * the most significant byte.
 *
 * Bounds: `elements * width` bytes at `plain`, `elements` bytes at each of planes[0..width-1];
 * nothing else is read or written. Buffers do not overlap and need no alignment.
 */
#ifndef TORPOR_PLANES_H
#define TORPOR_PLANES_H
#include <stdint.h>

/* 0, or -1 where width is not 2, 4 or 8. */
int torpor_planes_split(const uint8_t *plain, uint64_t elements, int width, int rotate,
                        uint8_t *const *planes);
int torpor_planes_join(const uint8_t *const *planes, uint64_t elements, int width, int rotate,
                       uint8_t *plain);
#endif
