// The terms that LoRA adapters add to the results of linears: y += scale * up^T (down x), for the tokens that
// have an adapter.
//
// lora/table.py is the reference. A token's terms are summed in an order that depends only on the adapter,
// so they have the same bits alone and in any batch. Tokens without an adapter are not touched.
//
// Legend: T tokens.
#pragma once

#include "linear.h"

namespace {

constexpr int MAX_TERM_PARTS = 4; // most modules that form one linear: queries, keys, values and gates
constexpr int64_t SHRUNK_RUN = 8;  // rows of `down` in an item
constexpr int64_t OUTPUT_RUN = 256; // outputs in an item

// The linears of a layer that an adapter can change, in the order of their terms.
enum AdaptedLinear : int64_t { QKV, OUTPUT, GATE_UP, DOWN, NUM_ADAPTED };

// The term of one module of a linear: its outputs get scale * up^T s, where s are its numbers of down x.
struct LowRankPart {
    const void *up;         // [rank, outputs]
    int64_t start, rank;    // its numbers of down x: [start, start + rank)
    int64_t first, outputs; // its outputs in the linear: [first, first + outputs)
    double scale;
};

// The term of a linear in one adapter.
struct LowRankTerm {
    const void *down; // [rank, inputs]
    int64_t rank;     // 0: the adapter does not change the linear
    int64_t num_parts;
    LowRankPart parts[MAX_TERM_PARTS];
};

// The adapters of a step.
struct StepAdapters {
    const LowRankTerm *terms; // [rows of the table, layers, NUM_ADAPTED]
    const int64_t *rows;      // [T]: each token's row of the table, negative: none; null: no token has one
    float *shrunk;            // scratch memory: [T, width], down x of one linear
    int64_t width;            // the largest rank of a term

    // Returns those of the first `count` tokens that have an adapter, ascending.
    std::vector<int64_t> adapted_tokens(int64_t count) const {
        std::vector<int64_t> found;
        for (int64_t t = 0; rows && t < count; t++)
            if (rows[t] >= 0) found.push_back(t);
        return found;
    }
};

// Returns the sum of x[i] * w[i]. count is a multiple of SUMS.
template <class N> INLINE float dot(const N *x, const N *w, int64_t count) {
    return sum_over(count, [&](Floats sums, int64_t i) { return fused(load(x + i), load(w + i), sums); });
}

// The terms of one linear, for the tokens of a step that have an adapter.
template <class N> struct LowRank {
    const StepAdapters &adapters;
    const std::vector<int64_t> &tokens; // those with an adapter, ascending
    int64_t layers, layer;
    AdaptedLinear linear;

    const LowRankTerm &term(int64_t token) const {
        return adapters.terms[(adapters.rows[token] * layers + layer) * NUM_ADAPTED + linear];
    }

    int64_t count() const { return (int64_t)tokens.size(); }

    // Returns the items of `shrink`. An item is a run of rows of `down` for one token. All tokens of a run
    // precede those of the next one.
    int64_t shrink_items() const { return count() * ((adapters.width + SHRUNK_RUN - 1) / SHRUNK_RUN); }

    // Computes some numbers of down x. x: [T, inputs].
    INLINE void shrink(int64_t item, const N *x, int64_t inputs) const {
        const int64_t token = tokens[(size_t)(item % count())], from = item / count() * SHRUNK_RUN;
        const LowRankTerm &t = term(token);
        for (int64_t j = from; j < t.rank && j < from + SHRUNK_RUN; j++)
            adapters.shrunk[token * adapters.width + j] =
                dot(x + token * inputs, (const N *)t.down + j * inputs, inputs);
    }

    // Returns the items of `expand`. An item is a run of outputs for one token, in the order of `shrink`.
    int64_t expand_items(int64_t outputs) const { return count() * ((outputs + OUTPUT_RUN - 1) / OUTPUT_RUN); }

    // Adds the term of some outputs, times `factor`. y: [T, outputs].
    template <class Y> INLINE void expand(int64_t item, Y *y, int64_t outputs, float factor) const {
        const int64_t token = tokens[(size_t)(item % count())], from = item / count() * OUTPUT_RUN;
        const LowRankTerm &t = term(token);
        if (!t.rank) return;
        const float *shrunk = adapters.shrunk + token * adapters.width;
        for (int64_t p = 0; p < t.num_parts; p++) {
            const LowRankPart &part = t.parts[p];
            const int64_t start = from > part.first ? from : part.first;
            const int64_t run_end = from + OUTPUT_RUN, part_end = part.first + part.outputs;
            const int64_t end = run_end < part_end ? run_end : part_end;
            for (int64_t o = start; o < end; o += LANES)
                expand_lanes(part, shrunk + part.start, o - part.first, end - o,
                             y + token * outputs + o, (float)part.scale * factor);
        }
    }

    // Adds the term of the LANES outputs of a part from output `o` on, or of `left` outputs if these are fewer.
    template <class Y>
    INLINE void expand_lanes(const LowRankPart &part, const float *shrunk, int64_t o, int64_t left, Y *y,
                             float scale) const {
        const N *up = (const N *)part.up + o;
        Floats total = {};
        if (left >= LANES) {
            for (int64_t j = 0; j < part.rank; j++) total = fused(splat(shrunk[j]), load(up + j * part.outputs), total);
            return store(y, fused(total, splat(scale), load(y)));
        }
        alignas(64) N some[LANES] = {};
        alignas(64) Y some_y[LANES] = {};
        for (int64_t j = 0; j < part.rank; j++) {
            memcpy(some, up + j * part.outputs, (size_t)left * sizeof(N));
            total = fused(splat(shrunk[j]), load(some), total);
        }
        memcpy(some_y, y, (size_t)left * sizeof(Y));
        store(some_y, fused(total, splat(scale), load(some_y)));
        memcpy(y, some_y, (size_t)left * sizeof(Y));
    }
};

} // namespace
