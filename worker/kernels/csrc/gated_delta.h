// The convolution and the recurrence of a gated delta net. worker/layers/delta_rule.py defines both.
//
// Each column of a state's matrix changes independently of the others. So a matrix is computed in tiles of columns,
// which stay in the first cache while all tokens of a row change them. A token costs one pass over the tile.
//
// The same operations in the same order change the state by a token, whatever else is computed. So results do not
// depend on the rows of a step, on how a prompt is cut into chunks, on drafts, on saves, or on threads.
//
// Legend: T tokens, R rows, H value heads, K key dim, V value dim, C width of the convolution.
#pragma once

#include <algorithm>
#include <vector>

#include "activation.h"
#include "team.h"

namespace {

// The dimensions of a layer (worker/spec/recurrent.py).
struct DeltaSizes {
    int64_t key_heads, value_heads, key_dim, value_dim, kernel;
    int64_t is_tiled; // whether value head v uses key head v % key_heads
    double norm_eps; // is added to the sum of squares of a query or key

    // Returns the number of vectors that the convolution makes of a token: queries, keys, then values.
    int64_t vectors() const { return 2 * key_heads + value_heads; }
    // Returns the dimension of such a vector.
    int64_t dim(int64_t vector) const { return vector < 2 * key_heads ? key_dim : value_dim; }
    // Returns the index of its first number. With 2 key_heads + value_heads, returns C.
    int64_t start(int64_t vector) const {
        const int64_t keys = std::min(vector, 2 * key_heads);
        return keys * key_dim + (vector - keys) * value_dim;
    }
    int64_t width() const { return start(vectors()); }
    // Returns the key head that a value head uses.
    int64_t key_of(int64_t head) const {
        return is_tiled ? head % key_heads : head / (value_heads / key_heads);
    }
};

// The states of a step's rows (worker/slots/states.py). A state of the layer is the tail of the convolution
// [kernel - 1, C], then the matrices [H, K, V].
struct DeltaStates {
    float *memory, *checkpoints;                       // the layer's first number in the first state
    int64_t memory_stride, checkpoints_stride;         // numbers from state to state
    int64_t num_slots, num_checkpoints;                // numbers of states
    const int64_t *slots, *firsts, *counts, *kept;     // [R]
    const int64_t *save_rows, *save_counts, *save_ids; // [num_saves]
    int64_t num_rows, num_saves;

    // Returns whether row r is among the tokens and slots that exist.
    bool is_valid(int64_t r, int64_t tokens) const {
        const bool has_slot = 0 <= slots[r] && slots[r] < num_slots;
        const bool has_tokens = 0 <= firsts[r] && 0 <= counts[r] && counts[r] <= tokens - firsts[r];
        return has_slot && has_tokens && 0 <= kept[r] && kept[r] <= counts[r];
    }

    // Returns whether the save is of an existing row and checkpoint, and ordered after the one before it. Checkpoint
    // 0 is that of a new request, and must stay zeros.
    bool is_valid_save(int64_t save) const {
        const int64_t row = save_rows[save], id = save_ids[save];
        if (row < 0 || row >= num_rows || id < 1 || id >= num_checkpoints || save_counts[save] < 0) return false;
        if (save == 0 || save_rows[save - 1] < row) return true;
        return save_rows[save - 1] == row && save_counts[save - 1] <= save_counts[save];
    }

    // Returns the first row that is not valid, or has a save that is not; -1 if all are valid.
    int64_t bad_row(int64_t tokens) const {
        for (int64_t r = 0; r < num_rows; r++)
            if (!is_valid(r, tokens)) return r;
        for (int64_t save = 0; save < num_saves; save++)
            if (!is_valid_save(save)) return std::max<int64_t>(save_rows[save], 0);
        return -1;
    }
};

// One row: the index of its first token, and its state in the slot.
struct DeltaRow {
    const DeltaStates &states;
    int64_t first, count, kept, next_save, saves_end;
    float *held;

    DeltaRow(const DeltaStates &s, int64_t r)
        : states(s), first(s.firsts[r]), count(s.counts[r]), kept(s.kept[r]),
          held(s.memory + s.slots[r] * s.memory_stride) {
        next_save = std::lower_bound(s.save_rows, s.save_rows + s.num_saves, r) - s.save_rows;
        saves_end = std::upper_bound(s.save_rows, s.save_rows + s.num_saves, r) - s.save_rows;
    }

    // Calls write(to) for each place that keeps the state after `done` tokens: checkpoints, then the slot. It must be
    // called for 0, 1, 2, ... tokens.
    template <class Write> INLINE void keep(int64_t done, Write &&write) {
        if (done > kept) return;
        for (; next_save < saves_end && states.save_counts[next_save] == done; next_save++)
            write(states.checkpoints + states.save_ids[next_save] * states.checkpoints_stride);
        if (done == kept) write(held);
    }
};

// The tensors of one call.
struct Delta {
    DeltaSizes sizes;
    DeltaStates states;
    const float *conv;         // [kernel, C]
    const float *qkv;          // [T, C]
    int64_t qkv_stride;        // numbers from token to token of qkv
    const float *beta, *decay; // [T, H]
    float *mixed;              // scratch memory [T * C]: what the convolution makes, vector by vector for all tokens
    float *out;                // [T, H, V]
    int64_t tokens;

    // Returns where the convolution writes a vector of token t.
    INLINE float *mixed_at(int64_t vector, int64_t t) const {
        return mixed + sizes.start(vector) * tokens + t * sizes.dim(vector);
    }
};

// The convolution prefetches the input of a token this many tokens ahead. The processor does not do so by itself,
// because the inputs of two tokens are far apart in memory.
constexpr int64_t TOKENS_AHEAD = 6;

// Computes one vector of all tokens of a row, and the new tails of the vector's channels. Queries and keys are
// divided by their length, and queries by sqrt(K).
inline void convolve(const Delta &d, DeltaRow row, int64_t vector) {
    const DeltaSizes &sizes = d.sizes;
    const int64_t dim = sizes.dim(vector), start = sizes.start(vector), width = sizes.width();
    const int64_t before = sizes.kernel - 1;
    // Returns the input of the row's token n; those before the row are in the tail.
    auto input = [&](int64_t n) {
        return (n < 0 ? row.held + (before + n) * width : d.qkv + (row.first + n) * d.qkv_stride) + start;
    };
    for (int64_t n = 0; n < row.count; n++) {
        float *to = d.mixed_at(vector, row.first + n);
        Floats squares = {};
        const int64_t ahead = std::min(n + TOKENS_AHEAD, row.count - 1);
        for (int64_t i = 0; i < dim; i += LANES) {
            __builtin_prefetch(input(ahead) + i);
            Floats x = {};
            for (int64_t tap = 0; tap <= before; tap++)
                x = fused(load_first(input(n - before + tap) + i, dim - i),
                          load_first(d.conv + tap * width + start + i, dim - i), x);
            x = Silu::of(x);
            squares = fused(x, x, squares);
            store_first(to + i, x, dim - i);
        }
        if (vector >= 2 * sizes.key_heads) continue;
        float scale = 1.0f / std::sqrt(sum(squares) + (float)sizes.norm_eps);
        if (vector < sizes.key_heads) scale /= std::sqrt((float)dim);
        for (int64_t i = 0; i < dim; i += LANES)
            store_first(to + i, load_first(to + i, dim - i) * scale, dim - i);
    }
    // The row's own tail is the last to be overwritten, because the others are made of it.
    for (int64_t done = 0; done <= row.kept; done++)
        row.keep(done, [&](float *tail) {
            for (int64_t j = 0; j < before; j++)
                memmove(tail + j * width + start, input(done - before + j), (size_t)dim * sizeof(float));
        });
}

constexpr int DELTA_VECTORS = 4; // vectors of columns in a tile

// Some columns of a matrix [K, V].
struct StateTile {
    float *at;
    int64_t stride; // numbers from row to row
};

// Copies `columns` columns. The columns of `to` after them, up to a whole vector, become 0 if it is `padded`.
INLINE void copy_tile(StateTile from, StateTile to, int64_t key_dim, int64_t columns, bool padded) {
    for (int64_t i = 0; i < key_dim; i++)
        for (int64_t j = 0; j < columns; j += LANES) {
            const Floats x = load_first(from.at + i * from.stride + j, columns - j);
            store_first(to.at + i * to.stride + j, x, padded ? LANES : columns - j);
        }
}

// Computes S^T k.
template <int COUNT>
INLINE void recall(StateTile s, const float *k, int64_t key_dim, Floats (&known)[COUNT]) {
    for (int j = 0; j < COUNT; j++) known[j] = Floats{};
    for (int64_t i = 0; i < key_dim; i++)
        for (int j = 0; j < COUNT; j++)
            known[j] = fused(load(s.at + i * s.stride + j * LANES), splat(k[i]), known[j]);
}

// Computes S = factor * S + k change^T, and S^T q of the new S. If HAS_NEXT, computes S^T next_k too, in the order of
// `recall`, so that the next token need not read S twice.
template <int COUNT, bool HAS_NEXT>
INLINE void change_state(StateTile s, float factor, const Floats (&change)[COUNT], const float *k, const float *q,
                         const float *next_k, int64_t key_dim, Floats (&result)[COUNT], Floats (&known)[COUNT]) {
    for (int j = 0; j < COUNT; j++) result[j] = known[j] = Floats{};
    for (int64_t i = 0; i < key_dim; i++) {
        float *row = s.at + i * s.stride;
        // The compiler cannot load these once itself, because it assumes that stores may change them.
        const Floats key = splat(k[i]), query = splat(q[i]), next_key = splat(HAS_NEXT ? next_k[i] : 0.0f);
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
template <int COUNT>
__attribute__((noinline)) void compute_columns(const Delta &d, DeltaRow row, int64_t head, int64_t column,
                                               int64_t columns, float *scratch) {
    const DeltaSizes &sizes = d.sizes;
    const int64_t key_dim = sizes.key_dim, value_dim = sizes.value_dim, num_heads = sizes.value_heads;
    const int64_t key = sizes.key_of(head);
    const int64_t at = (sizes.kernel - 1) * sizes.width() + head * key_dim * value_dim + column;
    const StateTile held{row.held + at, value_dim};
    // If there are several tokens, the columns are copied. Where they lie, many of them share a place in the cache, so
    // they would not stay in it. Drafts need a copy anyway.
    const bool in_place = row.count == 1 && row.kept == 1 && columns == COUNT * LANES;
    const StateTile s = in_place ? held : StateTile{scratch, COUNT * LANES};
    if (!in_place) copy_tile(held, s, key_dim, columns, true);
    auto keep = [&](int64_t done) {
        row.keep(done, [&](float *to) {
            if (to + at != s.at) copy_tile(s, StateTile{to + at, value_dim}, key_dim, columns, false);
        });
    };
    keep(0);
    Floats known[COUNT], change[COUNT], result[COUNT];
    if (row.count) recall(s, d.mixed_at(sizes.key_heads + key, row.first), key_dim, known);
    for (int64_t n = 0; n < row.count; n++) {
        const int64_t t = row.first + n;
        const float *q = d.mixed_at(key, t), *k = d.mixed_at(sizes.key_heads + key, t);
        const float *v = d.mixed_at(2 * sizes.key_heads + head, t) + column;
        const float factor = exponential(splat(d.decay[t * num_heads + head]))[0];
        for (int j = 0; j < COUNT; j++)
            change[j] = fused(known[j], splat(-factor), load_first(v + j * LANES, columns - j * LANES)) *
                        d.beta[t * num_heads + head];
        if (n + 1 < row.count)
            change_state<COUNT, true>(s, factor, change, k, q, k + key_dim, key_dim, result, known);
        else change_state<COUNT, false>(s, factor, change, k, q, nullptr, key_dim, result, known);
        float *out = d.out + (t * num_heads + head) * value_dim + column;
        for (int j = 0; j < COUNT; j++) store_first(out + j * LANES, result[j], columns - j * LANES);
        keep(n + 1);
    }
}

// Computes a tile of at most COUNT vectors of columns.
template <int COUNT>
INLINE void compute_tile(const Delta &d, const DeltaRow &row, int64_t head, int64_t column, int64_t columns,
                         float *scratch) {
    if constexpr (COUNT > 1)
        if (columns <= (COUNT - 1) * LANES) return compute_tile<COUNT - 1>(d, row, head, column, columns, scratch);
    compute_columns<COUNT>(d, row, head, column, columns, scratch);
}

// Returns scratch memory of this thread for `count` numbers, at a multiple of 64 bytes.
inline float *delta_scratch(int64_t count) {
    static thread_local std::vector<float> memory;
    constexpr size_t ALIGNED = 64 / sizeof(float);
    if (memory.size() < (size_t)count + ALIGNED) memory.resize((size_t)count + ALIGNED);
    const uintptr_t at = (uintptr_t)memory.data();
    return (float *)((at + 63) / 64 * 64);
}

// Computes the step. Calls `share` twice.
inline void compute_delta(Team &team, const Delta &d) {
    const int64_t vectors = d.sizes.vectors(), value_dim = d.sizes.value_dim, width = DELTA_VECTORS * LANES;
    team.share(OTHER_LAYERS, d.states.num_rows * vectors, [&](int64_t item) {
        convolve(d, DeltaRow(d.states, item / vectors), item % vectors);
    }, true);
    const int64_t tiles = (value_dim + width - 1) / width, row_tiles = d.sizes.value_heads * tiles;
    float *scratch = delta_scratch(d.sizes.key_dim * width);
    team.share(OTHER_LAYERS, d.states.num_rows * row_tiles, [&](int64_t item) {
        const int64_t in_row = item % row_tiles, column = in_row % tiles * width;
        compute_tile<DELTA_VECTORS>(d, DeltaRow(d.states, item / row_tiles), in_row / tiles, column,
                                    std::min(width, value_dim - column), scratch);
    }, true);
}

} // namespace
