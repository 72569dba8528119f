// What a gated delta net computes between its linears. worker/layers/delta_rule.py defines it.
//
// Each column of a state's matrix changes independently of the others. So a matrix is computed in tiles of columns,
// which stay in the first cache while all tokens of a row change them. A token costs one pass over the tile.
//
// Legend: T tokens, H value heads, K key dim, V value dim, C width of the convolution.
#pragma once

#include "activation.h"
#include "convolution.h"
#include "team.h"

namespace {

// The dimensions of a layer (worker/spec/recurrent.py). A state's matrices are [H, K, V].
struct DeltaSizes {
    int64_t key_heads, value_heads, key_dim, value_dim, kernel;
    int64_t is_tiled; // whether value head v uses key head v % key_heads
    double unit_eps; // is added to the sum of squares of a query or key
    double norm_eps; // is added to the mean square of a head's result
    double beta_scale; // factor of beta
    int64_t decays; // of a head: one, or one for each row of its matrix
    int64_t is_sigmoid; // whether the gates of the results are sigmoids, not SiLUs

    // Returns the vectors that the convolution makes of a token: queries, keys, then values.
    Vectors vectors() const { return {2 * key_heads, key_dim, value_heads, value_dim}; }
    // Returns the key head that a value head uses.
    int64_t key_of(int64_t head) const {
        return is_tiled ? head % key_heads : head / (value_heads / key_heads);
    }
};

// The weights beside the linears.
struct DeltaWeights {
    const float *conv;         // [kernel, C]
    const float *decay;        // [H]
    const float *bias;         // [H * decays]
    const float *norm;         // [V]
};

// The tensors of one call.
struct Delta {
    DeltaSizes sizes;
    States states;
    DeltaWeights weights;
    Convolution conv;
    Mixed mixed;
    const float *inputs;   // [T, C + H * V]: what is convolved, then the gates of the results
    int64_t stride;        // numbers from token to token of inputs
    const float *gates;    // [T, H + H * decays]: what beta is made of, then what the decays are made of
    float *betas, *decays; // scratch memory [T, H] and [T, H * decays]; of decays: what the state is multiplied by
    float *out;            // [T, H, V]
};

// Computes beta and the decays of a token for a head.
INLINE void make_gates(const Delta &d, int64_t t, int64_t head) {
    const int64_t heads = d.sizes.value_heads, decays = d.sizes.decays, first = head * decays;
    const float *gates = d.gates + t * heads * (1 + decays), *steps = gates + heads + first;
    float *to = d.decays + t * heads * decays + first;
    d.betas[t * heads + head] = sigmoid(splat(gates[head]))[0] * (float)d.sizes.beta_scale;
    for (int64_t i = 0; i < decays; i++) {
        const float step = softplus(steps[i] + d.weights.bias[first + i]);
        to[i] = exponential(splat(step * d.weights.decay[head]))[0];
    }
}

// Computes one vector of all tokens of a row, and the new tails of the vector's channels. Queries and keys are
// divided by their length, and queries by sqrt(K). With the values of a head, computes its betas and decays.
inline void convolve(const Delta &d, const StateRow &row, int64_t vector) {
    const DeltaSizes &sizes = d.sizes;
    const Vectors &vectors = d.mixed.vectors;
    const int64_t dim = vectors.size(vector);
    RowChannels<false> channels{d.conv, row, vectors.start(vector), dim, d.inputs, nullptr, d.stride};
    for (int64_t n = 0; n < row.count; n++) {
        float *to = d.mixed.at(vector, row.first + n);
        for (int64_t i = 0; i < dim; i += LANES) store(to + i, Silu::of(channels.at(n, i)));
        if (vector >= 2 * sizes.key_heads) {
            make_gates(d, row.first + n, vector - 2 * sizes.key_heads);
            continue;
        }
        float scale = 1.0f / std::sqrt(sum_of_squares(to, dim) + (float)sizes.unit_eps);
        if (vector < sizes.key_heads) scale /= std::sqrt((float)dim);
        for (int64_t i = 0; i < dim; i += LANES) store(to + i, load(to + i) * scale);
    }
    channels.keep_tails();
}

constexpr int DELTA_VECTORS = 4; // vectors of columns in a tile

// A token's key, and the decays of its head: one, or one for each row of S if BY_ROW. If so, a row's decay is a factor
// of its key when S^T k is computed of the S before it decays.
template <bool BY_ROW> struct DecayedKey {
    const float *k, *decays;

    INLINE float factor(int64_t row) const { return decays[BY_ROW ? row : 0]; }
    INLINE float before(int64_t row) const { return BY_ROW ? k[row] * decays[row] : k[row]; }
};

// Computes S^T k.
template <int COUNT, bool BY_ROW>
INLINE void recall(StateTile s, DecayedKey<BY_ROW> key, int64_t key_dim, Floats (&known)[COUNT]) {
    for (int j = 0; j < COUNT; j++) known[j] = Floats{};
    for (int64_t i = 0; i < key_dim; i++)
        for (int j = 0; j < COUNT; j++)
            known[j] = fused(load(s.at + i * s.stride + j * LANES), splat(key.before(i)), known[j]);
}

// Computes S = factor * S + k change^T, and S^T q of the new S. If HAS_NEXT, computes S^T k of the next token too, in
// the order of `recall`, so that the next token need not read S twice.
template <int COUNT, bool HAS_NEXT, bool BY_ROW>
INLINE void change_state(StateTile s, const Floats (&change)[COUNT], DecayedKey<BY_ROW> own, const float *q,
                         DecayedKey<BY_ROW> next, int64_t key_dim, Floats (&result)[COUNT], Floats (&known)[COUNT]) {
    for (int j = 0; j < COUNT; j++) result[j] = known[j] = Floats{};
    float factor = BY_ROW ? 0.0f : own.factor(0);
    for (int64_t i = 0; i < key_dim; i++) {
        float *row = s.at + i * s.stride;
        // The compiler cannot load these once itself, because it assumes that stores may change them.
        const Floats key = splat(own.k[i]), query = splat(q[i]), next_key = splat(HAS_NEXT ? next.before(i) : 0.0f);
        if (BY_ROW) factor = own.factor(i);
        for (int j = 0; j < COUNT; j++) {
            const Floats x = fused(change[j], key, load(row + j * LANES) * factor);
            store(row + j * LANES, x);
            result[j] = fused(x, query, result[j]);
            if (HAS_NEXT) known[j] = fused(x, next_key, known[j]);
        }
    }
}

// Computes `columns` columns, in COUNT vectors, of one head of a row.
//
// scratch: [K, COUNT * LANES]
template <int COUNT, bool BY_ROW>
__attribute__((noinline)) void compute_columns(const Delta &d, StateRow row, int64_t head, int64_t column,
                                               int64_t columns, float *scratch) {
    const DeltaSizes &sizes = d.sizes;
    const int64_t key_dim = sizes.key_dim, value_dim = sizes.value_dim, num_heads = sizes.value_heads;
    const int64_t key = sizes.key_of(head);
    const int64_t at = d.conv.tail_items() + head * key_dim * value_dim + column;
    const StateTile held{row.held + at, value_dim};
    // If there are several tokens, the columns are copied. Where they lie, many of them share a place in the cache, so
    // they would not stay in it. Drafts need a copy anyway.
    const bool in_place = row.count == 1 && row.kept == 1 && columns == COUNT * LANES;
    const StateTile s = in_place ? held : StateTile{scratch, COUNT * LANES};
    if (!in_place) copy_tile(held, s, key_dim, columns, s.stride);
    auto keep = [&](int64_t done) {
        row.keep(done, [&](float *to) {
            if (to + at != s.at) copy_tile(s, StateTile{to + at, value_dim}, key_dim, columns, columns);
        });
    };
    keep(0);
    Floats known[COUNT], change[COUNT], result[COUNT];
    auto decayed = [&](int64_t t) {
        const float *decays = d.decays + (t * num_heads + head) * sizes.decays;
        return DecayedKey<BY_ROW>{d.mixed.at(sizes.key_heads + key, t), decays};
    };
    if (row.count) recall(s, decayed(row.first), key_dim, known);
    for (int64_t n = 0; n < row.count; n++) {
        const int64_t t = row.first + n;
        const float *q = d.mixed.at(key, t);
        const float *v = d.mixed.at(2 * sizes.key_heads + head, t) + column;
        const DecayedKey<BY_ROW> own = decayed(t);
        const float factor = BY_ROW ? 1.0f : own.factor(0);
        for (int j = 0; j < COUNT; j++)
            change[j] = fused(known[j], splat(-factor), load_first(v + j * LANES, columns - j * LANES)) *
                        d.betas[t * num_heads + head];
        if (n + 1 < row.count)
            change_state<COUNT, true>(s, change, own, q, decayed(t + 1), key_dim, result, known);
        else change_state<COUNT, false>(s, change, own, q, own, key_dim, result, known);
        float *out = d.out + (t * num_heads + head) * value_dim + column;
        for (int j = 0; j < COUNT; j++) store_first(out + j * LANES, result[j], columns - j * LANES);
        keep(n + 1);
    }
}

// Computes a tile of at most COUNT vectors of columns.
template <int COUNT>
INLINE void compute_tile(const Delta &d, const StateRow &row, int64_t head, int64_t column, int64_t columns,
                         float *scratch) {
    if constexpr (COUNT > 1)
        if (columns <= (COUNT - 1) * LANES) return compute_tile<COUNT - 1>(d, row, head, column, columns, scratch);
    if (d.sizes.decays > 1) compute_columns<COUNT, true>(d, row, head, column, columns, scratch);
    else compute_columns<COUNT, false>(d, row, head, column, columns, scratch);
}

// Norms a token's result of a head, and multiplies it by the SiLU or the sigmoid of its gate.
INLINE void norm_and_gate(const Delta &d, int64_t t, int64_t head) {
    const int64_t dim = d.sizes.value_dim, heads = d.sizes.value_heads;
    const float *gate = d.inputs + t * d.stride + d.conv.width + head * dim;
    float *out = d.out + (t * heads + head) * dim;
    const float scale = 1.0f / std::sqrt(sum_of_squares(out, dim) / (float)dim + (float)d.sizes.norm_eps);
    for (int64_t i = 0; i < dim; i += LANES) {
        const Floats x = load_first(out + i, dim - i) * scale * load_first(d.weights.norm + i, dim - i);
        const Floats z = load_first(gate + i, dim - i);
        store_first(out + i, x * (d.sizes.is_sigmoid ? sigmoid(z) : Silu::of(z)), dim - i);
    }
}

// Computes the step. Calls `share` three times.
inline void compute_delta(Team &team, const Delta &d) {
    const int64_t vectors = d.mixed.vectors.count(), value_dim = d.sizes.value_dim, width = DELTA_VECTORS * LANES;
    team.share(OTHER_LAYERS, d.states.num_rows * vectors, [&](int64_t item) {
        convolve(d, StateRow(d.states, item / vectors), item % vectors);
    }, true);
    const int64_t tiles = (value_dim + width - 1) / width, row_tiles = d.sizes.value_heads * tiles;
    float *scratch = thread_scratch(d.sizes.key_dim * width);
    team.share(OTHER_LAYERS, d.states.num_rows * row_tiles, [&](int64_t item) {
        const int64_t in_row = item % row_tiles, column = in_row % tiles * width;
        compute_tile<DELTA_VECTORS>(d, StateRow(d.states, item / row_tiles), in_row / tiles, column,
                                    std::min(width, value_dim - column), scratch);
    }, true);
    team.share(OTHER_LAYERS, d.mixed.tokens * d.sizes.value_heads, [&](int64_t item) {
        norm_and_gate(d, item / d.sizes.value_heads, item % d.sizes.value_heads);
    }, true);
}

} // namespace
