/* What the C twin and the CUDA source share: the layout of a stream, its tables, the arithmetic of
 * one step. Plain C and CUDA C++ both compile it, so that neither can drift from the other. */
#ifndef TORPOR_RANS_LAYOUT_H
#define TORPOR_RANS_LAYOUT_H
#include "rans.h"

#ifdef __CUDACC__
#define RANS_FN __host__ __device__ static inline
#else
#define RANS_FN static inline
#endif

RANS_FN uint32_t rans_get16(const uint8_t *at) { return at[0] | (uint32_t)at[1] << 8; }
RANS_FN uint32_t rans_get32(const uint8_t *at) {
    return rans_get16(at) | rans_get16(at + 2) << 16;
}
RANS_FN void rans_put16(uint8_t *at, uint32_t value) {
    at[0] = (uint8_t)value;
    at[1] = (uint8_t)(value >> 8);
}
RANS_FN void rans_put32(uint8_t *at, uint32_t value) {
    rans_put16(at, value);
    rans_put16(at + 2, value >> 16);
}

/* Sections up to the frequencies depend on `symbols` alone. 0 where a parameter is out of range. */
RANS_FN int rans_place(rans_layout *l, uint64_t symbols, uint32_t segment_log2) {
    if (symbols == 0 || symbols > RANS_SYMBOLS_MAX || segment_log2 < RANS_SEGMENT_LOG2_MIN ||
        segment_log2 > RANS_SEGMENT_LOG2_MAX)
        return 0;
    l->symbols = (uint32_t)symbols;
    l->segment_log2 = segment_log2;
    l->blocks = (uint32_t)((symbols + RANS_BLOCK - 1) >> RANS_BLOCK_LOG2);
    l->segments = (uint32_t)((symbols + (1u << segment_log2) - 1) >> segment_log2);
    l->bitmaps_at = RANS_HEADER;
    l->states_at = l->bitmaps_at + 32 * l->blocks;
    l->counts_at = l->states_at + 128 * l->segments;
    l->freqs_at = l->counts_at + 2 * l->segments;
    return 1;
}

/* The rest, once K and W are known. 0 where the stream would pass 32 bits. */
RANS_FN int rans_finish(rans_layout *l, uint32_t present, uint32_t words) {
    uint64_t bytes = (uint64_t)l->freqs_at + 2 * (uint64_t)present + 2 * (uint64_t)words;
    if (present > 256 * l->blocks || words > l->symbols || bytes > 0xffffffffu)
        return 0;
    l->present = present;
    l->words = words;
    l->words_at = l->freqs_at + 2 * present;
    l->bytes = (uint32_t)bytes;
    return 1;
}

RANS_FN void rans_put_header(uint8_t *stream, const rans_layout *l) {
    stream[0] = 't';
    stream[1] = 'R';
    stream[2] = RANS_VERSION;
    stream[3] = (uint8_t)l->segment_log2;
    rans_put32(stream + 4, l->symbols);
    rans_put32(stream + 8, l->present);
    rans_put32(stream + 12, l->words);
}

/* Check the header against the bytes that are there and the symbols that are wanted. */
RANS_FN int rans_get_header(rans_layout *l, const uint8_t *stream, uint64_t bytes,
                            uint64_t symbols) {
    if (bytes < RANS_HEADER || stream[0] != 't' || stream[1] != 'R' ||
        stream[2] != RANS_VERSION || rans_get32(stream + 4) != symbols)
        return 0;
    return rans_place(l, symbols, stream[3]) &&
           rans_finish(l, rans_get32(stream + 8), rans_get32(stream + 12)) && l->bytes == bytes;
}

RANS_FN uint32_t rans_block_symbols(const rans_layout *l, uint32_t block) {
    uint32_t left = l->symbols - (block << RANS_BLOCK_LOG2);
    return left < RANS_BLOCK ? left : RANS_BLOCK;
}

RANS_FN uint32_t rans_segment_symbols(const rans_layout *l, uint32_t segment) {
    uint32_t left = l->symbols - (segment << l->segment_log2);
    uint32_t full = 1u << l->segment_log2;
    return left < full ? left : full;
}

/* One entry of the decoding table: symbol 8 bits | frequency 12 bits | slot's offset 11 bits. */
RANS_FN uint32_t rans_decode_entry(uint32_t symbol, uint32_t freq, uint32_t offset) {
    return symbol | freq << 8 | offset << 20;
}

/* One entry of the encoding table: frequency 12 bits | first slot 12 bits. */
RANS_FN uint32_t rans_encode_entry(uint32_t freq, uint32_t first) { return freq | first << 12; }

/* Frequencies that sum to 2^11 from counts that sum to n (1..128 Ki). Each symbol that occurs
 * keeps at least 1; what rounding leaves over goes to, or is taken one by one from, the symbol of
 * the largest frequency (the lowest of equals). Integers only, so every twin gets the same. */
RANS_FN void rans_normalise(const uint32_t *counts, uint32_t n, uint32_t *freqs) {
    uint32_t sum = 0;
    for (int s = 0; s < 256; s++) {
        uint32_t f = (uint32_t)(((uint64_t)counts[s] * RANS_PROB_SUM + n / 2) / n);
        freqs[s] = counts[s] && !f ? 1 : f;
        sum += freqs[s];
    }
    while (sum != RANS_PROB_SUM) {
        int top = 0;
        for (int s = 1; s < 256; s++)
            if (freqs[s] > freqs[top])
                top = s;
        if (sum < RANS_PROB_SUM) {
            freqs[top] += RANS_PROB_SUM - sum;
            return;
        }
        freqs[top]--;
        sum--;
    }
}
#endif
