/* The encoder's inner loop for AVX-512: a step of 32 lanes is two vectors of 16. Included by
 * rans.c. The decoder stays with AVX2 there too: its table is 8 KiB and must be gathered, and
 * gathers of 16 were slower than gathers of 8 (1.4 against 1.8 GB/s on Zen 4). */
#include <immintrin.h>

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,popcnt")))
#define AVX512_INLINE AVX512 static inline __attribute__((always_inline))

/* The encoding table as 16 registers: two gathers of 16 cost more than eight permutations. */
typedef struct {
    __m512i freq[8], first[8];
} table_avx512;

AVX512_INLINE void load_table_avx512(table_avx512 *t, const uint32_t *table) {
    uint16_t freq[256], first[256];
    for (int s = 0; s < 256; s++) {
        freq[s] = (uint16_t)(table[s] & 0xfff);
        first[s] = (uint16_t)(table[s] >> 12);
    }
    for (int v = 0; v < 8; v++) {
        t->freq[v] = _mm512_loadu_si512(freq + 32 * v);
        t->first[v] = _mm512_loadu_si512(first + 32 * v);
    }
}

/* 32 symbols (as 16-bit lanes) looked up in 256 entries. */
AVX512_INLINE __m512i look_up_avx512(const __m512i *entries, __m512i symbols) {
    __m512i low = _mm512_mask_blend_epi16(
        _mm512_test_epi16_mask(symbols, _mm512_set1_epi16(64)),
        _mm512_permutex2var_epi16(entries[0], symbols, entries[1]),
        _mm512_permutex2var_epi16(entries[2], symbols, entries[3]));
    __m512i high = _mm512_mask_blend_epi16(
        _mm512_test_epi16_mask(symbols, _mm512_set1_epi16(64)),
        _mm512_permutex2var_epi16(entries[4], symbols, entries[5]),
        _mm512_permutex2var_epi16(entries[6], symbols, entries[7]));
    return _mm512_mask_blend_epi16(_mm512_test_epi16_mask(symbols, _mm512_set1_epi16(128)), low,
                                   high);
}

/* x / freq by float division, put right by at most one: x < freq * 2^20, so the quotient is below
 * 2^20 and the float's error below 1. Exact. */
AVX512_INLINE __m512i encode16_avx512(__m512i x, __m512i freq, __m512i first, uint16_t **words) {
    const __m512i one = _mm512_set1_epi32(1);
    const __m256i places = _mm256_set_epi16(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __mmask16 full = _mm512_cmpge_epu32_mask(_mm512_srli_epi32(x, 20), freq);
    int made = __builtin_popcount(full);
    /* The words of the full lanes, in lane order, at the top of a 16-word vector. */
    __m256i low = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(full, x));
    __m256i turn = _mm256_add_epi16(places, _mm256_set1_epi16((short)made));
    _mm256_storeu_si256((__m256i *)(*words - 16), _mm256_permutexvar_epi16(turn, low));
    *words -= made;
    x = _mm512_mask_srli_epi32(x, full, x, 16);
    __m512i q = _mm512_cvttps_epi32(_mm512_div_ps(_mm512_cvtepi32_ps(x), _mm512_cvtepi32_ps(freq)));
    __m512i rest = _mm512_sub_epi32(x, _mm512_mullo_epi32(q, freq));
    __mmask16 below = _mm512_movepi32_mask(rest);
    q = _mm512_mask_sub_epi32(q, below, q, one);
    rest = _mm512_mask_add_epi32(rest, below, rest, freq);
    __mmask16 above = _mm512_cmpge_epi32_mask(rest, freq);
    q = _mm512_mask_add_epi32(q, above, q, one);
    rest = _mm512_mask_sub_epi32(rest, above, rest, freq);
    return _mm512_add_epi32(_mm512_slli_epi32(q, RANS_PROB_BITS), _mm512_add_epi32(rest, first));
}

AVX512_INLINE __m512i half_avx512(__m512i words, int upper) {
    return _mm512_cvtepu16_epi32(upper ? _mm512_extracti64x4_epi64(words, 1)
                                       : _mm512_castsi512_si256(words));
}

AVX512 static void encode_avx512(encoder *e, const uint8_t *plain, uint32_t whole,
                                 const uint32_t *table) {
    __m512i x0 = _mm512_loadu_si512(e->state), x1 = _mm512_loadu_si512(e->state + 16);
    uint16_t *words = e->words;
    table_avx512 t;
    load_table_avx512(&t, table);
    for (uint32_t at = whole; at; at -= 32) {
        __m512i symbols =
            _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(plain + at - 32)));
        __m512i freq = look_up_avx512(t.freq, symbols), first = look_up_avx512(t.first, symbols);
        x1 = encode16_avx512(x1, half_avx512(freq, 1), half_avx512(first, 1), &words);
        x0 = encode16_avx512(x0, half_avx512(freq, 0), half_avx512(first, 0), &words);
    }
    _mm512_storeu_si512(e->state, x0);
    _mm512_storeu_si512(e->state + 16, x1);
    e->words = words;
}
