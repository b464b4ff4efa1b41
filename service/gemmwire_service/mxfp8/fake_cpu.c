/* Fake quantization of BF16 rows in one pass: the arithmetic of fake.py, where each step is derived.

   Loops of 32, over arrays that live in registers: a compiler makes vector instructions of them. Products are
   by powers of two, hence exact; -ffp-contract=off keeps the sums apart from them all the same.

   Most blocks hold zeros and numbers that are normal in E4M3, and nothing else. The significand of each is then
   rounded from 8 bits to 4 whatever the scale is, which takes no arithmetic but that of integers, and half the
   time where the processor has instructions for it. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { BLOCK = 32 };

static void any_block(const uint16_t *restrict x, uint16_t *restrict out) {
    int16_t magnitude[BLOCK], amax = 0;
    uint32_t bits[BLOCK];
    float value[BLOCK], scale, inverse;
    for (int i = 0; i < BLOCK; i++) magnitude[i] = (int16_t)(x[i] & 0x7FFF);
    for (int i = 0; i < BLOCK; i++) amax = magnitude[i] > amax ? magnitude[i] : amax;

    /* 1. The scale, from the bits of amax. */
    int32_t scale_bits = ((int32_t)amax << 16) + ((31 << 16) - (8 << 23));
    scale_bits = (scale_bits < 0 ? 0 : scale_bits) & 0x7F800000;
    int32_t inverse_bits = (254 << 23) - scale_bits;
    memcpy(&scale, &scale_bits, sizeof scale);
    memcpy(&inverse, &inverse_bits, sizeof inverse);

    for (int i = 0; i < BLOCK; i++) bits[i] = (uint32_t)(uint16_t)magnitude[i] << 16;
    memcpy(value, bits, sizeof value);
    for (int i = 0; i < BLOCK; i++) {
        float scaled = value[i] * inverse;                                     /* 2. */
        float step = (scaled > 0.015625f ? scaled : 0.015625f) * 1048576.0f;   /* 3. NaN: 2^-6, and NaN below */
        value[i] = ((scaled + step) - step) * scale;                           /* 4. */
    }
    memcpy(bits, value, sizeof bits);
    for (int i = 0; i < BLOCK; i++) out[i] = (uint16_t)((bits[i] >> 16) | (x[i] & 0x8000u));
}

#if defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>

/* Bits of BF16 magnitudes. Of a smaller amax, not even the least normal number of E4M3 is normal in BF16. */
enum { INFINITE = 0x7F80, LEAST_AMAX = (8 + 7) << 7 };

/* Whether the block is of that kind, and done. */
static inline int normal_block(const uint16_t *x, uint16_t *out) {
    const __m512i one = _mm512_set1_epi16(1);
    __m512i bits = _mm512_loadu_si512(x);
    __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi16(0x7FFF));
    __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(magnitude), _mm512_extracti64x4_epi64(magnitude, 1));
    __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    /* There is an instruction for the least of eight, and none for the largest. */
    int amax = 0xFFFF & ~_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1))));
    if (amax < LEAST_AMAX || amax >= INFINITE) return 0;

    int scale = (amax + 31 - (8 << 7)) & INFINITE; /* step 1 of fake.py, in the upper half of its bits */
    int least = scale - (6 << 7);                  /* 2^-6, times the scale */
    /* Less one, by which a zero becomes the largest. */
    __m512i less = _mm512_sub_epi16(magnitude, one);
    if (_mm512_cmplt_epu16_mask(less, _mm512_set1_epi16((short)(least - 1)))) return 0;

    __m512i odd = _mm512_and_si512(_mm512_srli_epi16(magnitude, 4), one);
    __m512i rounded = _mm512_add_epi16(_mm512_add_epi16(magnitude, _mm512_set1_epi16(7)), odd);
    rounded = _mm512_and_si512(rounded, _mm512_set1_epi16(0x7FF0));
    __m512i sign = _mm512_and_si512(bits, _mm512_set1_epi16((short)0x8000));
    _mm512_storeu_si512(out, _mm512_or_si512(rounded, sign));
    return 1;
}

static void block(const uint16_t *x, uint16_t *out) {
    if (!normal_block(x, out)) any_block(x, out);
}
#else
static void block(const uint16_t *x, uint16_t *out) { any_block(x, out); }
#endif

/* x, out: BF16 [m, k], their rows so many elements apart; k is a multiple of 32. */
void gemmwire_fake_quantize(const uint16_t *x, uint16_t *out, size_t m, size_t k, size_t x_stride,
                            size_t out_stride) {
    for (size_t row = 0; row < m; row++)
        for (size_t column = 0; column < k; column += BLOCK)
            block(x + row * x_stride + column, out + row * out_stride + column);
}
