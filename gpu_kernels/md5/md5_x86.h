/* Eight streams in the eight words of a vector. Included by md5.c. */
#include <immintrin.h>

#define AVX2 __attribute__((target("avx2")))
#define AVX512 __attribute__((target("avx2,avx512f,avx512vl")))

/* Words k to k+7 of each stream become eight vectors, one for each word: an 8 x 8 transposition. */
AVX2 static inline __attribute__((always_inline)) void
eight_words(const uint8_t *const *at, uint64_t offset, __m256i *w) {
    __m256i r[8], s[8];
    for (int i = 0; i < 8; i++)
        r[i] = _mm256_loadu_si256((const __m256i *)(at[i] + offset));
    for (int i = 0; i < 8; i += 2) {
        s[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        s[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_unpacklo_epi64(s[i], s[i + 2]);
        r[i + 1] = _mm256_unpackhi_epi64(s[i], s[i + 2]);
        r[i + 2] = _mm256_unpacklo_epi64(s[i + 1], s[i + 3]);
        r[i + 3] = _mm256_unpackhi_epi64(s[i + 1], s[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        w[i] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x20);
        w[i + 4] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
    }
}

#define ADD _mm256_add_epi32
#define STEP(f, a, b, c, d, k, s, t)                                                             \
    a = ADD(b, ROL(ADD(ADD(a, ADD(w[k], _mm256_set1_epi32((int)t))), f(b, c, d)), s));
#define BLOCKS                                                                                   \
    __m256i sum[4];                                                                              \
    for (int v = 0; v < 4; v++)                                                                  \
        sum[v] = _mm256_set_epi32((int)states[7][v], (int)states[6][v], (int)states[5][v],       \
                                  (int)states[4][v], (int)states[3][v], (int)states[2][v],       \
                                  (int)states[1][v], (int)states[0][v]);                         \
    for (uint64_t offset = 0; blocks; blocks--, offset += 64) {                                  \
        __m256i a = sum[0], b = sum[1], c = sum[2], d = sum[3], w[16];                           \
        eight_words(at, offset, w);                                                              \
        eight_words(at, offset + 32, w + 8);                                                     \
        STEPS(STEP)                                                                              \
        sum[0] = ADD(sum[0], a);                                                                 \
        sum[1] = ADD(sum[1], b);                                                                 \
        sum[2] = ADD(sum[2], c);                                                                 \
        sum[3] = ADD(sum[3], d);                                                                 \
    }                                                                                            \
    for (int v = 0; v < 4; v++) {                                                                \
        uint32_t words[8];                                                                       \
        _mm256_storeu_si256((__m256i *)words, sum[v]);                                           \
        for (int i = 0; i < 8; i++)                                                              \
            states[i][v] = words[i];                                                             \
    }

#define ROL(x, s) _mm256_or_si256(_mm256_slli_epi32(x, s), _mm256_srli_epi32(x, 32 - (s)))
#define F(b, c, d) _mm256_xor_si256(d, _mm256_and_si256(b, _mm256_xor_si256(c, d)))
#define G(b, c, d) _mm256_xor_si256(c, _mm256_and_si256(d, _mm256_xor_si256(b, c)))
#define H(b, c, d) _mm256_xor_si256(_mm256_xor_si256(b, c), d)
#define I(b, c, d)                                                                               \
    _mm256_xor_si256(c, _mm256_or_si256(b, _mm256_xor_si256(d, _mm256_set1_epi32(-1))))
AVX2 static void blocks_avx2(uint32_t (*states)[4], const uint8_t *const *at, uint64_t blocks) {
    BLOCKS
}
#undef ROL
#undef F
#undef G
#undef H
#undef I

/* A rotation and any function of three words are one instruction each here. */
#define ROL(x, s) _mm256_rol_epi32(x, s)
#define F(b, c, d) _mm256_ternarylogic_epi32(b, c, d, 0xca)
#define G(b, c, d) _mm256_ternarylogic_epi32(b, c, d, 0xe4)
#define H(b, c, d) _mm256_ternarylogic_epi32(b, c, d, 0x96)
#define I(b, c, d) _mm256_ternarylogic_epi32(b, c, d, 0x39)
AVX512 static void blocks_avx512(uint32_t (*states)[4], const uint8_t *const *at,
                                 uint64_t blocks) {
    BLOCKS
}
#undef ROL
#undef F
#undef G
#undef H
#undef I
