/* The C twin of rans.cuh: the same bytes, on any CPU. Decoding is fast, by rans_avx2.h: it restores
 * what a GPU encoded. Encoding is for the tests and for small planes. */
#include "rans.h"

#include <string.h>

#include "../cpu.h"
#include "layout.h"

/* A segment's words are made back to front. */
#define WORDS_ROOM (1u << RANS_SEGMENT_LOG2_MAX)

typedef struct {
    uint32_t state[RANS_LANES];
    uint16_t *words; /* encoding: the first word made so far */
} encoder;

typedef struct {
    uint32_t state[RANS_LANES];
    const uint8_t *words; /* the next word to take */
    const uint8_t *end;   /* where this segment's words end */
    const uint8_t *wall;  /* where the stream ends: vector loads stay below it */
} decoder;

/* ---- one step, one lane ---------------------------------------------------------------- */

static inline void encode_lane(encoder *e, uint32_t lane, uint32_t entry) {
    uint32_t freq = entry & 0xfff, first = entry >> 12, x = e->state[lane];
    if (x >> 20 >= freq) {
        *--e->words = (uint16_t)x;
        x >>= 16;
    }
    e->state[lane] = (x / freq << RANS_PROB_BITS) + x % freq + first;
}

static inline int decode_lane(decoder *d, uint32_t lane, const uint32_t *table, uint8_t *symbol) {
    uint32_t x = d->state[lane], entry = table[x & (RANS_PROB_SUM - 1)];
    x = (entry >> 8 & 0xfff) * (x >> RANS_PROB_BITS) + (entry >> 20);
    if (x < RANS_LOW) {
        if (d->words == d->end)
            return 0;
        x = x << 16 | rans_get16(d->words);
        d->words += 2;
    }
    d->state[lane] = x;
    *symbol = (uint8_t)entry;
    return 1;
}

/* Encode plain[from..to) back to front; lane is index mod 32. */
static void encode_plainly(encoder *e, const uint8_t *plain, uint32_t from, uint32_t to,
                           const uint32_t *table) {
    while (to-- > from)
        encode_lane(e, to % RANS_LANES, table[plain[to]]);
}

static int decode_plainly(decoder *d, uint8_t *plain, uint32_t from, uint32_t to,
                          const uint32_t *table) {
    for (; from < to; from++)
        if (!decode_lane(d, from % RANS_LANES, table, plain + from))
            return 0;
    return 1;
}

#if defined(__x86_64__)
#include "rans_avx2.h"
#endif

/* ---- a segment ------------------------------------------------------------------------- */

static void encode_segment(encoder *e, const uint8_t *plain, uint32_t symbols,
                           const uint32_t *table) {
    for (uint32_t lane = 0; lane < RANS_LANES; lane++)
        e->state[lane] = RANS_LOW;
    encode_plainly(e, plain, 0, symbols, table);
}

static int decode_segment(decoder *d, uint8_t *plain, uint32_t symbols, const uint32_t *table) {
    uint32_t whole = symbols & ~(RANS_LANES - 1), done = 0;
    for (uint32_t lane = 0; lane < RANS_LANES; lane++)
        if (d->state[lane] < RANS_LOW || d->state[lane] >= RANS_LOW << 16)
            return RANS_BAD_STATE;
#if defined(__x86_64__)
    if (torpor_cpu_level() >= TORPOR_AVX2)
        done = decode_avx2(d, plain, whole, table);
#else
    (void)whole;
#endif
    if (d->words > d->end || !decode_plainly(d, plain, done, symbols, table) ||
        d->words != d->end)
        return RANS_BAD_WORDS;
    for (uint32_t lane = 0; lane < RANS_LANES; lane++)
        if (d->state[lane] != RANS_LOW)
            return RANS_BAD_END;
    return RANS_OK;
}

/* ---- tables ---------------------------------------------------------------------------- */

/* Write one block's bitmap, and its frequencies where they fit; returns how many there are. */
static uint32_t put_table(const uint32_t *freqs, uint8_t *bitmap, uint8_t *at,
                          const uint8_t *wall) {
    uint32_t present = 0;
    memset(bitmap, 0, 32);
    for (uint32_t s = 0; s < 256; s++)
        if (freqs[s]) {
            bitmap[s >> 3] |= (uint8_t)(1u << (s & 7));
            if (wall - at >= 2 * (int64_t)present + 2)
                rans_put16(at + 2 * present, freqs[s]);
            present++;
        }
    return present;
}

static uint32_t present_in(const uint8_t *bitmap) {
    uint32_t present = 0;
    for (int i = 0; i < 32; i++)
        present += (uint32_t)__builtin_popcount(bitmap[i]);
    return present;
}

/* Read one block's frequencies, checked: each in 1..2^11, their sum exactly 2^11. */
static int get_table(const uint8_t *bitmap, const uint8_t *at, uint32_t *freqs) {
    uint32_t sum = 0;
    for (uint32_t s = 0; s < 256; s++) {
        freqs[s] = 0;
        if (bitmap[s >> 3] >> (s & 7) & 1) {
            freqs[s] = rans_get16(at);
            at += 2;
            if (freqs[s] == 0 || freqs[s] > RANS_PROB_SUM)
                return 0;
            sum += freqs[s];
        }
    }
    return sum == RANS_PROB_SUM;
}

/* ---- streams --------------------------------------------------------------------------- */

uint64_t torpor_rans_bound(uint64_t symbols, int segment_log2) {
    rans_layout l;
    if (segment_log2 < 0 || !rans_place(&l, symbols, (uint32_t)segment_log2))
        return 0;
    return l.freqs_at + 512 * (uint64_t)l.blocks + 2 * symbols;
}

uint64_t torpor_rans_encode(const uint8_t *plain, uint64_t symbols, int segment_log2,
                            uint8_t *stream, uint64_t capacity) {
    rans_layout l;
    uint32_t freqs[256], counts[256], table[256], present = 0, words = 0;
    uint16_t room[WORDS_ROOM];
    if (segment_log2 < 0 || !rans_place(&l, symbols, (uint32_t)segment_log2) ||
        l.freqs_at > capacity)
        return 0;
    for (uint32_t b = 0; b < l.blocks; b++) {
        uint32_t n = rans_block_symbols(&l, b);
        memset(counts, 0, sizeof counts);
        for (uint32_t i = 0; i < n; i++)
            counts[plain[((uint64_t)b << RANS_BLOCK_LOG2) + i]]++;
        rans_normalise(counts, n, freqs);
        uint64_t at = l.freqs_at + 2 * (uint64_t)present;
        present += put_table(freqs, stream + l.bitmaps_at + 32 * b,
                             stream + (at < capacity ? at : capacity), stream + capacity);
    }
    if (l.freqs_at + 2 * (uint64_t)present > capacity)
        return 0;
    const uint8_t *next_freqs = stream + l.freqs_at;
    uint8_t *next_words = stream + l.freqs_at + 2 * present;
    for (uint32_t s = 0; s < l.segments; s++) {
        uint32_t first = s << segment_log2;
        if (!(first & (RANS_BLOCK - 1))) {
            const uint8_t *bitmap = stream + l.bitmaps_at + 32 * (first >> RANS_BLOCK_LOG2);
            uint32_t slot = 0;
            get_table(bitmap, next_freqs, freqs);
            next_freqs += 2 * present_in(bitmap);
            for (int i = 0; i < 256; i++) {
                table[i] = rans_encode_entry(freqs[i], slot);
                slot += freqs[i];
            }
        }
        encoder e = {.words = room + WORDS_ROOM};
        encode_segment(&e, plain + first, rans_segment_symbols(&l, s), table);
        uint32_t made = (uint32_t)(room + WORDS_ROOM - e.words);
        if (2 * (uint64_t)made > (uint64_t)(stream + capacity - next_words))
            return 0;
        memcpy(next_words, e.words, 2 * (size_t)made);
        next_words += 2 * (size_t)made;
        words += made;
        rans_put16(stream + l.counts_at + 2 * s, made);
        for (uint32_t lane = 0; lane < RANS_LANES; lane++)
            rans_put32(stream + l.states_at + 128 * s + 4 * lane, e.state[lane]);
    }
    if (!rans_finish(&l, present, words))
        return 0;
    rans_put_header(stream, &l);
    return l.bytes;
}

int torpor_rans_decode(const uint8_t *stream, uint64_t bytes, uint8_t *plain, uint64_t symbols) {
    rans_layout l;
    uint32_t freqs[256], table[RANS_PROB_SUM], present = 0, words = 0;
    if (!rans_get_header(&l, stream, bytes, symbols))
        return RANS_BAD_HEADER;
    for (uint32_t b = 0; b < l.blocks; b++)
        present += present_in(stream + l.bitmaps_at + 32 * b);
    for (uint32_t s = 0; s < l.segments; s++) {
        uint32_t made = rans_get16(stream + l.counts_at + 2 * s);
        if (made > rans_segment_symbols(&l, s)) /* one word a symbol at most; keeps the sum small */
            return RANS_BAD_HEADER;
        words += made;
    }
    if (present != l.present || words != l.words)
        return RANS_BAD_HEADER;

    const uint8_t *next_freqs = stream + l.freqs_at;
    decoder d = {.words = stream + l.words_at, .wall = stream + bytes};
    for (uint32_t s = 0; s < l.segments; s++) {
        uint32_t first = s << l.segment_log2;
        if (!(first & (RANS_BLOCK - 1))) {
            const uint8_t *bitmap = stream + l.bitmaps_at + 32 * (first >> RANS_BLOCK_LOG2);
            if (!get_table(bitmap, next_freqs, freqs))
                return RANS_BAD_TABLE;
            next_freqs += 2 * present_in(bitmap);
            uint32_t slot = 0;
            for (uint32_t symbol = 0; symbol < 256; symbol++)
                for (uint32_t i = 0; i < freqs[symbol]; i++)
                    table[slot++] = rans_decode_entry(symbol, freqs[symbol], i);
        }
        d.end = d.words + 2 * rans_get16(stream + l.counts_at + 2 * s);
        for (uint32_t lane = 0; lane < RANS_LANES; lane++)
            d.state[lane] = rans_get32(stream + l.states_at + 128 * s + 4 * lane);
        int refusal = decode_segment(&d, plain + first, rans_segment_symbols(&l, s), table);
        if (refusal)
            return refusal;
    }
    return RANS_OK;
}
