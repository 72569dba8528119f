// The Llama forward pass, from token ids to the output of the last layer, in one call that wakes the
// threads once.
//
// The code follows models/llama.py line by line, with packed weights. One thing differs: x, to which
// every layer adds, is float, because some of its numbers are so large that bfloat16 would lose what is
// added.
//
// Legend: T tokens, H query heads, H_kv key/value heads, D head dim, I intermediate.
#pragma once

#include "linear.h"
#include "prefill.h"

namespace {

// Weights and cache of one layer.
struct Layer {
    const void *attention_norm, *mlp_norm; // [hidden]
    Packed qkv, output, gate_up, down;
    const void *qkv_bias, *output_bias, *gate_up_bias, *down_bias; // [outputs], or null
    const void *q_norm, *k_norm; // [q_norm_width], [k_norm_width], or null
    void *k_cache, *v_cache; // of this layer: [B, block_tokens, H_kv, D]
    Scoring scoring;
    int64_t q_norm_width, k_norm_width; // D, or all heads together
    int64_t is_rotated;
};

// The arguments of a forward pass.
struct Forward {
    const Layer *layers;
    int64_t num_layers, tokens, hidden, inner;
    Heads heads;
    Rows rows;
    const int64_t *ids, *positions, *slot_mapping; // [T]
    const void *embedding;         // [V, hidden]
    const float *inv_freq;         // [D / 2]: radians by which a pair rotates per position
    float *x;                      // [T, hidden]: the output
    void *cos, *sin;               // scratch memory: [T, D]
    void *normed;                  // scratch memory: [T, hidden]
    void *qkv;                     // scratch memory: [T, (H + 2 H_kv) D]
    void *attended;                // scratch memory: [T, H D], the output of attention
    void *gate_up, *active;        // scratch memory: [T, 2 I], [T, I]
    double eps, rope_factor, embedding_scale, residual_scale;
};

// The forward pass in number type N. All threads of the team call `run`.
template <class N> struct Pass {
    const Forward &f;
    const Work work;
    std::vector<float> partials;

    explicit Pass(const Forward &forward) : f(forward), work(forward.rows) {
        partials.resize((size_t)(work.num_partials * f.heads.kv_heads * partial_floats(f.heads)));
    }

    N *normed() const { return (N *)f.normed; }
    float *x() const { return f.x; }

    // Returns the most phases (team.h) of a pass: one at the start, and ten per layer. Of these, five are
    // for attention and its linears, four for the MLP, and one combines rows of several pieces.
    int64_t num_phases() const { return 1 + f.num_layers * 10; }

    // Writes a token's embedding to x, and the cos and sin of its position (layers/rope.py).
    INLINE void start_row(int64_t t) {
        const N *row = (const N *)f.embedding + f.ids[t] * f.hidden;
        for (int64_t i = 0; i < f.hidden; i += LANES) store(x() + t * f.hidden + i, load(row + i) * (float)f.embedding_scale);
        const int64_t half = f.heads.dim / 2;
        N *cos = (N *)f.cos + t * f.heads.dim, *sin = (N *)f.sin + t * f.heads.dim;
        alignas(64) float c[MAX_DIM / 2], s[MAX_DIM / 2];
        for (int64_t i = 0; i < half; i++) {
            const float angle = (float)f.positions[t] * f.inv_freq[i];
            c[i] = std::cos(angle) * (float)f.rope_factor;
            s[i] = std::sin(angle) * (float)f.rope_factor;
        }
        for (int64_t i = 0; i < half; i += LANES) {
            store(cos + i, load(c + i));
            store(cos + half + i, load(c + i));
            store(sin + i, -load(s + i));
            store(sin + half + i, load(s + i));
        }
    }

    INLINE void norm(Team &team, const void *weight) {
        team.share(f.tokens, [&](int64_t t) {
            norm_row(x() + t * f.hidden, (const N *)weight, normed() + t * f.hidden, f.hidden, (float)f.eps);
        });
    }

    INLINE void attention(Team &team, const Layer &layer) {
        const int64_t dim = f.heads.dim, width = (f.heads.heads + 2 * f.heads.kv_heads) * dim;
        N *qkv = (N *)f.qkv, *k = (N *)layer.k_cache, *v = (N *)layer.v_cache;
        norm(team, layer.attention_norm);
        linear(team, Linear<N, N>{normed(), layer.qkv, (const N *)layer.qkv_bias, qkv, f.tokens, STORE});
        team.share(f.tokens, [&](int64_t t) {
            const N *cos = (const N *)f.cos + t * dim, *sin = (const N *)f.sin + t * dim;
            N *row = qkv + t * width;
            if (layer.q_norm) {
                const Heads &h = f.heads;
                norm_heads(row, (const N *)layer.q_norm, h.heads, dim, layer.q_norm_width, (float)f.eps);
                norm_heads(row + h.heads * dim, (const N *)layer.k_norm, h.kv_heads, dim,
                           layer.k_norm_width, (float)f.eps);
            }
            if (layer.is_rotated) rotate_and_cache_row(row, cos, sin, k, v, f.slot_mapping[t], f.heads);
            else cache_row(row, k, v, f.slot_mapping[t], f.heads);
        });
        attend(team, Attend<N>{qkv, (N *)f.attended, k, v, width, f.heads, layer.scoring}, f.rows, work, partials.data());
        linear(team, Linear<N, float>{(N *)f.attended, layer.output, (const N *)layer.output_bias, x(), f.tokens, ADD, (float)f.residual_scale});
    }

    INLINE void mlp(Team &team, const Layer &layer) {
        N *gate_up = (N *)f.gate_up, *active = (N *)f.active;
        norm(team, layer.mlp_norm);
        linear(team, Linear<N, N>{normed(), layer.gate_up, (const N *)layer.gate_up_bias, gate_up, f.tokens, STORE});
        team.share(f.tokens, [&](int64_t t) {
            silu_row(gate_up + t * 2 * f.inner, active + t * f.inner, f.inner);
        });
        linear(team, Linear<N, float>{active, layer.down, (const N *)layer.down_bias, x(), f.tokens, ADD, (float)f.residual_scale});
    }

    void run(Team &team) {
        team.share(f.tokens, [&](int64_t t) { start_row(t); });
        for (int64_t i = 0; i < f.num_layers; i++) {
            attention(team, f.layers[i]);
            mlp(team, f.layers[i]);
        }
    }
};

} // namespace
