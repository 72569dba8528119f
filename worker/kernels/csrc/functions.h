// Functions that the C library computes differently from machine to machine. Here they have the same bits everywhere:
// they are polynomials of operations that IEEE 754 defines.
#pragma once

#include "simd.h"

namespace {

// Returns e^x within 2 units in the last place. The result is about 1e-38 for x below -87, and about
// 1e38 for x above 88. NaN stays NaN.
INLINE Floats exponential(Floats x) {
    const Floats least = splat(-87.0f), most = splat(88.0f);
    Floats clipped = x < least ? least : x;
    clipped = clipped > most ? most : clipped;
    const Floats magic = splat(12582912.0f); // 1.5 * 2^23: adding it rounds to an integer
    const Floats turns = fused(clipped, splat(1.44269504f), magic) - magic;
    const Floats rest = fused(turns, splat(2.12194440e-4f), fused(turns, splat(-0.693359375f), clipped));
    Floats p = splat(1.9875691500e-4f);
    p = fused(p, rest, splat(1.3981999507e-3f));
    p = fused(p, rest, splat(8.3334519073e-3f));
    p = fused(p, rest, splat(4.1665795894e-2f));
    p = fused(p, rest, splat(1.6666665459e-1f));
    p = fused(p, rest, splat(5.0000001201e-1f));
    p = fused(p * rest, rest, rest) + 1.0f;
    Ints power = (__builtin_convertvector(turns, Ints) + 127) << 23;
    return p * (Floats)power;
}
INLINE float exponential(float x) { return exponential(splat(x))[0]; }

// Returns e^x - 1 - x for x <= 0. Near zero it is computed by its series, whose first left out term is below
// a rounding of the sum, because the difference would have few digits.
INLINE Floats exponential_rest(Floats x) {
    Floats series = fused(x, splat(1.0f / 40320), splat(1.0f / 5040));
    series = fused(series, x, splat(1.0f / 720));
    series = fused(series, x, splat(1.0f / 120));
    series = fused(series, x, splat(1.0f / 24));
    series = fused(series, x, splat(1.0f / 6));
    series = fused(series, x, splat(0.5f));
    return x > -0.5f ? series * x * x : exponential(x) - 1.0f - x;
}

INLINE Floats sigmoid(Floats x) { return 1.0f / (1.0f + exponential(-x)); }

// Returns tanh(x), which is -m / (2 + m) for x >= 0, with m = e^(-2 x) - 1.
INLINE Floats hyperbolic_tangent(Floats x) {
    const Floats twice = x < 0.0f ? x + x : -(x + x), m = exponential_rest(twice) + twice;
    return (x < 0.0f ? m : -m) / (m + 2.0f);
}

// Returns the logarithm of 1 + e^x, and x above 20, as torch's softplus does.
//
// log(1 + u) is s P(s^2) with s = u / (2 + u). P is the polynomial that approximates 2 atanh(s) / s best for u up to 1,
// within 8.5e-9. For positive x, u is e^-x, and x is added.
INLINE Floats softplus(Floats x) {
    const Floats u = exponential(x < 0.0f ? x : -x), s = u / (u + 2.0f), square = s * s;
    Floats p = splat(0.281577784f);
    p = fused(p, square, splat(0.279651577f));
    p = fused(p, square, splat(0.400245952f));
    p = fused(p, square, splat(0.666663216f));
    p = fused(p, square, splat(2.0f));
    const Floats sum = s * p + (x < 0.0f ? Floats{} : x);
    return x > 20.0f ? x : sum;
}
INLINE float softplus(float x) { return softplus(splat(x))[0]; }

// An angle's cosine and sine.
struct Turn {
    float cosine, sine;
};

// Returns the cosine and sine of an angle below 2^22 in radians, each rounded from a number with an error below 1e-9.
//
// The angle is a multiple of pi / 2 and a rest, of which the series are computed in double.
INLINE Turn turn_of(float radians) {
    const double magic = 6755399441055744.0; // 1.5 * 2^52: adding it rounds to an integer, in the lowest bits
    const double angle = radians, shifted = angle * 0.63661977236758134308 + magic, quarters = shifted - magic;
    // pi / 2 in two numbers, of which the first has so few bits that its product is exact.
    const double rest = (angle - quarters * 1.57079632673412561417e+00) - quarters * 6.07710050650619224932e-11;
    const double square = rest * rest;
    double s = -1.0 / 39916800, c = 1.0 / 479001600;
    s = s * square + 1.0 / 362880;
    s = s * square - 1.0 / 5040;
    s = s * square + 1.0 / 120;
    s = s * square - 1.0 / 6;
    c = c * square - 1.0 / 3628800;
    c = c * square + 1.0 / 40320;
    c = c * square - 1.0 / 720;
    c = c * square + 1.0 / 24;
    c = c * square - 0.5;
    const double sine = rest + rest * square * s, cosine = 1.0 + square * c;
    int64_t quarter;
    memcpy(&quarter, &shifted, sizeof quarter);
    const double x = quarter & 1 ? sine : cosine, y = quarter & 1 ? cosine : sine;
    return {(float)((quarter + 1) & 2 ? -x : x), (float)(quarter & 2 ? -y : y)};
}

} // namespace
