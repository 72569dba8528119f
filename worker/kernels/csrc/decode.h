// The most common step: every row computes one position and samples the next token. One call goes from
// the slots' tables (fields.py) to logits, and to the likeliest token of each row.
//
// Legend: R rows, V vocabulary, L tokens and B blocks that a slot can hold.
#pragma once

#include "forward.h"

namespace {

// norm [hidden]
struct Head {
    const void *norm;
    Packed weight;
    double eps;
};

struct Decode {
    Forward pass;                         // its tokens and rows are filled in by this file
    Head head;
    const int64_t *slots, *starts;        // [R]: the slot of each row, and the position that it computes
    int32_t *token_ids, *lens;            // [slots, L], [slots]
    const int32_t *block_table;           // [slots, B]
    int64_t max_tokens, max_blocks, vocab;
    float *logits;                        // [R, V]
    int64_t *tokens;                      // [R]; null: no token is chosen, and no slot is changed
    uint8_t *finite;                      // [R]: whether the greatest logit is finite; if not, the token is 0
};

// The arrays that a forward pass needs for the rows.
struct Placed {
    std::vector<int64_t> ids, slot_mapping, row_starts, context_lens, block_table;
    Forward pass;
    int64_t bad_row = -1; // the first row whose token is not in the vocabulary

    explicit Placed(const Decode &d) : pass(d.pass) {
        const int64_t count = pass.tokens, size = pass.rows.block_tokens;
        int64_t most = 0;
        for (int64_t r = 0; r < count; r++) most = d.starts[r] > most ? d.starts[r] : most;
        const int64_t width = most / size + 1;
        row_starts.push_back(0);
        for (int64_t r = 0; r < count; r++) {
            const int64_t slot = d.slots[r], start = d.starts[r];
            const int32_t *blocks = d.block_table + slot * d.max_blocks;
            ids.push_back(d.token_ids[slot * d.max_tokens + start]);
            if (bad_row < 0 && (ids[r] < 0 || ids[r] >= d.vocab)) bad_row = r;
            slot_mapping.push_back(blocks[start / size] * size + start % size);
            row_starts.push_back(r + 1);
            context_lens.push_back(start + 1);
            block_table.insert(block_table.end(), blocks, blocks + width);
        }
        pass.ids = ids.data();
        pass.positions = d.starts;
        pass.slot_mapping = slot_mapping.data();
        pass.rows = {row_starts.data(), context_lens.data(), block_table.data(), count, count, width, size};
    }
};

// x [rows, hidden] -> y [rows, outputs]
template <class N>
INLINE void project(Team &team, const Head &head, const float *x, int64_t rows, N *normed, float *y) {
    const int64_t hidden = head.weight.inputs;
    team.share(rows, [&](int64_t t) {
        norm_row(x + t * hidden, (const N *)head.norm, normed + t * hidden, hidden, (float)head.eps);
    });
    linear(team, Linear<N, float>{normed, head.weight, nullptr, y, rows, STORE});
}

// The first index of the greatest number, or of the first NaN if there is one, as torch.max returns.
INLINE int64_t likeliest(const float *row, int64_t count) {
    Floats best = splat(-INFINITY), odd = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const Floats v = load(row + i);
        best = greater(v, best);
        odd += v - v; // NaN if any number is NaN or infinite
    }
    float most = greatest(best);
    bool is_odd = !(sum(odd) == 0);
    for (; i < count; i++) {
        most = row[i] > most ? row[i] : most;
        is_odd |= !(row[i] - row[i] == 0);
    }
    if (is_odd)
        for (int64_t o = 0; o < count; o++)
            if (row[o] != row[o]) return o;
    int64_t o = 0;
    while (o < count - 1 && row[o] != most) o++;
    return o;
}

INLINE void choose(const Decode &d, int64_t row) {
    const int64_t vocab = d.head.weight.outputs, slot = d.slots[row], next = d.starts[row] + 1;
    const float *logits = d.logits + row * vocab;
    const int64_t best = likeliest(logits, vocab);
    const bool finite = logits[best] - logits[best] == 0;
    d.finite[row] = finite;
    d.tokens[row] = finite ? best : 0;
    d.token_ids[slot * d.max_tokens + next] = (int32_t)d.tokens[row];
    d.lens[slot] = (int32_t)(next + 1);
}

template <class N> void decode_as(const Decode &d, const Placed &placed, int64_t threads) {
    Pass<N> pass(placed.pass);
    const int64_t rows = placed.pass.tokens;
    together(threads, pass.num_phases() + 3, [&](Team &team) {
        pass.run(team);
        project(team, d.head, placed.pass.x, rows, pass.normed(), d.logits);
        if (d.tokens) team.share(rows, [&](int64_t row) { choose(d, row); });
    });
}

} // namespace
