// The most common kind of step, in which every row computes one position and samples the next token.
// One call reads the slot table (slots/fields.py) and computes the logits and, if wanted, the likeliest
// token of each row.
//
// Legend: R rows, V vocabulary, L tokens and B blocks that a slot can hold, E blocks in a column of a
// block table.
#pragma once

#include "forward.h"
#include "sampling.h"

namespace {

// The final norm and the output head.
struct Head {
    Norm norm; // [hidden]
    Packed weight;
    double eps, scale, soft_cap; // as in Scoring, of the logits
};

// The arguments of a decode step.
struct Decode {
    Forward pass;                         // without ids, positions, slot_mapping and rows
    Head head;
    const int64_t *slots, *starts;        // [R]: each row's slot, and the position that is computed
    int32_t *token_ids, *lens;            // [slots, L], [slots]
    const int32_t *block_table;           // [slots, B]
    int64_t max_tokens, max_blocks, num_entries, vocab; // L, B, E
    float *logits;                        // [R, V]
    int64_t *tokens;                      // [R]; if null, no token is chosen and no slot is changed
    uint8_t *finite;                      // [R]: see ChosenToken
    Sampler sampler;
    const int32_t *rope_shifts;           // [slots]: from a token's position to its rotary one; null: none
};

// A decode step's forward pass, with the arrays that it reads for its tokens and rows.
struct DecodeRows {
    std::vector<int64_t> ids, rope_positions, slot_mapping, row_starts, context_lens, block_table;
    Forward pass;
    int64_t bad_row = -1; // the first row whose token is not in the vocabulary

    explicit DecodeRows(const Decode &d) : pass(d.pass) {
        const int64_t count = pass.tokens, size = pass.rows.block_tokens;
        int64_t most = 0;
        for (int64_t r = 0; r < count; r++) most = d.starts[r] > most ? d.starts[r] : most;
        const int64_t width = most / size + 1;
        row_starts.push_back(0);
        for (int64_t r = 0; r < count; r++) {
            const int64_t slot = d.slots[r], start = d.starts[r];
            ids.push_back(d.token_ids[slot * d.max_tokens + start]);
            if (bad_row < 0 && (ids[r] < 0 || ids[r] >= d.vocab)) bad_row = r;
            row_starts.push_back(r + 1);
            context_lens.push_back(start + 1);
            if (d.rope_shifts) rope_positions.push_back(start + d.rope_shifts[slot]);
        }
        for (int64_t e = 0; e < d.num_entries; e++)
            for (int64_t r = 0; r < count; r++) add_blocks(d, r, e, size, width);
        pass.ids = ids.data();
        pass.positions = d.starts;
        if (d.rope_shifts) pass.rope_positions = rope_positions.data();
        pass.slot_mapping = slot_mapping.data();
        pass.rows = {row_starts.data(), context_lens.data(), block_table.data(), count, count, width, size, nullptr};
    }

    // Appends the place of a row's token in block `entry` of its column, and these blocks of all columns.
    void add_blocks(const Decode &d, int64_t row, int64_t entry, int64_t size, int64_t width) {
        const int32_t *blocks = d.block_table + d.slots[row] * d.max_blocks + entry;
        const int64_t start = d.starts[row], step = d.num_entries;
        slot_mapping.push_back(blocks[start / size * step] * size + start % size);
        if (step == 1) block_table.insert(block_table.end(), blocks, blocks + width);
        else for (int64_t i = 0; i < width; i++) block_table.push_back(blocks[i * step]);
    }
};

// Makes each number x of a row cap * tanh(x / cap).
INLINE void cap_row(float *row, int64_t count, float cap) {
    for (int64_t i = 0; i < count; i += LANES) {
        const Floats x = load_first(row + i, count - i);
        store_first(row + i, cap * hyperbolic_tangent(x / cap), count - i);
    }
}

// Computes the logits y [rows, outputs] of x [rows, hidden]. All threads of the team call this. rounded: has room
// for the rows.
template <class N>
INLINE void compute_logits(Team &team, const Head &head, const float *x, int64_t rows, N *normed,
                           float *y, RoundedRows &rounded) {
    const int64_t hidden = head.weight.inputs;
    team.share(HEAD, rows, [&](int64_t t) {
        norm_row<N>(x + t * hidden, head.norm, normed + t * hidden, hidden, (float)head.eps);
        if (reads_rounded(head.weight)) round_row(normed + t * hidden, t, hidden, rounded);
    });
    linear(team, Linear<N, float>{normed, head.weight, nullptr, y, rows, STORE, 1, &rounded}, HEAD);
    if (head.scale == 1 && head.soft_cap == 0) return;
    team.share(HEAD, rows, [&](int64_t t) {
        float *row = y + t * head.weight.outputs;
        for (int64_t i = 0; i < head.weight.outputs; i++) row[i] *= (float)head.scale;
        if (head.soft_cap != 0) cap_row(row, head.weight.outputs, (float)head.soft_cap);
    });
}

// Chooses a row's token, and appends it to its slot.
INLINE void append_token(const Decode &d, int64_t row) {
    const int64_t vocab = d.head.weight.outputs, slot = d.slots[row], next = d.starts[row] + 1;
    const ChosenToken chosen = choose_token(d.sampler, slot, next, d.logits + row * vocab, vocab, true);
    d.finite[row] = chosen.finite;
    d.tokens[row] = chosen.token;
    d.token_ids[slot * d.max_tokens + next] = (int32_t)chosen.token;
    d.lens[slot] = (int32_t)(next + 1);
}

// Computes a decode step in number type N.
template <class N> void decode_as(const Decode &d, const DecodeRows &decode_rows, int64_t threads) {
    Pass<N> pass(decode_rows.pass);
    const int64_t rows = decode_rows.pass.tokens;
    if (reads_rounded(d.head.weight)) pass.rounded.fit(rows, d.head.weight.inputs);
    together(threads, pass.num_phases() + 4, [&](Team &team) {
        pass.run(team);
        compute_logits(team, d.head, decode_rows.pass.x, rows, pass.normed(), d.logits, pass.rounded);
        if (d.tokens) team.share(SAMPLING, rows, [&](int64_t row) { append_token(d, row); });
    });
}

} // namespace
