// Number types, and vectors as wide as the instruction set that this file is compiled for. sums.h and functions.h have
// what must not depend on their width.
//
// Everything is computed in float. Vectors are the compiler's vector extensions, so the same lines
// become AVX-512, AVX2, SSE or NEON. Intrinsics are used only if the extensions have no equivalent.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

// Forces the compiler to read memory again. Emits no instruction.
INLINE void forget_memory() { asm volatile("" ::: "memory"); }

struct bf16 {
    uint16_t bits;
};

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

INLINE Floats splat(float x) { return x - Floats{}; }
INLINE Words words(Floats x) { return (Words)x; }

template <class V> INLINE V load_as(const void *from) {
    V v;
    memcpy(&v, from, sizeof v);
    return v;
}
template <class V> INLINE void store_as(void *to, V v) { memcpy(to, &v, sizeof v); }

INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

// Extends each number to 32 bits. Intrinsics are used because compilers emit several instructions for
// what one instruction does.
INLINE Words widened(Halves x) {
#if defined(__AVX512F__)
    return (Words)_mm512_cvtepu16_epi32((__m256i)x);
#elif defined(__AVX2__)
    return (Words)_mm256_cvtepu16_epi32((__m128i)x);
#else
    return __builtin_convertvector(x, Words);
#endif
}

INLINE Floats load(const float *from) { return load_as<Floats>(from); }
INLINE Floats load(const bf16 *from) { return (Floats)(widened(load_as<Halves>(from)) << 16); }


// Rounds to bfloat16: to nearest, ties to even, as torch does. NaN stays NaN.
INLINE Halves rounded_in_integers(Floats x) {
    Words bits = words(x);
    Words even = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    Words is_nan = (Words)(x != x);
    return __builtin_convertvector((even & ~is_nan) | (is_nan & 0x7fc0), Halves);
}
// The same, but AVX-512's instruction makes subnormal numbers zeros.
INLINE Halves rounded(Floats x) {
#if defined(__AVX512BF16__)
    return (Halves)_mm512_cvtneps_pbh((__m512)x);
#else
    return rounded_in_integers(x);
#endif
}
INLINE void store(float *to, Floats x) { store_as(to, x); }
INLINE void store(bf16 *to, Floats x) { store_as(to, rounded(x)); }

// Loads the first `count` numbers of a vector, or all if `count` is more, and zeros instead of the others. None if
// `count` is not positive.
template <class N> INLINE Floats load_first(const N *from, int64_t count) {
    if (count >= LANES) return load(from);
    if (count <= 0) return Floats{};
    N all[LANES] = {};
    memcpy(all, from, (size_t)count * sizeof(N));
    return load(all);
}

// Stores the first `count` lanes of x, or all if `count` is more. None if `count` is not positive.
template <class N> INLINE void store_first(N *to, Floats x, int64_t count) {
    if (count >= LANES) return store(to, x);
    if (count <= 0) return;
    N all[LANES];
    store(all, x);
    memcpy(to, all, (size_t)count * sizeof(N));
}

// Rounds x as if it were stored in the type of the first argument and loaded again.
INLINE Floats as_stored(float, Floats x) { return x; }
INLINE Floats as_stored(bf16, Floats x) {
    return (Floats)(widened(rounded(x)) << 16);
}

// ---- a * b + c, rounded once.
//
// The compiler may not fuse a multiplication with an addition by itself (-ffp-contract=off in setup.py): which ones it
// chose would depend on the code around them, on the compiler and on the instruction set. What is fused is written here.

#if defined(__FMA__) || defined(__aarch64__)
constexpr bool HAS_FMA = true;
INLINE float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
INLINE Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#endif
}
#else
constexpr bool HAS_FMA = false;
// The product is exact in double. The sum is rounded to odd: if it is not exact, its last bit becomes 1. So rounding it
// again, to float, gives what rounding the exact sum would give. Not inlined, because it is compiled in many places.
__attribute__((noinline)) Floats fused(Floats a, Floats b, Floats c) {
    typedef double Doubles __attribute__((vector_size(LANES * 8)));
    typedef int64_t Longs __attribute__((vector_size(LANES * 8)));
    const Doubles product = __builtin_convertvector(a, Doubles) * __builtin_convertvector(b, Doubles);
    const Doubles addend = __builtin_convertvector(c, Doubles), sum = product + addend;
    const Doubles part = sum - product, error = (product - (sum - part)) + (addend - part);
    const Longs is_exact = (Longs)((error == Doubles{}) | (error != error)); // NaN: the sum is not finite
    const Longs is_even = ((Longs)sum & 1) - 1, grows = ((Longs)error ^ (Longs)sum) >= 0; // all bits set, or none
    const Longs step = (grows & 1) | ~grows;
    return __builtin_convertvector((Doubles)((Longs)sum + (step & is_even & ~is_exact)), Floats);
}
INLINE float fused(float a, float b, float c) { return fused(splat(a), splat(b), splat(c))[0]; }
#endif

INLINE Floats max_of(Floats a, Floats b) { return a > b ? a : b; }

INLINE float max_in(Floats x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float best = x[0];
    for (int i = 1; i < LANES; i++) best = x[i] > best ? x[i] : best;
    return best;
#endif
}

// Returns the greatest lane.
INLINE int32_t max_in(Ints x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)x);
#elif defined(__AVX2__)
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1)));
#elif defined(__aarch64__)
    return vmaxvq_s32((int32x4_t)x);
#else
    int32_t most = x[0];
    for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
    return most;
#endif
}

// Returns the sum of all lanes.
INLINE int32_t sum(Ints x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)x);
#elif defined(__AVX2__)
    __m128i sums = _mm_add_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    sums = _mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0xb1)));
#elif defined(__aarch64__)
    return vaddvq_s32((int32x4_t)x);
#else
    int32_t total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
#endif
}

INLINE Floats square_root(Floats x) {
#if defined(__aarch64__)
    return (Floats)vsqrtq_f32((float32x4_t)x);
#else
    for (int i = 0; i < LANES; i++) x[i] = std::sqrt(x[i]);
    return x;
#endif
}

// Returns table[b] in place of each byte b, of 0 to 15.
INLINE Words looked_up(const int8_t (&table)[16], Words bytes) {
#if defined(__AVX512BW__)
    const __m512i everywhere = _mm512_broadcast_i32x4(load_as<__m128i>(table));
    return (Words)_mm512_shuffle_epi8(everywhere, (__m512i)bytes);
#elif defined(__AVX2__)
    const __m256i everywhere = _mm256_broadcastsi128_si256(load_as<__m128i>(table));
    return (Words)_mm256_shuffle_epi8(everywhere, (__m256i)bytes);
#elif defined(__aarch64__)
    return (Words)vqtbl1q_s8(load_as<int8x16_t>(table), (uint8x16_t)bytes);
#else
    uint8_t each[LANES * 4];
    store_as(each, bytes);
    for (uint8_t &byte : each) byte = (uint8_t)table[byte];
    return load_as<Words>(each);
#endif
}

// Loads float16 numbers, the type of scales in quantised files. Exact for all finite numbers.
INLINE Floats load_f16(const uint16_t *from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(load_as<__m256i>(from));
#elif defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(load_as<__m128i>(from));
#elif defined(__aarch64__)
    return (Floats)vcvt_f32_f16(load_as<float16x4_t>(from));
#else
    Words half = widened(load_as<Halves>(from));
    Floats size = (Floats)((half & 0x7fff) << 13) * 0x1p112f;
    return (Floats)(words(size) | ((half & 0x8000) << 16));
#endif
}

} // namespace
