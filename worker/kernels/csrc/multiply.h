// The ways to multiply a number of x by a vector of numbers, and add the products to sums.
//
// - One column at a time in float, or pairs of columns in bfloat16, added to floats. Linears and attention
//   use both.
// - Quads of columns in integers, added to integers: four bytes of each weight's row times four signed bytes of x.
//   Only linears use these. The bytes of weights are signed on ARM, and unsigned otherwise.
#pragma once

#include "simd.h"

namespace {

struct ByFloats {
    static constexpr int COLUMNS = 1;
    typedef float Weight; // of one column
    typedef Floats Vector;
    static INLINE Floats multiply(Floats sums, const float *x, Floats w) { return fused(splat(*x), w, sums); }
};

// The same for linears whose bits differ between instruction sets anyway, because they read numbers that are not rounded
// to eight bits. Without the instruction, a fused addition takes several times as long.
struct ByQuickFloats : ByFloats {
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

constexpr int MOST_SHORT = 32767;

#if defined(__ARM_FEATURE_DOTPROD)
constexpr bool SIGNED_QUADS = true;
#else
constexpr bool SIGNED_QUADS = false;
#endif

// Whether an instruction multiplies pairs of rows (arm_quads.h).
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool HAS_PAIR_PRODUCTS = true;
#else
constexpr bool HAS_PAIR_PRODUCTS = false;
#endif

// The integers that sums of products of quads start at, and the conversion of such sums.
struct FromZero {
    static INLINE Ints start() { return Ints{}; }
    static INLINE Floats floats(Ints sums) { return __builtin_convertvector(sums, Floats); }
};

// The same from the bits of 1.5 * 2^23. As a float, a sum is this number plus the integers, exactly, if their magnitude is
// less than 2^22. So one subtraction converts them. More units of most processors subtract than convert.
struct FromPower {
    // Loaded for each sum on ARM: its vector units are busy, and the units that load are not.
    static INLINE Ints start() {
#if defined(__aarch64__)
        static constexpr float POWER[LANES] = {0x1.8p23f, 0x1.8p23f, 0x1.8p23f, 0x1.8p23f};
        Ints power;
        asm volatile("ldr %q0, %1" : "=w"(power) : "m"(POWER));
        return power;
#else
        return (Ints)splat(0x1.8p23f);
#endif
    }
    static INLINE Floats floats(Ints sums) { return (Floats)sums - 0x1.8p23f; }
};

// Whether an instruction multiplies quads and adds all four products in 32 bits.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
constexpr bool HAS_QUAD_PRODUCTS = true;
#else
constexpr bool HAS_QUAD_PRODUCTS = false;
#endif

#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
// Emits no instruction. Without it the compiler adds integers in another order, which keeps more products
// than there are registers. tests/support/avx512_emulation.h defines it as nothing.
#ifndef KEEP_ORDER
#define KEEP_ORDER(vector) asm("" : "+x"(vector))
#endif

// An instruction adds pairs of products in 16 bits. A sum of several pairs must not exceed MOST_SHORT.
constexpr bool ADDS_IN_SHORTS = true;
typedef int16_t QuadSums __attribute__((vector_size(LANES * 4)));
INLINE QuadSums add_products(QuadSums sums, Words weights, uint32_t x) {
#if defined(__AVX512BW__)
    sums += (QuadSums)_mm512_maddubs_epi16((__m512i)weights, _mm512_set1_epi32((int)x));
#else
    sums += (QuadSums)_mm256_maddubs_epi16((__m256i)weights, _mm256_set1_epi32((int)x));
#endif
    KEEP_ORDER(sums);
    return sums;
}
// Adds neighbouring sums, times `factor`.
INLINE Ints in_32_bits(QuadSums sums, int factor) {
#if defined(__AVX512BW__)
    return (Ints)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16((short)factor));
#else
    return (Ints)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16((short)factor));
#endif
}
#else
// All four products are added in 32 bits.
constexpr bool ADDS_IN_SHORTS = false;
typedef Ints QuadSums;
INLINE QuadSums add_products(QuadSums sums, Words weights, uint32_t x) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32((int)x));
#elif defined(__AVXVNNI__)
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, _mm256_set1_epi32((int)x));
#else
    for (int i = 0; i < 32; i += 8) sums += (Ints)(weights >> i & 0xff) * (int8_t)(x >> i);
    return sums;
#endif
}
INLINE Ints in_32_bits(QuadSums sums, int factor) { return sums * factor; }
#endif

// Signed bytes, and their magnitudes. A product with the magnitude of a weight, of x with the sign of the weight, needs
// no offset that makes weights positive, with which a sum of two products would exceed MOST_SHORT.
struct SignedWords {
    Words words, magnitudes;
};
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool MULTIPLIES_SIGNED = true;
static_assert(2 * 128 * 127 <= MOST_SHORT); // a sum of two products
INLINE SignedWords signed_words(Words words) { return {words, (Words)_mm256_abs_epi8((__m256i)words)}; }
INLINE Ints add_products(Ints sums, const SignedWords &weights, uint32_t x) {
    const __m256i signed_x = _mm256_sign_epi8(_mm256_set1_epi32((int)x), (__m256i)weights.words);
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)weights.magnitudes, signed_x);
    return sums + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
#else
constexpr bool MULTIPLIES_SIGNED = false;
INLINE SignedWords signed_words(Words words) { return {words, words}; }
INLINE Ints add_products(Ints sums, const SignedWords &, uint32_t) { return sums; }
#endif

} // namespace
