// The two ways to multiply a number of x by a vector of numbers, and add the products to float sums: one
// column at a time in float, or pairs of columns in bfloat16. Linears and attention use both.
#pragma once

#include "simd.h"

namespace {

struct ByFloats {
    static constexpr int COLUMNS = 1;
    typedef float Weight; // of one column
    typedef Floats Vector;
    static INLINE Floats multiply(Floats sums, const float *x, Floats w) { return sums + *x * w; }
};

#if defined(__AVX512BF16__)
constexpr bool HAS_PAIRS = true;
struct ByPairs {
    static constexpr int COLUMNS = 2;
    typedef uint32_t Weight; // of a pair of columns
    typedef Words Vector;
    static INLINE Floats multiply(Floats sums, const bf16 *x, Words w) {
        uint32_t pair;
        memcpy(&pair, x, 4);
        return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32((int)pair), (__m512bh)w);
    }
};
#else
constexpr bool HAS_PAIRS = false;
typedef ByFloats ByPairs;
#endif

} // namespace
