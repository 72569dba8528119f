// Products of quads on ARM, whose instructions multiply signed bytes: `sdot` as other processors do, a word of x by a
// vector of weights; `smmla` a pair of rows of x by the weights of two outputs, eight columns at a time.
#pragma once

#include "simd.h"

#if defined(__ARM_FEATURE_DOTPROD)
namespace {

// Calls body(i) for i = 0, 1, ..., COUNT - 1, which are constants: an instruction contains the index of a word of x.
template <int COUNT, int FIRST = 0, class Body> INLINE void for_constants(Body &&body) {
    if constexpr (FIRST < COUNT) {
        body(std::integral_constant<int, FIRST>{});
        for_constants<COUNT, FIRST + 1>(body);
    }
}

// Adds the products of ROWS rows of x, each WORDS words, and the words quad(w, j) of VECTORS vectors of outputs to
// `total`.
template <int WORDS, int ROWS, int VECTORS, class QuadOf>
INLINE void add_by_words(const uint8_t *const (&x)[ROWS], QuadOf &&quad, Ints (&total)[ROWS][VECTORS]) {
    for_constants<WORDS / 4>([&](auto four) __attribute__((always_inline)) {
        int8x16_t words[ROWS];
        for (int m = 0; m < ROWS; m++) words[m] = load_as<int8x16_t>(x[m] + four * 16);
        for_constants<4>([&](auto lane) __attribute__((always_inline)) {
            for (int j = 0; j < VECTORS; j++) {
                const int8x16_t across = (int8x16_t)quad(four * 4 + lane, j);
                for (int m = 0; m < ROWS; m++)
                    total[m][j] = (Ints)vdotq_laneq_s32((int32x4_t)total[m][j], across, words[m], lane.value);
            }
            // Otherwise the compiler loads more than the registers hold.
            if (VECTORS == 4 ? lane % 2 == 1 : ROWS > 1) forget_memory();
        });
    });
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
// The same for pairs of rows. An odd last row is a pair with itself.
template <int WORDS, int ROWS, int VECTORS, class QuadOf>
INLINE void add_by_pairs(const uint8_t *const (&x)[ROWS], QuadOf &&quad, Ints (&total)[ROWS][VECTORS]) {
    constexpr int PAIRS = (ROWS + 1) / 2;
    int32x4_t sums[PAIRS][VECTORS][2] = {}; // of two outputs each: both of the first row, then of the second
    for (int four = 0; four < WORDS; four += 4) {
        int8x16_t both[PAIRS][2]; // two words of the first row, then of the second
        for (int p = 0; p < PAIRS; p++) {
            const int64x2_t first = load_as<int64x2_t>(x[2 * p] + four * 4);
            const int64x2_t second = load_as<int64x2_t>(x[2 * p + 1 < ROWS ? 2 * p + 1 : 2 * p] + four * 4);
            both[p][0] = (int8x16_t)vzip1q_s64(first, second);
            both[p][1] = (int8x16_t)vzip2q_s64(first, second);
        }
        for (int half = 0; half < 2; half++)
            for (int j = 0; j < VECTORS; j++) {
                const int32x4_t even = (int32x4_t)quad(four + 2 * half, j), odd = (int32x4_t)quad(four + 2 * half + 1, j);
                const int8x16_t low = (int8x16_t)vzip1q_s32(even, odd), high = (int8x16_t)vzip2q_s32(even, odd);
                for (int p = 0; p < PAIRS; p++) {
                    sums[p][j][0] = vmmlaq_s32(sums[p][j][0], both[p][half], low);
                    sums[p][j][1] = vmmlaq_s32(sums[p][j][1], both[p][half], high);
                }
            }
    }
    for (int m = 0; m < ROWS; m++)
        for (int j = 0; j < VECTORS; j++) {
            const int64x2_t low = (int64x2_t)sums[m / 2][j][0], high = (int64x2_t)sums[m / 2][j][1];
            total[m][j] += (Ints)(m % 2 == 0 ? vzip1q_s64(low, high) : vzip2q_s64(low, high));
        }
}
#endif

} // namespace
#endif
