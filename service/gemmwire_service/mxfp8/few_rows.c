/* y = x @ W.T for few rows of x and a W that fits into a core's caches, in BF16 with FP32 sums.

   A library for matmuls takes longer to find out what to do than this takes to do it. All rows of x and a few rows
   of W are summed in registers, 32 products an instruction; a sum's 16 parts are added up at the end. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { MOST_ROWS = 8 };

#if defined(__AVX512BF16__) && defined(__AVX512VL__)
#include <immintrin.h>

const int gemmwire_few_rows = MOST_ROWS;

/* What the registers hold of sums, of W and of x: six rows by four, or eight by three. */
enum { COLUMNS = 32, LANES = 4, LANES_OF_MANY = 3, MANY_ROWS = 7 };

static inline __m512bh load(const uint16_t *at) { return (__m512bh)_mm512_loadu_si512(at); }

/* The sums of four accumulators, one in each lane. */
static inline __m128 added_up(__m512 a, __m512 b, __m512 c, __m512 d) {
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    __m512 all = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

/* To nearest, ties to even; a NaN stays one. */
static inline void store_rounded(uint16_t *at, __m128 y, size_t count) {
    __m128i bits = _mm_castps_si128(y);
    __m128i odd = _mm_and_si128(_mm_srli_epi32(bits, 16), _mm_set1_epi32(1));
    __m128i up = _mm_add_epi32(bits, _mm_add_epi32(odd, _mm_set1_epi32(0x7FFF)));
    __m128i quiet = _mm_or_si128(bits, _mm_set1_epi32(0x400000));
    __m128i nan = _mm_castps_si128(_mm_cmpunord_ps(y, y));
    __m128i rounded = _mm_srli_epi32(_mm_blendv_epi8(up, quiet, nan), 16);
    uint16_t four[8];
    _mm_storeu_si128((__m128i *)four, _mm_packus_epi32(rounded, rounded));
    memcpy(at, four, count * sizeof *at);
}

/* `rows` and `wide` are constants wherever this is called from, so that the sums stay in registers. */
static inline __attribute__((always_inline)) void tile(size_t rows, size_t wide, const uint16_t *x, const uint16_t *w,
                                                       uint16_t *y, size_t k, size_t n, size_t lanes) {
    __m512 sums[MOST_ROWS][LANES];
    for (size_t i = 0; i < rows; i++)
        for (size_t j = 0; j < wide; j++) sums[i][j] = _mm512_setzero_ps();
    /* Where fewer rows of W are left, the last is taken again. */
    const uint16_t *of[LANES];
    for (size_t j = 0; j < wide; j++) of[j] = w + (j < lanes ? j : lanes - 1) * k;
    for (size_t column = 0; column < k; column += COLUMNS) {
        __m512bh weights[LANES];
        for (size_t j = 0; j < wide; j++) weights[j] = load(of[j] + column);
        for (size_t i = 0; i < rows; i++) {
            __m512bh row = load(x + i * k + column);
            for (size_t j = 0; j < wide; j++) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], row, weights[j]);
        }
    }
    for (size_t i = 0; i < rows; i++)
        store_rounded(y + i * n, added_up(sums[i][0], sums[i][1], sums[i][2], sums[i][wide - 1]), lanes);
}

static void tile_of(size_t rows, const uint16_t *x, const uint16_t *w, uint16_t *y, size_t k, size_t n, size_t lanes) {
    switch (rows) {
    case 1: tile(1, LANES, x, w, y, k, n, lanes); break;
    case 2: tile(2, LANES, x, w, y, k, n, lanes); break;
    case 3: tile(3, LANES, x, w, y, k, n, lanes); break;
    case 4: tile(4, LANES, x, w, y, k, n, lanes); break;
    case 5: tile(5, LANES, x, w, y, k, n, lanes); break;
    case 6: tile(6, LANES, x, w, y, k, n, lanes); break;
    case 7: tile(7, LANES_OF_MANY, x, w, y, k, n, lanes); break;
    default: tile(8, LANES_OF_MANY, x, w, y, k, n, lanes);
    }
}

/* x: BF16 [m, k], w: BF16 [n, k], y: BF16 [m, n], all contiguous; m from 1 to MOST_ROWS, k a multiple of 32. */
void gemmwire_multiply_few_rows(const uint16_t *x, const uint16_t *w, uint16_t *y, size_t m, size_t n, size_t k) {
    size_t wide = m < MANY_ROWS ? LANES : LANES_OF_MANY;
    for (size_t j = 0; j < n; j += wide) tile_of(m, x, w + j * k, y + j, k, n, n - j < wide ? n - j : wide);
}
#else
const int gemmwire_few_rows = 0; /* no instruction for it */
#endif
