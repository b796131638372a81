/* Stock zstd frames (RFC 8878) of Huffman-coded literals, without a search for matches: the frames
 * that libzstd makes of an exponent plane, made a third faster. Any zstd decoder reads them; there
 * is none here.
 */
#ifndef TORPOR_HUFFMAN_H
#define TORPOR_HUFFMAN_H
#include <stdint.h>

/* Bytes that a frame of n bytes may take at most, and the least `capacity` to give. */
uint64_t torpor_huffman_bound(uint64_t size);

/* Writes the frame of `size` bytes at `frame`; returns its bytes. 0 where `capacity` is below the
 * bound, `size` is 0 or above 2^30, or the plane has a symbol above 128 in a block that Huffman
 * coding would shrink (such a table needs FSE: left to libzstd). */
uint64_t torpor_huffman_frame(const uint8_t *plain, uint64_t size, uint8_t *frame,
                              uint64_t capacity);
#endif
