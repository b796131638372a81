/* 32-lane interleaved rANS over bytes, for exponent planes. The stream is specified in
 * docs/planes.md; this header fixes its numbers and the bound on every buffer.
 *
 *   header 16 bytes | bitmaps 32 B | states 128 S | counts 2 S | frequencies 2 K | words 2 W
 *
 * B tables of 128 Ki symbols, S segments of 2^segment_log2 symbols, K symbols present in all the
 * tables together, W 16-bit words.
 */
#ifndef TORPOR_RANS_H
#define TORPOR_RANS_H
#include <stdint.h>

#define RANS_VERSION 1
#define RANS_LANES 32u
#define RANS_PROB_BITS 11
#define RANS_PROB_SUM (1u << RANS_PROB_BITS)
#define RANS_LOW (1u << 15)         /* states live in [2^15, 2^31) */
#define RANS_BLOCK_LOG2 17          /* one table for 128 Ki symbols */
#define RANS_BLOCK (1u << RANS_BLOCK_LOG2)
#define RANS_SEGMENT_LOG2_MIN 12
#define RANS_SEGMENT_LOG2_MAX 15
#define RANS_SYMBOLS_MAX (1u << 30) /* so that every offset fits 32 bits */
#define RANS_HEADER 16u

/* Where a stream's sections begin; a pure function of the header. */
typedef struct {
    uint32_t symbols, segment_log2, blocks, segments, present, words;
    uint32_t bitmaps_at, states_at, counts_at, freqs_at, words_at, bytes;
} rans_layout;

/* Bytes that encode() may need at most for n symbols; 0 where n is out of range. */
uint64_t torpor_rans_bound(uint64_t symbols, int segment_log2);

/* Encode n symbols into at most `capacity` bytes at `stream`. Returns the stream's bytes; 0 where
 * it does not fit (nothing is gained) or the arguments are out of range. Reads n bytes at
 * `plain`, writes only inside `capacity`. */
uint64_t torpor_rans_encode(const uint8_t *plain, uint64_t symbols, int segment_log2,
                            uint8_t *stream, uint64_t capacity);

/* Decode a stream of exactly `bytes` bytes into exactly n symbols. Returns 0, or one of the
 * refusals below; the output is then unspecified, and nothing outside either buffer was touched. */
int torpor_rans_decode(const uint8_t *stream, uint64_t bytes, uint8_t *plain, uint64_t symbols);

enum {
    RANS_OK = 0,
    RANS_BAD_HEADER = 1, /* version, parameters, or sizes that do not add up */
    RANS_BAD_TABLE = 2,  /* frequencies that do not sum to 2^11, or a zero */
    RANS_BAD_STATE = 3,  /* a lane's first state outside [2^15, 2^31) */
    RANS_BAD_WORDS = 4,  /* a segment that takes more or fewer words than it has */
    RANS_BAD_END = 5,    /* a lane that does not end in 2^15 */
};
#endif
