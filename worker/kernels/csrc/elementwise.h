// The operations between linears: norm, rotation, writing to the cache, activation.
// They compute one row (a token) at a time in float, and round where torch rounds.
//
// Legend: T tokens, H query heads, H_kv key/value heads, D head dim, I intermediate.
#pragma once

#include "team.h"

namespace {

// Computes out = x / sqrt(mean(x^2) + eps) * weight. `size` is a multiple of 16.
template <class X, class N>
INLINE void norm_row(const X *x, const N *weight, N *out, int64_t size, float eps) {
    Floats squares[4] = {};
    int64_t i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES)
        for (int j = 0; j < 4; j++) {
            Floats v = load(x + i + j * LANES);
            squares[j] += v * v;
        }
    for (; i < size; i += LANES) {
        Floats v = load(x + i);
        squares[0] += v * v;
    }
    float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / (float)size;
    Floats scale = splat(1.0f / std::sqrt(mean + eps));
    for (i = 0; i < size; i += LANES) store(out + i, load(x + i) * scale * load(weight + i));
}

// Computes x += delta.
template <class N> INLINE void add_row(N *x, const N *delta, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) store(x + i, load(x + i) + load(delta + i));
}

// Computes out = silu(gate) * up. gate_up [2 I] is gate, then up.
template <class N> INLINE void silu_row(const N *gate_up, N *out, int64_t inner) {
    for (int64_t i = 0; i < inner; i += LANES) {
        Floats gate = load(gate_up + i);
        Floats silu = as_stored(N{}, gate / (1.0f + exponential(-gate)));
        store(out + i, silu * load(gate_up + inner + i));
    }
}

// Rotates a head. `from` and `to` may be the same. cos and sin [D] are those of layers/rope.py, with the
// first half of sin negated.
template <class N>
INLINE void rotate_head(const N *from, N *to, const N *cos, const N *sin, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        Floats a = load(from + i), b = load(from + half + i);
        Floats low = as_stored(N{}, a * load(cos + i)) + b * load(sin + i);
        Floats high = as_stored(N{}, b * load(cos + half + i)) + a * load(sin + half + i);
        store(to + i, low);
        store(to + half + i, high);
    }
}

// Numbers of query heads and key/value heads, and the head dim.
struct Heads {
    int64_t heads, kv_heads, dim;
};

// Replaces `heads` heads of `dim` numbers by their norms, `width` numbers at a time: one head, or all.
template <class N>
INLINE void norm_heads(N *x, const N *weight, int64_t heads, int64_t dim, int64_t width, float eps) {
    for (int64_t at = 0; at < heads * dim; at += width) norm_row(x + at, weight, x + at, width, eps);
}

// Writes one token's keys and values to the cache without rotating them.
template <class N>
INLINE void cache_row(const N *qkv, N *k_cache, N *v_cache, int64_t slot, const Heads &h) {
    const N *keys = qkv + h.heads * h.dim;
    const int64_t width = h.kv_heads * h.dim;
    memcpy(k_cache + slot * width, keys, (size_t)width * sizeof(N));
    memcpy(v_cache + slot * width, keys + width, (size_t)width * sizeof(N));
}

// Rotates one token's queries in place, and writes its rotated keys and its values to the cache.
//
// qkv: [(H + 2 H_kv) D]. k_cache, v_cache: one layer, [tokens, H_kv, D]. slot: the token's index in them.
template <class N>
INLINE void rotate_and_cache_row(
    N *qkv, const N *cos, const N *sin, N *k_cache, N *v_cache, int64_t slot, const Heads &h
) {
    for (int64_t i = 0; i < h.heads; i++) {
        N *head = qkv + i * h.dim;
        rotate_head(head, head, cos, sin, h.dim);
    }
    const N *keys = qkv + h.heads * h.dim;
    const int64_t width = h.kv_heads * h.dim;
    for (int64_t i = 0; i < h.kv_heads; i++)
        rotate_head(keys + i * h.dim, k_cache + slot * width + i * h.dim, cos, sin, h.dim);
    memcpy(v_cache + slot * width, keys + width, (size_t)width * sizeof(N));
}

} // namespace
