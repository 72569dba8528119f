// Keys and values as the cache stores them: the numbers of each head in number type N, in bfloat16, or rounded to
// eight bits.
//
// A rounded head is D integers from -127 to 127, in bytes, and then their scale, a float. A number is its
// integer times the scale. The scale belongs to one head of one token, so what is stored for a token depends
// on that token alone, however many others are written with it. worker/kv/rounding.py rounds in the same way, up
// to ties.
#pragma once

#include <type_traits>

#include "rounding.h"

namespace {

// A byte of a rounded head. Pointers to it count bytes.
struct Rounded {
    int8_t byte;
};

constexpr int64_t SCALE_BYTES = sizeof(float);

// How a cache stores numbers of type N: as they are, rounded to eight bits, or as bfloat16.
enum StoredAs : int64_t { AS_NUMBERS = 0, AS_ROUNDED = 1, AS_BFLOAT16 = 2 };

// Calls `body` with a zero of the type in which a cache stores numbers of type N.
template <class N, class Body> INLINE void in_stored(int64_t stored_as, Body &&body) {
    if (stored_as == AS_ROUNDED) return body(Rounded{});
    if constexpr (std::is_same<N, float>::value)
        if (stored_as == AS_BFLOAT16) return body(bf16{});
    body(N{});
}

template <class S> constexpr bool IS_ROUNDED = std::is_same<S, Rounded>::value;

// Returns the items that a head takes in the cache.
template <class S> INLINE int64_t stored_width(int64_t dim) { return IS_ROUNDED<S> ? dim + SCALE_BYTES : dim; }

INLINE float scale_of(const Rounded *head, int64_t dim) {
    float scale;
    memcpy(&scale, head + dim, SCALE_BYTES);
    return scale;
}

// Loads LANES integers as floats. All of them are exact in bfloat16, too.
INLINE Floats load(const Rounded *from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_as<__m128i>(from)));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#else
    typedef int8_t Bytes __attribute__((vector_size(LANES)));
    return __builtin_convertvector(load_as<Bytes>(from), Floats);
#endif
}

// Stores the `dim` numbers of a head.
template <class N> INLINE void store_head(const N *from, N *to, int64_t dim) {
    memcpy(to, from, (size_t)dim * sizeof(N));
}
INLINE void store_head(const float *from, bf16 *to, int64_t dim) {
    for (int64_t d = 0; d < dim; d += LANES) store_as(to + d, rounded_in_integers(load(from + d)));
}
template <class N> INLINE void store_head(const N *from, Rounded *to, int64_t dim) {
    const float largest = largest_magnitude(from, dim), inverse = MOST_ROUNDED / largest, scale = largest / MOST_ROUNDED;
    typedef int8_t Bytes __attribute__((vector_size(LANES)));
    for (int64_t d = 0; d < dim; d += LANES) {
        const Ints integers = integers_in(rounded_bits(load(from + d), inverse));
        store_as(to + d, __builtin_convertvector(integers, Bytes));
    }
    memcpy(to + dim, &scale, SCALE_BYTES);
}

} // namespace
