#include "huffman.h"

#include <string.h>

#include "../count.h"

#define BLOCK (128u << 10)
#define BITS_MAX 11    /* the longest code that zstd allows for literals */
#define SYMBOLS_MAX 129 /* 128 weights of 4 bits, and one that follows from them */
#define SLACK 64       /* streams are stored eight bytes at a time */
#define TINY 64        /* blocks below this are stored raw */

typedef struct {
    uint8_t bits[256];
    uint16_t codes[256];
    uint32_t symbols; /* one above the highest that occurs */
    int longest;
} code_table;

/* Code lengths of an unlimited Huffman code, by merging the two rarest trees again and again. */
static void merge(const uint32_t *counts, uint8_t *bits) {
    uint32_t weight[512];
    int16_t parent[512];
    int16_t leaves[256], nodes = 256;
    int many = 0, leaf = 0, inner = 256;
    for (int s = 0; s < 256; s++)
        if (counts[s]) {
            int at = many++;
            for (; at > 0 && counts[leaves[at - 1]] > counts[s]; at--)
                leaves[at] = leaves[at - 1];
            leaves[at] = (int16_t)s;
            weight[s] = counts[s];
        }
    for (int merged = 0; merged < many - 1; merged++) {
        uint32_t sum = 0;
        for (int pick = 0; pick < 2; pick++) {
            int take = leaf < many && (inner == nodes || weight[leaves[leaf]] <= weight[inner])
                           ? leaves[leaf++]
                           : inner++;
            sum += weight[take];
            parent[take] = nodes;
        }
        weight[nodes++] = sum;
    }
    int16_t depth[512];
    depth[nodes - 1] = 0;
    for (int node = nodes - 2; node >= 256; node--)
        depth[node] = (int16_t)(depth[parent[node]] + 1);
    for (int s = 0; s < 256; s++)
        bits[s] = counts[s] ? (uint8_t)(depth[parent[s]] + 1) : 0;
}

/* Make a code of at most BITS_MAX bits that wastes no bit pattern. 0 where that does not work. */
static int limit(const uint32_t *counts, uint8_t *bits) {
    int32_t used = 0;
    for (int s = 0; s < 256; s++) {
        bits[s] = bits[s] > BITS_MAX ? BITS_MAX : bits[s];
        used += bits[s] ? 1 << (BITS_MAX - bits[s]) : 0;
    }
    while (used > 1 << BITS_MAX) { /* lengthen the longest code that can be, the rarest of equals */
        int best = -1;
        for (int s = 0; s < 256; s++)
            if (bits[s] && bits[s] < BITS_MAX &&
                (best < 0 || bits[s] > bits[best] ||
                 (bits[s] == bits[best] && counts[s] < counts[best])))
                best = s;
        if (best < 0)
            return 0;
        bits[best]++;
        used -= 1 << (BITS_MAX - bits[best]);
    }
    while (used < 1 << BITS_MAX) { /* shorten the most frequent one that fits */
        int best = -1;
        for (int s = 0; s < 256; s++)
            if (bits[s] > 1 && used + (1 << (BITS_MAX - bits[s])) <= 1 << BITS_MAX &&
                (best < 0 || counts[s] > counts[best]))
                best = s;
        if (best < 0)
            return 0;
        used += 1 << (BITS_MAX - bits[best]);
        bits[best]--;
    }
    return 1;
}

/* zstd's order: the longest codes first and from 0, equal lengths by symbol. */
static void assign(code_table *t) {
    uint32_t next = 0;
    for (int length = t->longest; length > 0; length--) {
        for (int s = 0; s < 256; s++)
            if (t->bits[s] == length)
                t->codes[s] = (uint16_t)next++;
        next >>= 1;
    }
}

static void store64(uint8_t *to, uint64_t value) { memcpy(to, &value, 8); }

static inline void put_code(uint32_t entry, uint64_t *held, uint32_t *bits) {
    *held |= (uint64_t)(entry >> 8) << *bits;
    *bits += entry & 255;
}

/* One stream: the last symbol first, low bits first, a 1 above the last code. */
static uint8_t *put_stream(const uint32_t *entries, const uint8_t *plain, uint32_t n,
                           uint8_t *to) {
    uint64_t held = 0;
    uint32_t bits = 0, i = n;
    for (; i >= 5; i -= 5) { /* 7 bits left over and 5 codes of 11 fit 64 */
        uint64_t five = 0; /* by themselves first, so that five codes wait once for the rest */
        uint32_t five_bits = 0;
        for (uint32_t back = 1; back <= 5; back++)
            put_code(entries[plain[i - back]], &five, &five_bits);
        held |= five << bits;
        bits += five_bits;
        store64(to, held);
        to += bits >> 3;
        held >>= bits & ~7u;
        bits &= 7;
    }
    while (i)
        put_code(entries[plain[--i]], &held, &bits);
    held |= (uint64_t)1 << bits;
    store64(to, held);
    return to + (bits >> 3) + 1;
}

static uint8_t *put_block_header(uint8_t *to, int last, int type, uint32_t size) {
    uint32_t header = (uint32_t)last | (uint32_t)type << 1 | size << 3;
    to[0] = (uint8_t)header, to[1] = (uint8_t)(header >> 8), to[2] = (uint8_t)(header >> 16);
    return to + 3;
}

static uint8_t *put_raw(const uint8_t *plain, uint32_t n, int last, uint8_t *to) {
    to = put_block_header(to, last, 0, n);
    memcpy(to, plain, n);
    return to + n;
}

/* One block in the smallest of its three kinds; NULL where its table needs FSE. */
static uint8_t *put_block(const uint8_t *plain, uint32_t n, int last, uint8_t *to) {
    uint32_t counts[256], entries[256], present = 0;
    code_table t = {.symbols = 0};
    torpor_count(plain, n, counts);
    for (uint32_t s = 0; s < 256; s++)
        if (counts[s]) {
            present++;
            t.symbols = s + 1;
        }
    if (present == 1) {
        to = put_block_header(to, last, 1, n);
        *to = plain[0];
        return to + 1;
    }
    if (n < TINY)
        return put_raw(plain, n, last, to);
    merge(counts, t.bits);
    uint64_t total = 0;
    if (!limit(counts, t.bits))
        return 0;
    for (int s = 0; s < 256; s++) {
        total += (uint64_t)counts[s] * t.bits[s];
        t.longest = t.bits[s] > t.longest ? t.bits[s] : t.longest;
    }
    uint32_t table = 1 + t.symbols / 2;
    if (total / 8 + table + 32 >= n)
        return put_raw(plain, n, last, to);
    if (t.symbols > SYMBOLS_MAX)
        return 0;
    assign(&t);
    for (int s = 0; s < 256; s++)
        entries[s] = (uint32_t)t.codes[s] << 8 | t.bits[s];

    uint8_t *literals = to + 3, *body = literals + 5, *at = body;
    uint32_t weights = t.symbols - 1; /* the last one follows from the others */
    *at++ = (uint8_t)(127 + weights);
    for (uint32_t s = 0; s < weights; s += 2) {
        uint32_t high = t.bits[s] ? (uint32_t)(t.longest + 1 - t.bits[s]) : 0, low = 0;
        if (s + 1 < weights && t.bits[s + 1])
            low = (uint32_t)(t.longest + 1 - t.bits[s + 1]);
        *at++ = (uint8_t)(high << 4 | low);
    }
    uint8_t *jumps = at;
    uint32_t quarter = (n + 3) / 4;
    at += 6;
    for (uint32_t stream = 0; stream < 4; stream++) {
        uint32_t from = stream * quarter, size = stream < 3 ? quarter : n - 3 * quarter;
        uint8_t *end = put_stream(entries, plain + from, size, at);
        if (stream < 3) {
            jumps[2 * stream] = (uint8_t)(end - at);
            jumps[2 * stream + 1] = (uint8_t)((end - at) >> 8);
        }
        at = end;
    }
    /* Literals: Huffman with its table, four streams, sizes of 18 bits; then no sequence. */
    uint64_t header = 2 | 3 << 2 | (uint64_t)n << 4 | (uint64_t)(at - body) << 22;
    for (int i = 0; i < 5; i++)
        literals[i] = (uint8_t)(header >> 8 * i);
    *at++ = 0;
    put_block_header(to, last, 2, (uint32_t)(at - literals));
    return at;
}

uint64_t torpor_huffman_bound(uint64_t size) {
    return 9 + size + 3 * (size / BLOCK + 1) + SLACK;
}

uint64_t torpor_huffman_frame(const uint8_t *plain, uint64_t size, uint8_t *frame,
                              uint64_t capacity) {
    /* Magic; a descriptor that says: one segment, content size in 4 bytes, no checksum. */
    static const uint8_t head[5] = {0x28, 0xb5, 0x2f, 0xfd, 0xa0};
    if (size == 0 || size > 1u << 30 || capacity < torpor_huffman_bound(size))
        return 0;
    memcpy(frame, head, 5);
    for (int i = 0; i < 4; i++)
        frame[5 + i] = (uint8_t)(size >> 8 * i);
    uint8_t *to = frame + 9;
    for (uint64_t from = 0; from < size && to; from += BLOCK) {
        uint32_t n = size - from < BLOCK ? (uint32_t)(size - from) : BLOCK;
        to = put_block(plain + from, n, from + n == size, to);
    }
    return to ? (uint64_t)(to - frame) : 0;
}
