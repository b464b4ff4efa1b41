/* Fake quantization of BF16 rows in one pass: the arithmetic of fake.py, where each step is derived.

   Loops of 32, over arrays that live in registers: a compiler makes vector instructions of them. Products are
   by powers of two, hence exact; -ffp-contract=off keeps the sums apart from them all the same. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { BLOCK = 32 };

static void block(const uint16_t *restrict x, uint16_t *restrict out) {
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

/* x, out: BF16 [m, k], their rows so many elements apart; k is a multiple of 32. */
void gemmwire_fake_quantize(const uint16_t *x, uint16_t *out, size_t m, size_t k, size_t x_stride,
                            size_t out_stride) {
    for (size_t row = 0; row < m; row++)
        for (size_t column = 0; column < k; column += BLOCK)
            block(x + row * x_stride + column, out + row * out_stride + column);
}
