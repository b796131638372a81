/* MD5 (RFC 1321) of up to eight streams in lockstep. One stream is bound by the latency of its 64
 * dependent steps; eight of them fill the same vector instructions, so seven are nearly free.
 */
#ifndef TORPOR_MD5_H
#define TORPOR_MD5_H
#include <stdint.h>

enum { TORPOR_MD5_LANES = 8 };

/* Takes `blocks` blocks of 64 bytes of each of `lanes` (1 to 8) streams into its state; states[i]
 * holds A, B, C, D. Padding is the caller's. Returns 0, or 1 where `lanes` is out of range. */
int torpor_md5_blocks(uint32_t (*states)[4], const uint8_t *const *streams, int lanes,
                      uint64_t blocks);
#endif
