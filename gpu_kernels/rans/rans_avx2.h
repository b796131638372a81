/* The decoder's inner loop for AVX2: a step of 32 lanes is four vectors of 8. Included by rans.c.
 * AVX-512 gains nothing here: gathers of 16 were slower than gathers of 8 (1.4 against 1.8 GB/s on
 * Zen 4). */
#include <immintrin.h>

#define AVX2 __attribute__((target("avx2,popcnt")))
#define AVX2_INLINE AVX2 static inline __attribute__((always_inline))

/* For each 8-bit mask: gives each marked lane the number of its word. 2 KiB, filled at load. */
static uint8_t spread_lanes[256][8];

__attribute__((constructor)) static void fill_lanes(void) {
    for (int mask = 0; mask < 256; mask++)
        for (int lane = 0, marked = 0; lane < 8; lane++)
            if (mask >> lane & 1)
                spread_lanes[mask][lane] = (uint8_t)marked++;
}

AVX2_INLINE __m256i lanes_avx2(const uint8_t *eight) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)eight));
}

/* Returns the table's entries, whose low bytes are the symbols. */
AVX2_INLINE __m256i decode8_avx2(__m256i *state, const uint32_t *table, const uint8_t **words) {
    __m256i x = *state, slot = _mm256_and_si256(x, _mm256_set1_epi32(RANS_PROB_SUM - 1));
    __m256i entry = _mm256_i32gather_epi32((const int *)table, slot, 4);
    __m256i freq = _mm256_and_si256(_mm256_srli_epi32(entry, 8), _mm256_set1_epi32(0xfff));
    x = _mm256_add_epi32(_mm256_mullo_epi32(freq, _mm256_srli_epi32(x, RANS_PROB_BITS)),
                         _mm256_srli_epi32(entry, 20));
    __m256i is_low = _mm256_cmpgt_epi32(_mm256_set1_epi32(RANS_LOW), x);
    unsigned low = (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(is_low));
    __m256i next = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)*words));
    next = _mm256_permutevar8x32_epi32(next, lanes_avx2(spread_lanes[low]));
    *words += 2 * __builtin_popcount(low);
    *state = _mm256_blendv_epi8(x, _mm256_or_si256(_mm256_slli_epi32(x, 16), next), is_low);
    return _mm256_and_si256(entry, _mm256_set1_epi32(255));
}

/* Decode whole steps while the stream holds the 64 bytes that a step may load; returns how far. */
AVX2 static uint32_t decode_avx2(decoder *d, uint8_t *plain, uint32_t whole,
                                 const uint32_t *table) {
    __m256i x[4];
    const uint8_t *words = d->words;
    uint32_t at = 0;
    for (int v = 0; v < 4; v++)
        x[v] = _mm256_loadu_si256((const __m256i *)(d->state + 8 * v));
    for (; at < whole && d->wall - words >= 64; at += 32) {
        __m256i a = decode8_avx2(&x[0], table, &words), b = decode8_avx2(&x[1], table, &words);
        __m256i c = decode8_avx2(&x[2], table, &words), e = decode8_avx2(&x[3], table, &words);
        /* Packing works within 128-bit halves; the last permutation restores the order. */
        __m256i bytes = _mm256_packus_epi16(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, e));
        bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_set_epi32(7, 3, 6, 2, 5, 1, 4, 0));
        _mm256_storeu_si256((__m256i *)(plain + at), bytes);
    }
    for (int v = 0; v < 4; v++)
        _mm256_storeu_si256((__m256i *)(d->state + 8 * v), x[v]);
    d->words = words;
    return at;
}
