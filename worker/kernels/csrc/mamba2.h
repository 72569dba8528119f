// What a Mamba-2 layer computes between its linears. worker/layers/mamba2_rule.py defines it.
//
// Each row of a state's matrix changes independently of the others, and lies in memory as one piece. So a matrix is
// computed in tiles of rows, which stay in the first cache while all tokens change them. A token costs one pass over
// the tile.
//
// Legend: T tokens, H heads, P head dim, G groups, S state, C width of the convolution.
#pragma once

#include "activation.h"
#include "convolution.h"
#include "team.h"

namespace {

// Where the result is normed: nowhere, after it is multiplied by the gate, or before.
enum NormPlace : int64_t { NO_NORM = 0, AFTER_GATE = 1, BEFORE_GATE = 2 };

// The dimensions and limits of a layer (worker/spec/recurrent.py). A state's matrices are [H, P, S].
struct Mamba2Sizes {
    int64_t heads, head_dim, groups, state, kernel;
    int64_t norm_place;
    double eps, least_step, most_step;

    int64_t output_width() const { return heads * head_dim; }
    // Returns the vectors that the convolution makes of a token: x of each head, B of each group, then C.
    Vectors vectors() const { return {heads, head_dim, 2 * groups, state}; }
    // Returns the vector with B or C of a head's group.
    int64_t b_of(int64_t head) const { return heads + head / (heads / groups); }
    int64_t c_of(int64_t head) const { return b_of(head) + groups; }
};

// The weights beside the linears.
struct Mamba2Weights {
    const float *conv, *conv_bias;    // [kernel, C]; [C], or null
    const float *decay, *bias, *skip; // [H]
    const float *norm;                // [H * P]; null if there is no norm
};

// The tensors of one call.
struct Mamba2 {
    Mamba2Sizes sizes;
    States states;
    Mamba2Weights weights;
    Convolution conv;
    Mixed mixed;
    const float *inputs; // [T, H * P + C + H]: the gate, what is convolved, and dt
    int64_t stride;      // numbers from token to token of inputs
    float *steps;        // scratch memory [H, T]: dt
    float *factors;      // scratch memory [H, T]: what the state is multiplied by
    float *out;          // [T, H * P]
};

// Returns dt of a token: the softplus of the projected one, within the limits. NaN stays NaN.
INLINE float step_of(const Mamba2 &m, int64_t t, int64_t head) {
    const Mamba2Sizes &sizes = m.sizes;
    const float x = m.inputs[t * m.stride + sizes.output_width() + m.conv.width + head] + m.weights.bias[head];
    return std::min(std::max(softplus(x), (float)sizes.least_step), (float)sizes.most_step);
}

// Computes one vector of all tokens of a row, and the new tails of the vector's channels. With the x of a head,
// computes its dt and factors.
inline void convolve(const Mamba2 &m, const StateRow &row, int64_t vector) {
    const Vectors &vectors = m.mixed.vectors;
    const int64_t size = vectors.size(vector);
    const float *x = m.inputs + m.sizes.output_width();
    RowChannels<false> channels{m.conv, row, vectors.start(vector), size, x, nullptr, m.stride};
    for (int64_t n = 0; n < row.count; n++) {
        const int64_t t = row.first + n;
        float *to = m.mixed.at(vector, t);
        for (int64_t i = 0; i < vectors.padded(vector); i += LANES) store(to + i, Silu::of(channels.at(n, i)));
        if (vector >= m.sizes.heads) continue;
        const float step = step_of(m, t, vector);
        m.steps[vector * m.mixed.tokens + t] = step;
        m.factors[vector * m.mixed.tokens + t] = exponential(splat(step * m.weights.decay[vector]))[0];
    }
    channels.keep_tails();
}

constexpr int64_t MAMBA_ROWS = 32;     // rows of a matrix in a tile; a multiple of all LANES
constexpr int MAMBA_ROWS_TOGETHER = 4; // rows that are computed together, so that no sum waits for its last addition

// A state that comes from memory is prefetched into the second cache this many numbers ahead, 4 KiB. The processor's
// own prefetching stops at the end of each page.
constexpr int64_t STATE_AHEAD = 1024;

// Computes S = factor * S + x B^T and the sums whose sum is S C, for COUNT rows of S. The sizes of S, B and C are
// multiples of SUMS. FROM_MEMORY: whether S is not in a cache yet.
template <int COUNT, bool FROM_MEMORY>
INLINE void change_rows(StateTile s, float factor, const float *x, const float *b, const float *c, int64_t size,
                        Sixteen *products) {
    Floats added[COUNT];
    Sixteen results[COUNT] = {};
    for (int r = 0; r < COUNT; r++) added[r] = splat(x[r]);
    for (int64_t i = 0; i < size; i += SUMS)
        for (int p = 0; p < SPLIT; p++) {
            const int64_t j = i + p * LANES;
            const Floats to_add = load(b + j), read = load(c + j);
            for (int r = 0; r < COUNT; r++) {
                float *at = s.at + r * s.stride + j;
                if (FROM_MEMORY) __builtin_prefetch(at + STATE_AHEAD, 0, 2);
                const Floats changed = fused(added[r], to_add, load(at) * factor);
                store(at, changed);
                results[r].of[p] = fused(changed, read, results[r].of[p]);
            }
        }
    for (int r = 0; r < COUNT; r++) products[r] = results[r];
}

// Does so for `rows` rows, fewer than COUNT.
template <int COUNT, bool FROM_MEMORY>
INLINE void change_last_rows(int64_t rows, StateTile s, float factor, const float *x, const float *b, const float *c,
                             int64_t size, Sixteen *products) {
    if constexpr (COUNT > 1) {
        if (rows < COUNT - 1) return change_last_rows<COUNT - 1, FROM_MEMORY>(rows, s, factor, x, b, c, size, products);
        change_rows<COUNT - 1, FROM_MEMORY>(s, factor, x, b, c, size, products);
    }
}

// Some rows of the matrix of a head, and the inputs of a token for them.
struct HeadRows {
    StateTile s;
    int64_t rows;
    const float *x, *b, *c; // padded with zeros
    int64_t size;           // of B and C, padded
    float step, factor, skip;
};

// Changes the rows by a token, and writes their results to `out`.
template <bool FROM_MEMORY> INLINE void change_tile(const HeadRows &h, float *out) {
    constexpr int TOGETHER = MAMBA_ROWS_TOGETHER;
    for (int64_t first = 0; first < h.rows; first += LANES) {
        const int64_t rows = std::min<int64_t>(LANES, h.rows - first);
        const Floats x = load(h.x + first);
        float added[LANES];
        store(added, x * h.step);
        Sixteen products[LANES] = {};
        StateTile s{h.s.at + first * h.s.stride, h.s.stride};
        int64_t r = 0;
        for (; r + TOGETHER <= rows; r += TOGETHER, s.at += TOGETHER * s.stride)
            change_rows<TOGETHER, FROM_MEMORY>(s, h.factor, added + r, h.b, h.c, h.size, products + r);
        change_last_rows<TOGETHER, FROM_MEMORY>(rows - r, s, h.factor, added + r, h.b, h.c, h.size, products + r);
        store_first(out + first, fused(splat(h.skip), x, sums_of(products)), rows);
    }
}

// Computes `rows` rows of one head, from `first` on, for all tokens of a row of the step.
//
// scratch: [MAMBA_ROWS, S], padded to whole vectors
inline void compute_rows(const Mamba2 &m, StateRow row, int64_t head, int64_t first, int64_t rows, float *scratch) {
    const Mamba2Sizes &sizes = m.sizes;
    const int64_t b_vector = sizes.b_of(head), c_vector = sizes.c_of(head), padded = m.mixed.vectors.padded(b_vector);
    const int64_t at = m.conv.tail_items() + (head * sizes.head_dim + first) * sizes.state;
    const StateTile held{row.held + at, sizes.state};
    const bool in_place = row.kept == row.count && padded == sizes.state; // drafts need a copy
    const StateTile s = in_place ? held : StateTile{scratch, padded};
    if (!in_place) copy_tile(held, s, rows, sizes.state, padded);
    auto keep = [&](int64_t done) {
        row.keep(done, [&](float *to) {
            if (to + at != s.at) copy_tile(s, StateTile{to + at, sizes.state}, rows, sizes.state, sizes.state);
        });
    };
    keep(0);
    for (int64_t n = 0; n < row.count; n++) {
        const int64_t t = row.first + n, of_head = head * m.mixed.tokens + t;
        const HeadRows h{s,      rows, m.mixed.at(head, t) + first, m.mixed.at(b_vector, t), m.mixed.at(c_vector, t),
                         padded, m.steps[of_head], m.factors[of_head], m.weights.skip[head]};
        float *out = m.out + t * sizes.output_width() + head * sizes.head_dim + first;
        if (n == 0 && in_place) change_tile<true>(h, out);
        else change_tile<false>(h, out);
        keep(n + 1);
    }
}

// Multiplies one group of a token's results by the SiLU of the gate. Norms it before or afterwards, if there is a norm.
INLINE void gate_and_norm(const Mamba2 &m, int64_t t, int64_t group) {
    const Mamba2Sizes &sizes = m.sizes;
    const int64_t width = sizes.output_width() / sizes.groups, start = group * width;
    const float *gate = m.inputs + t * m.stride + start;
    float *out = m.out + t * sizes.output_width() + start;
    const bool is_before = sizes.norm_place == BEFORE_GATE;
    for (int64_t i = 0; i < width && !is_before; i += LANES)
        store_first(out + i, load_first(out + i, width - i) * Silu::of(load_first(gate + i, width - i)), width - i);
    if (sizes.norm_place == NO_NORM) return;
    const float scale = 1.0f / std::sqrt(sum_of_squares(out, width) / (float)width + (float)sizes.eps);
    for (int64_t i = 0; i < width; i += LANES) {
        Floats x = load_first(out + i, width - i) * scale * load_first(m.weights.norm + start + i, width - i);
        if (is_before) x *= Silu::of(load_first(gate + i, width - i));
        store_first(out + i, x, width - i);
    }
}

// Computes the step. Calls `share` three times.
inline void compute_mamba2(Team &team, const Mamba2 &m) {
    const Mamba2Sizes &sizes = m.sizes;
    const int64_t vectors = m.mixed.vectors.count();
    team.share(OTHER_LAYERS, m.states.num_rows * vectors, [&](int64_t item) {
        convolve(m, StateRow(m.states, item / vectors), item % vectors);
    }, true);
    const int64_t tiles = (sizes.head_dim + MAMBA_ROWS - 1) / MAMBA_ROWS, row_tiles = sizes.heads * tiles;
    float *scratch = thread_scratch(MAMBA_ROWS * m.mixed.vectors.padded(sizes.heads));
    team.share(OTHER_LAYERS, m.states.num_rows * row_tiles, [&](int64_t item) {
        const int64_t in_row = item % row_tiles, first = in_row % tiles * MAMBA_ROWS;
        compute_rows(m, StateRow(m.states, item / row_tiles), in_row / tiles, first,
                     std::min(MAMBA_ROWS, sizes.head_dim - first), scratch);
    }, true);
    team.share(OTHER_LAYERS, m.mixed.tokens * sizes.groups, [&](int64_t item) {
        gate_and_norm(m, item / sizes.groups, item % sizes.groups);
    }, true);
}

} // namespace
