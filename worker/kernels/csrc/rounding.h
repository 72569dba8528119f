// Rounds numbers to integers from -127 to 127 that share a scale: 127 times the scale is the largest magnitude.
//
// The inputs of linears (rounded.h) and heads of keys and values (stored_kv.h) are rounded in this way. If a
// number is NaN or infinite, so is the scale, and the integers are arbitrary.
#pragma once

#include "simd.h"

namespace {

constexpr float MOST_ROUNDED = 127;
constexpr float ROUND = 12582912.0f; // 1.5 * 2^23: adding it rounds to an integer, in the lowest bits

// Returns the largest magnitude of `count` numbers, whole vectors. NaN counts as largest.
template <class X> INLINE float largest_magnitude(const X *x, int64_t count) {
    Ints most = {}; // of the bits without the sign, which order numbers as their sizes do, NaN last
    for (int64_t i = 0; i < count; i += LANES) {
        const Ints size = (Ints)(words(load(x + i)) & 0x7fffffff);
        most = size > most ? size : most;
    }
    const int32_t bits = max_in(most);
    float largest;
    memcpy(&largest, &bits, 4);
    return largest;
}

// Returns the rounded products of x and `inverse`. The integers are the lowest bytes of the lanes.
//
// If all numbers are zero or tiny, the product is NaN or infinite. Its lowest byte is 0.
INLINE Words rounded_bits(Floats x, float inverse) { return words(fused(x, splat(inverse), splat(ROUND))); }

// Returns the integers in rounded bits.
INLINE Ints integers_in(Words bits) { return (Ints)(bits << 24) >> 24; }

} // namespace
