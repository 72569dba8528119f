// The activations of MLPs. They compute one row (a token) at a time in float, and round where torch
// rounds.
//
// Legend: I intermediate.
#pragma once

#include "functions.h"

namespace {

enum ActivationKind : int64_t { SILU = 0, GELU = 1, GELU_TANH = 2, CLAMPED_SWIGLU = 3, RELU2 = 4, XIELU = 5 };

// The activation of a layer's MLP.
struct Activation {
    int64_t kind, is_gated;
    double alpha, limit;                  // of CLAMPED_SWIGLU
    double positive, negative, beta, eps; // of XIELU
};

struct Silu {
    static INLINE Floats of(Floats x) { return x / (1.0f + exponential(-x)); }
};

// The square of the positive part.
struct Relu2 {
    static INLINE Floats of(Floats x) {
        const Floats positive = x < 0.0f ? splat(0.0f) : x;
        return positive * positive;
    }
};

// x times the share of a normal distribution below x, which is erfc(-x / sqrt(2)) / 2.
//
// For z >= 0, erfc(z) = t * e^(P(t) - z^2) with t = 1 / (1 + z / 2). P is the polynomial of degree 9 that
// interpolates the logarithm of erfc(z) / t, plus z^2, at Chebyshev points of z in [0, 9]. The relative
// error of erfc is below 2e-6 up to z = 3, and grows to 2e-5 where erfc underflows.
struct Gelu {
    static INLINE Floats of(Floats x) {
        const Floats z = (x < 0.0f ? -x : x) * 0.70710678f, t = 1.0f / (1.0f + z * 0.5f);
        Floats p = splat(0.13542471826f);
        p = fused(p, t, splat(-0.62863171101f));
        p = fused(p, t, splat(1.03276991844f));
        p = fused(p, t, splat(-0.52955329418f));
        p = fused(p, t, splat(-0.21976044774f));
        p = fused(p, t, splat(0.07634551823f));
        p = fused(p, t, splat(0.00868708454f));
        p = fused(p, t, splat(0.39215496182f));
        p = fused(p, t, splat(0.99797832966f));
        p = fused(p, t, splat(-1.26541507244f));
        const Floats half = 0.5f * t * exponential(fused(-z, z, p));
        return x * (x < 0.0f ? half : 1.0f - half);
    }
};

// x / 2 * (1 + tanh(u)) with u = sqrt(2 / pi) * (x + 0.044715 x^3), which is x / (1 + e^(-2 u)).
struct GeluTanh {
    static INLINE Floats of(Floats x) {
        const Floats twice = 1.59576912f * (x + 0.044715f * x * x * x);
        return x / (1.0f + exponential(-twice));
    }
};

// Computes out = act(gate) * up. gate_up [2 I] is gate, then up.
template <class Act, class N> INLINE void gated_row(const N *gate_up, N *out, int64_t inner) {
    for (int64_t i = 0; i < inner; i += LANES) {
        const Floats gate = as_stored(N{}, Act::of(load(gate_up + i)));
        store(out + i, gate * load(gate_up + inner + i));
    }
}

// Computes out = act(up [I]).
template <class Act, class N> INLINE void ungated_row(const N *up, N *out, int64_t inner) {
    for (int64_t i = 0; i < inner; i += LANES) store(out + i, Act::of(load(up + i)));
}

// Computes out = gate * sigmoid(alpha * gate) * (up + 1), with the gate at most `limit` and up within
// `limit` of zero. gate_up [2 I] is gate, then up.
template <class N>
INLINE void clamped_swiglu_row(const N *gate_up, N *out, int64_t inner, float alpha, float limit) {
    const Floats most = splat(limit);
    for (int64_t i = 0; i < inner; i += LANES) {
        Floats gate = load(gate_up + i), up = load(gate_up + inner + i);
        gate = gate > most ? most : gate;
        up = up > most ? most : up;
        up = up < -most ? -most : up;
        store(out + i, gate / (1.0f + exponential(-alpha * gate)) * (up + 1.0f));
    }
}

// Computes out = beta * up + positive * up^2 where up > 0, and beta * up + negative * (e^min(up, eps) - 1 - up)
// elsewhere.
template <class N> INLINE void xielu_row(const N *up, N *out, int64_t inner, const Activation &a) {
    const float positive = (float)a.positive, negative = (float)a.negative, beta = (float)a.beta;
    const Floats eps = splat((float)a.eps);
    for (int64_t i = 0; i < inner; i += LANES) {
        const Floats x = load(up + i), least = x < eps ? x : eps;
        const Floats above = positive * x * x, below = negative * (exponential_rest(least) + (least - x));
        store(out + i, fused(splat(beta), x, x > 0.0f ? above : below));
    }
}

template <class Act, class N>
INLINE void activate_row_as(bool is_gated, const N *from, N *out, int64_t inner) {
    if (is_gated) gated_row<Act>(from, out, inner);
    else ungated_row<Act>(from, out, inner);
}

// Computes an activation of one row: of gate and up [2 I], or of up [I] alone.
template <class N>
INLINE void activate_row(const Activation &a, const N *from, N *out, int64_t inner) {
    if (a.kind == SILU) activate_row_as<Silu>(a.is_gated, from, out, inner);
    else if (a.kind == GELU) activate_row_as<Gelu>(a.is_gated, from, out, inner);
    else if (a.kind == GELU_TANH) activate_row_as<GeluTanh>(a.is_gated, from, out, inner);
    else if (a.kind == RELU2) activate_row_as<Relu2>(a.is_gated, from, out, inner);
    else if (a.kind == XIELU) xielu_row(from, out, inner, a);
    else clamped_swiglu_row(from, out, inner, (float)a.alpha, (float)a.limit);
}

} // namespace
