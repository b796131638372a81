/* Mutated streams through every decoder of the kernels, under a sanitizer, in exact allocations.
 *
 * For each stream: the plain, AVX2 and AVX-512 paths of the C twin must give the same verdict and
 * the same bytes, and so must the CUDA source under the shim. What is accepted must be, bit by
 * bit, the encoding of the bytes that came out under the stream's own tables: nothing else passes.
 * (Such bytes may still differ from the original, as with any code without a checksum: the chunk's
 * hash refuses those.) The joins of planes run along. Prints JSON.
 *
 *   fuzz STREAMS SEED
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vector>

extern "C" {
#include "../cpu.h"
#include "../planes/planes.h"
#include "../rans/rans.h"
}
#include "../shim/shim.cpp" /* brings planes.cuh and rans.cuh */

typedef std::vector<uint8_t> bytes;

static uint64_t random_state, streams_done;

static uint32_t draw(uint32_t below) { /* splitmix64 */
    uint64_t z = random_state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (uint32_t)((z ^ z >> 31) >> 32) % below;
}

[[noreturn]] static void fail(const char *what) {
    fprintf(stderr, "stream %" PRIu64 ": %s\n", streams_done, what);
    abort();
}

/* An allocation of exactly this size, so that the sanitizer sees one byte too far. */
struct exact {
    uint8_t *at;
    size_t size;
    explicit exact(size_t n) : at((uint8_t *)malloc(n ? n : 1)), size(n) {}
    exact(const exact &) = delete;
    ~exact() { free(at); }
};

static bytes make_plain() {
    uint32_t kind = draw(1000), size = 1 + draw(600);
    if (kind < 30)
        size = 1 + draw(9000); /* some segments of 4096 */
    if (kind == 0)
        size = RANS_BLOCK - 50 + draw(4200); /* two tables */
    bytes plain(size);
    uint32_t shape = draw(5), base = draw(256), spread = 1 + draw(64);
    for (auto &symbol : plain)
        switch (shape) {
        case 0: symbol = (uint8_t)draw(256); break;
        case 1: symbol = (uint8_t)base; break;
        case 2: symbol = (uint8_t)(base + (draw(spread) & draw(spread))); break;
        case 3: symbol = (uint8_t)(base + __builtin_clz(draw(1u << 30) | 1)); break;
        default: symbol = (uint8_t)(draw(97) ? base : draw(256));
        }
    return plain;
}

static bytes encode(const bytes &plain) {
    /* Short segments matter where there are several; their large blocks are slow to emulate. */
    int segment_log2 = RANS_SEGMENT_LOG2_MAX;
    if (plain.size() > 600 || draw(16) == 0)
        segment_log2 = RANS_SEGMENT_LOG2_MIN + (int)draw(4);
    bytes stream(torpor_rans_bound(plain.size(), segment_log2));
    torpor_cpu_limit((int)draw(3));
    stream.resize(torpor_rans_encode(plain.data(), plain.size(), segment_log2, stream.data(),
                                     stream.size()));
    return stream;
}

/* Moves part of one frequency to another: a table that is still right, of other symbols. */
static void move_frequency(bytes &stream, const rans_layout &l) {
    if (l.present < 2)
        return;
    uint8_t *a = &stream[l.freqs_at + 2 * draw(l.present)];
    uint8_t *b = &stream[l.freqs_at + 2 * draw(l.present)];
    uint32_t most = rans_get16(a), taken = most > 1 ? 1 + draw(most - 1) : 0;
    rans_put16(a, most - taken);
    rans_put16(b, rans_get16(b) + taken);
}

static void mutate(bytes &stream, size_t symbols) {
    static const uint32_t edges[] = {0, 1, 0x7fff, 0x8000, 0xffff, 0x7fffffff, 0x80000000u,
                                     0xffffffffu};
    rans_layout l;
    bool sound = rans_get_header(&l, stream.data(), stream.size(), symbols);
    uint32_t size = (uint32_t)stream.size();
    if (!sound || size < RANS_HEADER + 4)
        return;
    switch (draw(10)) {
    case 0:
        for (uint32_t n = 1 + draw(8); n; n--)
            stream[draw(size)] ^= (uint8_t)(1u << draw(8));
        break;
    case 1:
        for (uint32_t n = 1 + draw(4); n; n--)
            stream[draw(size)] = (uint8_t)draw(256);
        break;
    case 2: stream.resize(draw(size)); break;
    case 3: stream.resize(size + 1 + draw(64)); break;
    case 4: rans_put32(&stream[4 * draw(4)], edges[draw(8)]); break;
    case 5: rans_put32(&stream[l.states_at + 4 * draw(32 * l.segments)],
                       draw(2) ? edges[draw(8)] : draw(1u << 31)); break;
    case 6: { /* counts that still sum to W */
        uint8_t *a = &stream[l.counts_at + 2 * draw(l.segments)];
        uint8_t *b = &stream[l.counts_at + 2 * draw(l.segments)];
        uint32_t by = 1 + draw(40);
        rans_put16(a, rans_get16(a) - by);
        rans_put16(b, rans_get16(b) + by);
        break;
    }
    case 7: move_frequency(stream, l); break;
    case 8: { /* a bitmap with as many bits, for other symbols */
        uint8_t *map = &stream[l.bitmaps_at + 32 * draw(l.blocks)];
        uint32_t a = draw(256), b = draw(256);
        uint32_t bit_a = map[a / 8] >> a % 8 & 1, bit_b = map[b / 8] >> b % 8 & 1;
        if (bit_a != bit_b) {
            map[a / 8] ^= (uint8_t)(1u << a % 8);
            map[b / 8] ^= (uint8_t)(1u << b % 8);
        }
        break;
    }
    default: { /* a run copied over another place */
        uint32_t length = 1 + draw(size < 64 ? size : 64);
        memmove(&stream[draw(size - length + 1)], &stream[draw(size - length + 1)], length);
    }
    }
}

/* Whether `stream` is what its own tables make of `plain`: an encoder of its own, of few lines. */
static bool encodes(const uint8_t *stream, size_t size, const uint8_t *plain, size_t symbols) {
    rans_layout l;
    if (!rans_get_header(&l, stream, size, symbols))
        return false;
    const uint8_t *freq_at = stream + l.freqs_at, *words = stream + l.words_at;
    uint32_t freqs[256] = {}, firsts[256] = {};
    for (uint32_t s = 0; s < l.segments; s++) {
        uint32_t first = s << l.segment_log2, n = rans_segment_symbols(&l, s);
        if (first % RANS_BLOCK == 0) {
            uint32_t slot = 0;
            for (uint32_t symbol = 0; symbol < 256; symbol++) {
                bool there = stream[l.bitmaps_at + 32 * (first / RANS_BLOCK) + symbol / 8] >>
                                 symbol % 8 & 1;
                freqs[symbol] = there ? rans_get16(freq_at) : 0;
                freq_at += there ? 2 : 0;
                firsts[symbol] = slot;
                slot += freqs[symbol];
            }
        }
        uint32_t states[32], count = rans_get16(stream + l.counts_at + 2 * s), left = count;
        for (uint32_t &state : states)
            state = RANS_LOW;
        for (uint32_t i = n; i-- > 0;) {
            uint32_t &x = states[i % 32], symbol = plain[first + i], freq = freqs[symbol];
            if (freq == 0)
                return false;
            if (x >= (uint64_t)freq << 20) {
                if (left == 0 || rans_get16(words + 2 * --left) != (x & 0xffff))
                    return false;
                x >>= 16;
            }
            x = x / freq * RANS_PROB_SUM + x % freq + firsts[symbol];
        }
        if (left)
            return false;
        for (uint32_t lane = 0; lane < 32; lane++)
            if (states[lane] != rans_get32(stream + l.states_at + 128 * s + 4 * lane))
                return false;
        words += 2 * count;
    }
    return true;
}

/* The CUDA source's verdict, with buffers of the sizes that gpu_kernels/device.py gives it. */
static uint32_t decode_shim(const exact &stream, exact &plain) {
    uint32_t segment_log2 = stream.size >= RANS_HEADER ? stream.at[3] : 0, result = 99;
    if (segment_log2 < RANS_SEGMENT_LOG2_MIN || segment_log2 > RANS_SEGMENT_LOG2_MAX)
        return RANS_BAD_HEADER;
    uint32_t blocks = (uint32_t)((plain.size + RANS_BLOCK - 1) / RANS_BLOCK);
    uint32_t segments = (uint32_t)((plain.size - 1) >> segment_log2) + 1;
    uint32_t warps_needed = 1u << (RANS_BLOCK_LOG2 - segment_log2);
    /* A warp for each segment that there is: warps without one only cost emulation. */
    warps_needed = segments < warps_needed ? segments : warps_needed;
    exact freqs_at(4 * blocks), words_at(4 * segments);
    rans_decode_job job = {(uint64_t)stream.at, stream.size,           (uint64_t)plain.at,
                           plain.size,          segment_log2,          (uint64_t)freqs_at.at,
                           (uint64_t)words_at.at, (uint64_t)&result};
    torpor_shim_launch("rans_check", 1, 1, 32, &job);
    torpor_shim_launch("rans_decode", blocks, 1, 32 * warps_needed, &job);
    return result;
}

static void one_join(void) {
    static const int widths[] = {2, 4, 8};
    int width = widths[draw(3)], rotate = (int)draw(2);
    uint32_t n = draw(70), stride = (n + 15) / 16 * 16;
    exact planes(stride * width), plain((size_t)n * width), again((size_t)n * width);
    const uint8_t *at[8];
    for (size_t i = 0; i < planes.size; i++)
        planes.at[i] = (uint8_t)draw(256);
    for (int p = 0; p < width; p++)
        at[p] = planes.at + p * stride;
    torpor_cpu_limit((int)draw(3));
    torpor_planes_join(at, n, width, rotate, plain.at);
    planes_job job = {(uint64_t)again.at, (uint64_t)planes.at, n, stride, (uint64_t)width,
                      (uint64_t)rotate};
    torpor_shim_launch("planes_join", 1, 1, 32, &job);
    if (n && memcmp(plain.at, again.at, plain.size))
        fail("the joins of C and CUDA differ");
}

int main(int argc, char **argv) {
    uint64_t streams = argc > 1 ? strtoull(argv[1], 0, 10) : 1000, verdicts[6] = {};
    random_state = argc > 2 ? strtoull(argv[2], 0, 10) : 1;
    uint64_t unchanged = 0, others = 0;
    bytes plain = make_plain(), base = encode(plain);
    for (; streams_done < streams; streams_done++) {
        if (streams_done % 64 == 0) {
            plain = make_plain();
            base = encode(plain);
        }
        bytes changed = base;
        for (uint32_t n = draw(16) ? 1 : draw(4); n; n--)
            mutate(changed, plain.size());
        size_t symbols = draw(64) ? plain.size() : 1 + draw(700);
        exact stream(changed.size()), out(symbols), other(symbols);
        memcpy(stream.at, changed.data(), changed.size());
        torpor_cpu_limit(TORPOR_PLAIN);
        int verdict = torpor_rans_decode(stream.at, stream.size, out.at, symbols);
        for (int level = TORPOR_AVX2; level <= TORPOR_AVX512; level++) {
            torpor_cpu_limit(level);
            if (torpor_rans_decode(stream.at, stream.size, other.at, symbols) != verdict)
                fail("the C paths disagree whether it is a stream");
            if (!verdict && memcmp(out.at, other.at, symbols))
                fail("the C paths decode other bytes");
        }
        if ((decode_shim(stream, other) == 0) != (verdict == 0))
            fail("C and CUDA disagree whether it is a stream");
        if (!verdict) {
            if (memcmp(out.at, other.at, symbols))
                fail("C and CUDA decode other bytes");
            if (!encodes(stream.at, stream.size, out.at, symbols))
                fail("accepted, though it is not the encoding of what came out");
            bool same = symbols == plain.size() && !memcmp(out.at, plain.data(), symbols);
            unchanged += same;
            others += !same;
        }
        verdicts[verdict]++;
        one_join();
    }
    printf("{\"streams\": %" PRIu64 ", \"refused\": {\"header\": %" PRIu64 ", \"table\": %" PRIu64
           ", \"state\": %" PRIu64 ", \"words\": %" PRIu64 ", \"end\": %" PRIu64
           "}, \"accepted_original\": %" PRIu64 ", \"accepted_left_to_the_hash\": %" PRIu64 "}\n",
           streams, verdicts[1], verdicts[2], verdicts[3], verdicts[4], verdicts[5], unchanged,
           others);
    return 0;
}
