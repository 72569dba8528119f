// Sums of floats, in an order that does not depend on the width of a vector: number i is added to sum i % SUMS, and then
// those sums are added whose indexes differ by 8, the results whose indexes differ by 4, and so on.
#pragma once

#include "simd.h"

namespace {

constexpr int SUMS = 16;           // that are made side by side
constexpr int SPLIT = SUMS / LANES; // vectors that hold them

// SUMS sums, or the numbers that are added to them next.
struct Sixteen {
    Floats of[SPLIT];
};

// Returns `number` rounded up to a multiple of SUMS.
constexpr int64_t in_sixteens(int64_t number) { return (number + SUMS - 1) / SUMS * SUMS; }

// Adds the sums whose indexes differ by 8 and, if a vector has four lanes, those whose indexes differ by 4.
INLINE Floats folded(const Sixteen &sums) {
#if defined(__AVX512F__)
    return sums.of[0];
#elif defined(__AVX2__)
    return sums.of[0] + sums.of[1];
#else
    return (sums.of[0] + sums.of[2]) + (sums.of[1] + sums.of[3]);
#endif
}

// Returns the sum of the sums.
INLINE float sum(const Sixteen &sums) {
    Floats x = folded(sums);
#if defined(__AVX512F__)
    x += (Floats)_mm512_shuffle_f32x4((__m512)x, (__m512)x, 0x4e);
    x += (Floats)_mm512_shuffle_f32x4((__m512)x, (__m512)x, 0xb1);
#elif defined(__AVX2__)
    x += (Floats)_mm256_permute2f128_ps((__m256)x, (__m256)x, 0x01);
#endif
    return (x[0] + x[2]) + (x[1] + x[3]);
}

// Returns the sums of each of LANES, as one vector.
INLINE Floats sums_of(const Sixteen *v) {
#if defined(__AVX512F__)
    __m512 a[8], b[4], c[2];
    auto of = [&](int i) __attribute__((always_inline)) { return (__m512)v[i].of[0]; };
    for (int i = 0; i < 8; i++) { // a[2 k] has vectors k and k + 4, a[2 k + 1] vectors k + 8 and k + 12
        const __m512 x = of(i / 2 + i % 2 * 8), y = of(i / 2 + i % 2 * 8 + 4);
        a[i] = _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee));
    }
    for (int i = 0; i < 4; i++)
        b[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0xdd));
    for (int i = 0; i < 2; i++)
        c[i] = _mm512_add_ps(_mm512_unpacklo_ps(b[2 * i], b[2 * i + 1]), _mm512_unpackhi_ps(b[2 * i], b[2 * i + 1]));
    const __m512d x = _mm512_castps_pd(c[0]), y = _mm512_castps_pd(c[1]);
    return (Floats)_mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
#elif defined(__AVX2__)
    __m256 b[4], c[2];
    for (int i = 0; i < 4; i++) { // b[k] has vectors k and k + 4
        const __m256 x = (__m256)folded(v[i]), y = (__m256)folded(v[i + 4]);
        b[i] = _mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
    }
    for (int i = 0; i < 2; i++)
        c[i] = _mm256_add_ps(_mm256_unpacklo_ps(b[2 * i], b[2 * i + 1]), _mm256_unpackhi_ps(b[2 * i], b[2 * i + 1]));
    const __m256d x = _mm256_castps_pd(c[0]), y = _mm256_castps_pd(c[1]);
    return (Floats)_mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)), _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
#elif defined(__aarch64__)
    float32x4_t b[2];
    for (int i = 0; i < 2; i++) { // b[i] has vectors 2 i and 2 i + 1
        const float64x2_t x = (float64x2_t)folded(v[2 * i]), y = (float64x2_t)folded(v[2 * i + 1]);
        b[i] = vaddq_f32((float32x4_t)vzip1q_f64(x, y), (float32x4_t)vzip2q_f64(x, y));
    }
    return (Floats)vpaddq_f32(b[0], b[1]);
#else
    Floats sums;
    for (int i = 0; i < LANES; i++) {
        const Floats x = folded(v[i]);
        sums[i] = (x[0] + x[2]) + (x[1] + x[3]);
    }
    return sums;
#endif
}

// The differences of the indexes of sums that `sum` adds, the last addition first.
constexpr int SUM_BITS[] = {1, 2, 4, 8};
constexpr int NUM_SUM_BITS = sizeof SUM_BITS / sizeof *SUM_BITS;

// Calls add(sums, i) for the vectors from numbers i = 0, LANES, ... on of `size` numbers, which returns the sums with
// those of the vector added. Returns the sum of all. Runs of 64 numbers have four times SUMS sums, so that an addition
// need not wait for the one before. `size` is a multiple of SUMS.
template <class F> INLINE float sum_over(int64_t size, F &&add) {
    constexpr int RUNS = 4;
    Sixteen sums[RUNS] = {};
    int64_t i = 0;
    for (; i + RUNS * SUMS <= size; i += RUNS * SUMS)
        for (int r = 0; r < RUNS; r++)
            for (int p = 0; p < SPLIT; p++) sums[r].of[p] = add(sums[r].of[p], i + r * SUMS + p * LANES);
    for (; i < size; i += SUMS)
        for (int p = 0; p < SPLIT; p++) sums[0].of[p] = add(sums[0].of[p], i + p * LANES);
    Sixteen all;
    for (int p = 0; p < SPLIT; p++)
        all.of[p] = (sums[0].of[p] + sums[1].of[p]) + (sums[2].of[p] + sums[3].of[p]);
    return sum(all);
}

// Returns the sum of the squares of `size` numbers, each sixteenth in one sum.
INLINE float sum_of_squares(const float *x, int64_t size) {
    Sixteen sums = {};
    for (int64_t i = 0; i < size; i += SUMS)
        for (int p = 0; p < SPLIT; p++) {
            const Floats v = load_first(x + i + p * LANES, size - i - p * LANES);
            sums.of[p] = fused(v, v, sums.of[p]);
        }
    return sum(sums);
}

} // namespace
