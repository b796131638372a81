/* The inner loops for AVX-512: a step of 32 lanes is two vectors of 16. Included by rans.c. */
#include <immintrin.h>

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,popcnt")))
#define AVX512_INLINE AVX512 static inline __attribute__((always_inline))

/* x / freq by float division, put right by at most one: x < freq * 2^20, so the quotient is below
 * 2^20 and the float's error below 1. Exact, and half the price of a second table. */
AVX512_INLINE __m512i encode16_avx512(__m512i x, __m512i symbols, const uint32_t *table,
                                      uint16_t **words) {
    const __m512i low12 = _mm512_set1_epi32(0xfff), one = _mm512_set1_epi32(1);
    const __m256i places = _mm256_set_epi16(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512i entry = _mm512_i32gather_epi32(symbols, (const int *)table, 4);
    __m512i freq = _mm512_and_si512(entry, low12), first = _mm512_srli_epi32(entry, 12);
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

AVX512 static void encode_avx512(encoder *e, const uint8_t *plain, uint32_t whole,
                                 const uint32_t *table) {
    __m512i x0 = _mm512_loadu_si512(e->state), x1 = _mm512_loadu_si512(e->state + 16);
    uint16_t *words = e->words;
    for (uint32_t at = whole; at; at -= 32) {
        const uint8_t *step = plain + at - 32;
        __m512i s1 = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(step + 16)));
        __m512i s0 = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)step));
        x1 = encode16_avx512(x1, s1, table, &words);
        x0 = encode16_avx512(x0, s0, table, &words);
    }
    _mm512_storeu_si512(e->state, x0);
    _mm512_storeu_si512(e->state + 16, x1);
    e->words = words;
}

AVX512_INLINE __m512i decode16_avx512(__m512i x, const uint32_t *table, const uint8_t **words,
                                      uint8_t *plain) {
    __m512i slot = _mm512_and_si512(x, _mm512_set1_epi32(RANS_PROB_SUM - 1));
    __m512i entry = _mm512_i32gather_epi32(slot, (const int *)table, 4);
    _mm_storeu_si128((__m128i *)plain, _mm512_cvtepi32_epi8(entry));
    __m512i freq = _mm512_and_si512(_mm512_srli_epi32(entry, 8), _mm512_set1_epi32(0xfff));
    x = _mm512_add_epi32(_mm512_mullo_epi32(freq, _mm512_srli_epi32(x, RANS_PROB_BITS)),
                         _mm512_srli_epi32(entry, 20));
    __mmask16 low = _mm512_cmplt_epu32_mask(x, _mm512_set1_epi32(RANS_LOW));
    __m512i next = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)*words));
    next = _mm512_maskz_expand_epi32(low, next);
    *words += 2 * __builtin_popcount(low);
    return _mm512_mask_or_epi32(x, low, _mm512_slli_epi32(x, 16), next);
}

/* Decode whole steps while the stream holds the 64 bytes that a step may load; returns how far. */
AVX512 static uint32_t decode_avx512(decoder *d, uint8_t *plain, uint32_t whole,
                                     const uint32_t *table) {
    __m512i x0 = _mm512_loadu_si512(d->state), x1 = _mm512_loadu_si512(d->state + 16);
    const uint8_t *words = d->words;
    uint32_t at = 0;
    for (; at < whole && d->wall - words >= 64; at += 32) {
        x0 = decode16_avx512(x0, table, &words, plain + at);
        x1 = decode16_avx512(x1, table, &words, plain + at + 16);
    }
    _mm512_storeu_si512(d->state, x0);
    _mm512_storeu_si512(d->state + 16, x1);
    d->words = words;
    return at;
}
