// The operations between linears: norms, rotation, writing to the cache. Activations: activation.h.
// They compute one row (a token) at a time in float, and round where torch rounds.
//
// Legend: T tokens, H query heads, H_kv key/value heads, D head dim.
#pragma once

#include "stored_kv.h"
#include "sums.h"
#include "team.h"

namespace {

// A norm of one place of the model.
struct Norm {
    const void *weight; // [size]; null: there is no norm
    const void *bias;   // [size], in the model's number type, or null
    int64_t is_layer;   // whether the mean is subtracted
    int64_t is_float;   // whether the weight is float, whatever the model's number type is
};

// Computes out = x / sqrt(mean(x^2) + eps) * weight. `size` is a multiple of 16.
template <class X, class W, class N>
INLINE void rms_row(const X *x, const W *weight, N *out, int64_t size, float eps) {
    const float squares = sum_over(size, [&](Floats sums, int64_t i) {
        const Floats v = load(x + i);
        return fused(v, v, sums);
    });
    const float mean = squares / (float)size;
    const Floats scale = splat(1.0f / std::sqrt(mean + eps));
    for (int64_t i = 0; i < size; i += LANES) store(out + i, load(x + i) * scale * load(weight + i));
}

// Computes out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias. `size` is a multiple of 16.
template <class X, class W, class B, class N>
INLINE void layer_norm_row(const X *x, const W *weight, const B *bias, N *out, int64_t size, float eps) {
    const Floats mean = splat(sum_over(size, [&](Floats sums, int64_t i) { return sums + load(x + i); }) / (float)size);
    const float squares = sum_over(size, [&](Floats sums, int64_t i) {
        const Floats v = load(x + i) - mean;
        return fused(v, v, sums);
    });
    const Floats scale = splat(1.0f / std::sqrt(squares / (float)size + eps));
    for (int64_t i = 0; i < size; i += LANES) {
        const Floats v = (load(x + i) - mean) * scale * load(weight + i);
        store(out + i, bias ? v + load(bias + i) : v);
    }
}

// Computes a norm of any kind, in a model of number type N. x and out may be the same.
template <class N, class X, class Y>
void norm_row(const X *x, const Norm &norm, Y *out, int64_t size, float eps) {
    const float *wide = (const float *)norm.weight;
    const N *weight = (const N *)norm.weight, *bias = (const N *)norm.bias;
    if (norm.is_layer && norm.is_float) layer_norm_row(x, wide, bias, out, size, eps);
    else if (norm.is_layer) layer_norm_row(x, weight, bias, out, size, eps);
    else if (norm.is_float) rms_row(x, wide, out, size, eps);
    else rms_row(x, weight, out, size, eps);
}

// Computes x += delta.
template <class X, class N> INLINE void add_row(X *x, const N *delta, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) store(x + i, load(x + i) + load(delta + i));
}

// Computes x += delta * scale.
INLINE void add_scaled_row(float *x, const float *delta, int64_t size, float scale) {
    for (int64_t i = 0; i < size; i += LANES) store(x + i, fused(load(delta + i), splat(scale), load(x + i)));
}

// Writes x to `out`, in the number type of `out`.
template <class X, class N> INLINE void convert_row(const X *x, N *out, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) store(out + i, load(x + i));
}

// Rotates a head. `from` and `to` may be the same. cos and sin [D] are those of layers/rope.py, with the
// first half of sin negated.
template <class N>
INLINE void rotate_head(const N *from, N *to, const N *cos, const N *sin, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        Floats a = load(from + i), b = load(from + half + i);
        Floats low = fused(b, load(sin + i), as_stored(N{}, a * load(cos + i)));
        Floats high = fused(a, load(sin + half + i), as_stored(N{}, b * load(cos + half + i)));
        store(to + i, low);
        store(to + half + i, high);
    }
}

constexpr int MAX_DIM = 576; // largest head dim

// Rotates the first `width` items of a head, and leaves the others. `from` and `to` may be the same. cos
// and sin [D] are as for `rotate_head`, and then 1 and 0 for items that are not rotated.
template <class N>
INLINE void rotate_part(const N *from, N *to, const N *cos, const N *sin, int64_t dim, int64_t width) {
    const size_t half = (size_t)width / 2, rest = (size_t)(dim - width);
    alignas(64) float x[MAX_DIM], partners[MAX_DIM];
    for (int64_t i = 0; i < dim; i += LANES) store(x + i, load(from + i));
    memcpy(partners, x + half, half * sizeof(float));
    memcpy(partners + half, x, half * sizeof(float));
    memcpy(partners + width, x + width, rest * sizeof(float));
    for (int64_t i = 0; i < dim; i += LANES) {
        const Floats own = as_stored(N{}, load(x + i) * load(cos + i));
        store(to + i, fused(load(partners + i), load(sin + i), own));
    }
}

// Numbers of query heads and key/value heads, and the head dim.
struct Heads {
    int64_t heads, kv_heads, dim;
};

// Replaces `heads` heads of `dim` numbers by their norms, `width` numbers at a time: one head, or all.
template <class N>
INLINE void norm_heads(N *x, const Norm &norm, int64_t heads, int64_t dim, int64_t width, float eps) {
    for (int64_t at = 0; at < heads * dim; at += width) norm_row<N>(x + at, norm, x + at, width, eps);
}

// Rotates the first `rotated` items of each of one token's queries and keys in place.
//
// qkv: [(H + 2 H_kv) D]
template <class N>
INLINE void rotate_row(N *qkv, const N *cos, const N *sin, const Heads &h, int64_t rotated) {
    for (int64_t i = 0; i < h.heads + h.kv_heads; i++) {
        N *head = qkv + i * h.dim;
        if (rotated == h.dim) rotate_head(head, head, cos, sin, h.dim);
        else rotate_part(head, head, cos, sin, h.dim, rotated);
    }
}

// Returns how many items of type S the keys of a token take in the cache; its values take as many.
template <class S> INLINE int64_t token_items(const Heads &h) { return h.kv_heads * stored_width<S>(h.dim); }

// Writes one token's keys and values to the cache, in the type S in which it stores them.
//
// qkv: [(H + 2 H_kv) D]. k_cache, v_cache: one layer. first: the token's first item in them.
template <class S, class N>
INLINE void cache_row(const N *qkv, void *k_cache, void *v_cache, int64_t first, const Heads &h) {
    const N *keys = qkv + h.heads * h.dim, *values = keys + h.kv_heads * h.dim;
    const int64_t width = stored_width<S>(h.dim);
    S *k = (S *)k_cache + first, *v = (S *)v_cache + first;
    for (int64_t i = 0; i < h.kv_heads; i++) {
        store_head(keys + i * h.dim, k + i * width, h.dim);
        store_head(values + i * h.dim, v + i * width, h.dim);
    }
}

} // namespace
