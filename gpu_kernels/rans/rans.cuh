/* 32-lane rANS on a GPU; the twin is rans.c, the format docs/planes.md. A warp is a segment, a
 * thread a lane, a block of threads one table of 128 Ki symbols. Jobs lie along grid y.
 *
 *   encode  rans_tables    grid (blocks, jobs), 256 threads
 *           rans_segments  grid (blocks, jobs), 32 * segments in a block
 *           rans_measure   grid (1, jobs), 32 threads
 *           rans_pack      grid (blocks, jobs), 32 * segments in a block
 *   decode  rans_check     grid (1, jobs), 32 threads
 *           rans_decode    grid (blocks, jobs), 32 * segments in a block
 *
 * Bounds of a job (addresses are multiples of 16; symbols in 1..2^30):
 *   plain       symbols bytes
 *   stream      encoding: capacity bytes, at least 16 + 32 blocks + 130 segments + 512 blocks;
 *               decoding: stream_bytes
 *   room        encoding: 2 << segment_log2 bytes for each segment, for words on their way
 *   freqs       encoding: 512 bytes for each block
 *   freqs_at    4 bytes for each block: where its frequencies begin, counted in frequencies
 *   words_at    4 bytes for each segment: where its words begin, counted in words
 *   result      4 bytes; encoding: the stream's bytes, 0 where it does not fit;
 *               decoding: 0, or a refusal of rans.h (set to 0 by rans_check)
 */
#ifndef TORPOR_RANS_CUH
#define TORPOR_RANS_CUH
#include "../shim/cuda.h"

#include "layout.h"

struct rans_encode_job {
    uint64_t plain, symbols, segment_log2, stream, capacity, room, freqs, freqs_at, words_at,
        result;
};
struct rans_decode_job {
    uint64_t stream, stream_bytes, plain, symbols, segment_log2, freqs_at, words_at, result;
};

#define RANS_WARP 0xffffffffu

__device__ __forceinline__ uint32_t lanes_below(uint32_t lane) { return (1u << lane) - 1; }

/* The sum of the values of the lanes up to this one. */
__device__ __forceinline__ uint32_t sum_up_to(uint32_t value, uint32_t lane) {
    for (uint32_t by = 1; by < 32; by *= 2) {
        uint32_t other = __shfl_up_sync(RANS_WARP, value, by);
        value += lane >= by ? other : 0;
    }
    return value;
}

/* How many of a bitmap's bits lie below bit `symbol`. The bitmap is 4-byte aligned. */
__device__ __forceinline__ uint32_t rank_in(const uint32_t *bitmap, uint32_t symbol) {
    uint32_t rank = 0;
    for (uint32_t word = 0; word < symbol / 32; word++)
        rank += __popc(bitmap[word]);
    return rank + __popc(bitmap[symbol / 32] & lanes_below(symbol % 32));
}

/* firsts[s] = the sum of freqs[0..s), for the 256 symbols; by the first warp of a block. */
__device__ __forceinline__ void sum_firsts(const uint16_t *freqs, uint16_t *firsts) {
    uint32_t lane = threadIdx.x, mine = 0;
    for (uint32_t s = 8 * lane; s < 8 * lane + 8; s++)
        mine += freqs[s];
    uint32_t first = sum_up_to(mine, lane) - mine;
    for (uint32_t s = 8 * lane; s < 8 * lane + 8; s++) {
        firsts[s] = (uint16_t)first;
        first += freqs[s];
    }
}

/* Counts one block's symbols and makes its frequencies, as rans_normalise() does. */
extern "C" __global__ void __launch_bounds__(256) rans_tables(const rans_encode_job *jobs) {
    __shared__ uint32_t counts[8][256], sum, top;
    const rans_encode_job job = jobs[blockIdx.y];
    rans_layout l;
    if (!rans_place(&l, job.symbols, (uint32_t)job.segment_log2) || blockIdx.x >= l.blocks)
        return;
    const uint8_t *plain = (const uint8_t *)job.plain + ((uint64_t)blockIdx.x << RANS_BLOCK_LOG2);
    uint32_t n = rans_block_symbols(&l, blockIdx.x), symbol = threadIdx.x;
    for (uint32_t warp = 0; warp < 8; warp++)
        counts[warp][symbol] = 0;
    if (symbol == 0)
        sum = 0;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < n; i += 256)
        atomicAdd(&counts[threadIdx.x / 32][plain[i]], 1);
    __syncthreads();
    uint32_t count = 0;
    for (uint32_t warp = 0; warp < 8; warp++)
        count += counts[warp][symbol];
    uint32_t freq = (uint32_t)(((uint64_t)count * RANS_PROB_SUM + n / 2) / n);
    freq = count && !freq ? 1 : freq;
    atomicAdd(&sum, freq);
    __syncthreads();
    while (sum != RANS_PROB_SUM) {
        __syncthreads(); /* all have read the sum */
        if (symbol == 0)
            top = 0;
        __syncthreads();
        atomicMax(&top, freq << 8 | (255 - symbol)); /* the largest; of equals the lowest symbol */
        __syncthreads();
        if (symbol == 255 - (top & 255)) {
            uint32_t change = sum < RANS_PROB_SUM ? RANS_PROB_SUM - sum : (uint32_t)-1;
            freq += change;
            sum += change;
        }
        __syncthreads();
    }
    ((uint16_t *)job.freqs)[blockIdx.x * 256 + symbol] = (uint16_t)freq;
    uint32_t bits = __ballot_sync(RANS_WARP, freq != 0);
    if (symbol % 32 == 0)
        ((uint32_t *)((uint8_t *)job.stream + l.bitmaps_at))[blockIdx.x * 8 + symbol / 32] = bits;
}

/* Encodes each segment back to front into the end of its room; writes states and counts. */
extern "C" __global__ void __launch_bounds__(1024) rans_segments(const rans_encode_job *jobs) {
    __shared__ uint16_t freqs[256], firsts[256];
    __shared__ uint32_t reciprocal[256], rest[256]; /* freq 12 | bias 12 | shift 4 */
    const rans_encode_job job = jobs[blockIdx.y];
    rans_layout l;
    if (!rans_place(&l, job.symbols, (uint32_t)job.segment_log2) || blockIdx.x >= l.blocks)
        return;
    for (uint32_t s = threadIdx.x; s < 256; s += blockDim.x)
        freqs[s] = ((const uint16_t *)job.freqs)[blockIdx.x * 256 + s];
    __syncthreads();
    if (threadIdx.x < 32)
        sum_firsts(freqs, firsts);
    __syncthreads();
    for (uint32_t s = threadIdx.x; s < 256; s += blockDim.x) {
        uint32_t freq = freqs[s], first = firsts[s];
        /* x / freq as a product, exact for x < 2^31; for freq 1 the product gives x - 1, which
         * the bias makes good. x' = x + bias + quotient * (2^11 - freq). */
        if (freq > 1) {
            uint32_t shift = 31 - __clz(freq - 1);
            reciprocal[s] = (uint32_t)((((uint64_t)1 << (32 + shift)) + freq - 1) / freq);
            rest[s] = freq | first << 12 | shift << 24;
        } else {
            reciprocal[s] = 0xffffffffu;
            rest[s] = freq | (first + RANS_PROB_SUM - 1) << 12;
        }
    }
    __syncthreads();
    uint32_t segment = (blockIdx.x << (RANS_BLOCK_LOG2 - l.segment_log2)) + threadIdx.x / 32;
    if (segment >= l.segments)
        return;
    uint32_t lane = threadIdx.x % 32, n = rans_segment_symbols(&l, segment);
    const uint8_t *plain = (const uint8_t *)job.plain + ((uint64_t)segment << l.segment_log2);
    uint16_t *end = (uint16_t *)job.room + ((uint64_t)(segment + 1) << l.segment_log2);
    uint16_t *words = end;
    uint32_t x = RANS_LOW;
    for (uint32_t step = (n + 31) / 32; step-- > 0;) {
        uint32_t index = step * 32 + lane;
        bool active = index < n;
        uint32_t symbol = active ? plain[index] : 0, entry = rest[symbol];
        uint32_t freq = entry & 0xfff;
        bool full = active && x >> 20 >= freq;
        uint32_t voted = __ballot_sync(RANS_WARP, full);
        words -= __popc(voted);
        if (full) {
            words[__popc(voted & lanes_below(lane))] = (uint16_t)x;
            x >>= 16;
        }
        if (active) {
            uint32_t quotient = __umulhi(x, reciprocal[symbol]) >> (entry >> 24);
            x += (entry >> 12 & 0xfff) + quotient * (RANS_PROB_SUM - freq);
        }
    }
    uint8_t *stream = (uint8_t *)job.stream;
    ((uint32_t *)(stream + l.states_at))[segment * RANS_LANES + lane] = x;
    if (lane == 0)
        ((uint16_t *)(stream + l.counts_at))[segment] = (uint16_t)(end - words);
}

/* Running sums: where each block's frequencies and each segment's words begin. Returns both
 * totals; `fair` tells whether every count is possible. */
__device__ __forceinline__ void sum_sections(const rans_layout &l, const uint8_t *stream,
                                             uint32_t *freqs_at, uint32_t *words_at,
                                             uint32_t *present, uint32_t *words, bool *fair) {
    uint32_t lane = threadIdx.x % 32, total = 0;
    const uint32_t *bitmaps = (const uint32_t *)(stream + l.bitmaps_at);
    for (uint32_t from = 0; from < l.blocks; from += 32) {
        uint32_t block = from + lane, mine = 0;
        for (uint32_t word = 0; block < l.blocks && word < 8; word++)
            mine += __popc(bitmaps[block * 8 + word]);
        uint32_t up_to = sum_up_to(mine, lane);
        if (block < l.blocks)
            freqs_at[block] = total + up_to - mine;
        total += __shfl_sync(RANS_WARP, up_to, 31);
    }
    *present = total;
    total = 0;
    bool mine_fair = true;
    const uint16_t *counts = (const uint16_t *)(stream + l.counts_at);
    for (uint32_t from = 0; from < l.segments; from += 32) {
        uint32_t segment = from + lane, mine = 0;
        if (segment < l.segments) {
            mine = counts[segment];
            mine_fair = mine_fair && mine <= rans_segment_symbols(&l, segment);
        }
        uint32_t up_to = sum_up_to(mine, lane);
        if (segment < l.segments)
            words_at[segment] = total + up_to - mine;
        total += __shfl_sync(RANS_WARP, up_to, 31);
    }
    *words = total;
    *fair = __ballot_sync(RANS_WARP, mine_fair) == RANS_WARP;
}

/* Lays the stream out and writes its header. */
extern "C" __global__ void __launch_bounds__(32) rans_measure(const rans_encode_job *jobs) {
    const rans_encode_job job = jobs[blockIdx.y];
    rans_layout l;
    uint32_t present, words, *result = (uint32_t *)job.result;
    bool fair;
    if (!rans_place(&l, job.symbols, (uint32_t)job.segment_log2))
        return;
    sum_sections(l, (const uint8_t *)job.stream, (uint32_t *)job.freqs_at,
                 (uint32_t *)job.words_at, &present, &words, &fair);
    if (threadIdx.x == 0) {
        *result = rans_finish(&l, present, words) && l.bytes <= job.capacity ? l.bytes : 0;
        if (*result)
            rans_put_header((uint8_t *)job.stream, &l);
    }
}

/* Moves frequencies and words to their places. */
extern "C" __global__ void __launch_bounds__(1024) rans_pack(const rans_encode_job *jobs) {
    const rans_encode_job job = jobs[blockIdx.y];
    rans_layout l;
    if (!rans_place(&l, job.symbols, (uint32_t)job.segment_log2) || blockIdx.x >= l.blocks ||
        *(const uint32_t *)job.result == 0)
        return;
    uint8_t *stream = (uint8_t *)job.stream;
    if (!rans_finish(&l, rans_get32(stream + 8), rans_get32(stream + 12)))
        return;
    const uint32_t *bitmap = (const uint32_t *)(stream + l.bitmaps_at) + blockIdx.x * 8;
    uint16_t *freqs = (uint16_t *)(stream + l.freqs_at) + ((uint32_t *)job.freqs_at)[blockIdx.x];
    for (uint32_t s = threadIdx.x; s < 256; s += blockDim.x) {
        uint16_t freq = ((const uint16_t *)job.freqs)[blockIdx.x * 256 + s];
        if (freq)
            freqs[rank_in(bitmap, s)] = freq;
    }
    uint32_t segment = (blockIdx.x << (RANS_BLOCK_LOG2 - l.segment_log2)) + threadIdx.x / 32;
    if (segment >= l.segments)
        return;
    uint32_t count = ((const uint16_t *)(stream + l.counts_at))[segment];
    const uint16_t *from =
        (const uint16_t *)job.room + ((uint64_t)(segment + 1) << l.segment_log2) - count;
    uint16_t *to = (uint16_t *)(stream + l.words_at) + ((const uint32_t *)job.words_at)[segment];
    for (uint32_t i = threadIdx.x % 32; i < count; i += 32)
        to[i] = from[i];
}

/* Checks the header and the sizes of all sections before anything is decoded. */
extern "C" __global__ void __launch_bounds__(32) rans_check(const rans_decode_job *jobs) {
    const rans_decode_job job = jobs[blockIdx.y];
    const uint8_t *stream = (const uint8_t *)job.stream;
    rans_layout l;
    uint32_t present, words, *result = (uint32_t *)job.result;
    bool fair;
    /* The room was measured for segment_log2: another one in the stream would outgrow it. */
    if (!rans_get_header(&l, stream, job.stream_bytes, job.symbols) ||
        l.segment_log2 != job.segment_log2) {
        if (threadIdx.x == 0)
            *result = RANS_BAD_HEADER;
        return;
    }
    sum_sections(l, stream, (uint32_t *)job.freqs_at, (uint32_t *)job.words_at, &present, &words,
                 &fair);
    if (threadIdx.x == 0)
        *result = fair && present == l.present && words == l.words ? RANS_OK : RANS_BAD_HEADER;
}

/* Decodes one block; `result` is 0 from rans_check, or nothing is done. */
extern "C" __global__ void __launch_bounds__(1024) rans_decode(const rans_decode_job *jobs) {
    __shared__ uint32_t table[RANS_PROB_SUM], sum, bad, checked;
    __shared__ uint16_t freqs[256], firsts[256];
    const rans_decode_job job = jobs[blockIdx.y];
    const uint8_t *stream = (const uint8_t *)job.stream;
    uint32_t *result = (uint32_t *)job.result;
    rans_layout l;
    if (threadIdx.x == 0) {
        checked = *result == RANS_OK; /* other blocks may refuse meanwhile: one look for all */
        sum = bad = 0;
    }
    __syncthreads();
    if (!checked || !rans_get_header(&l, stream, job.stream_bytes, job.symbols) ||
        blockIdx.x >= l.blocks)
        return;
    const uint32_t *bitmap = (const uint32_t *)(stream + l.bitmaps_at) + blockIdx.x * 8;
    const uint16_t *stored =
        (const uint16_t *)(stream + l.freqs_at) + ((const uint32_t *)job.freqs_at)[blockIdx.x];
    for (uint32_t s = threadIdx.x; s < 256; s += blockDim.x) {
        bool present = bitmap[s / 32] >> (s % 32) & 1;
        uint32_t freq = present ? stored[rank_in(bitmap, s)] : 0;
        if (present && (freq == 0 || freq > RANS_PROB_SUM))
            bad = 1;
        freqs[s] = (uint16_t)freq;
        atomicAdd(&sum, freq);
    }
    __syncthreads();
    if (bad || sum != RANS_PROB_SUM) {
        if (threadIdx.x == 0)
            atomicMax(result, RANS_BAD_TABLE);
        return;
    }
    if (threadIdx.x < 32)
        sum_firsts(freqs, firsts);
    __syncthreads();
    for (uint32_t slot = threadIdx.x; slot < RANS_PROB_SUM; slot += blockDim.x) {
        uint32_t symbol = 0; /* the last one whose first slot is not above this one */
        for (uint32_t half = 128; half; half /= 2)
            symbol += firsts[symbol + half] <= slot ? half : 0;
        table[slot] = rans_decode_entry(symbol, freqs[symbol], slot - firsts[symbol]);
    }
    __syncthreads();
    uint32_t segment = (blockIdx.x << (RANS_BLOCK_LOG2 - l.segment_log2)) + threadIdx.x / 32;
    if (segment >= l.segments)
        return;
    uint32_t lane = threadIdx.x % 32, n = rans_segment_symbols(&l, segment);
    uint8_t *plain = (uint8_t *)job.plain + ((uint64_t)segment << l.segment_log2);
    const uint16_t *words =
        (const uint16_t *)(stream + l.words_at) + ((const uint32_t *)job.words_at)[segment];
    uint32_t count = ((const uint16_t *)(stream + l.counts_at))[segment], taken = 0;
    uint32_t x = ((const uint32_t *)(stream + l.states_at))[segment * RANS_LANES + lane];
    if (__ballot_sync(RANS_WARP, x < RANS_LOW || x >= RANS_LOW << 16)) {
        if (lane == 0)
            atomicMax(result, RANS_BAD_STATE);
        return;
    }
    for (uint32_t index = lane; index < ((n + 31) & ~31u); index += 32) {
        bool active = index < n;
        uint32_t entry = table[x & (RANS_PROB_SUM - 1)];
        uint32_t next = (entry >> 8 & 0xfff) * (x >> RANS_PROB_BITS) + (entry >> 20);
        bool low = active && next < RANS_LOW;
        uint32_t voted = __ballot_sync(RANS_WARP, low);
        if (taken + __popc(voted) > count) {
            taken = count + 1; /* more words than there are: no word is read */
            break;
        }
        if (low)
            next = next << 16 | words[taken + __popc(voted & lanes_below(lane))];
        taken += __popc(voted);
        if (active) {
            plain[index] = (uint8_t)entry;
            x = next;
        }
    }
    bool ended = __ballot_sync(RANS_WARP, x != RANS_LOW) == 0;
    if (lane == 0 && (taken != count || !ended))
        atomicMax(result, taken != count ? RANS_BAD_WORDS : RANS_BAD_END);
}
#endif
