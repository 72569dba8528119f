// The recurrent states of a step's rows (worker/slots/states.py), and how a layer changes its part of them.
//
// The same operations in the same order change the state by a token, whatever else is computed. So results do not
// depend on the rows of a step, on how a prompt is cut into chunks, on drafts, on saves, or on threads.
//
// Legend: R rows.
#pragma once

#include <algorithm>
#include <vector>

#include "simd.h"

namespace {

// The states of a step's rows. A state of a layer is the tail of its convolution (convolution.h), then its matrices.
struct States {
    float *memory, *checkpoints;                       // the layer's first number in the first state
    int64_t memory_stride, checkpoints_stride;         // numbers from state to state
    int64_t num_slots, num_checkpoints;                // numbers of states
    const int64_t *slots, *starts, *firsts;            // [R]
    const int64_t *counts, *kept;                      // [R]
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

// One row: the position and the index of its first token, and its state in the slot.
struct StateRow {
    const States &states;
    int64_t start, first, count, kept, next_save, saves_end;
    float *held;

    StateRow(const States &s, int64_t r)
        : states(s), start(s.starts[r]), first(s.firsts[r]), count(s.counts[r]), kept(s.kept[r]),
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

// A part of a matrix.
struct StateTile {
    float *at;
    int64_t stride; // numbers from row to row
};

// Copies `rows` rows of `columns` columns. The columns of `to` after them, up to `width`, become 0.
INLINE void copy_tile(StateTile from, StateTile to, int64_t rows, int64_t columns, int64_t width) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < width; j += LANES)
            store_first(to.at + i * to.stride + j, load_first(from.at + i * from.stride + j, columns - j), width - j);
}

// Returns the first address after `from` that is a multiple of 64 bytes, or `from`.
inline float *aligned(float *from) { return (float *)(((uintptr_t)from + 63) / 64 * 64); }
constexpr size_t ALIGNED = 64 / sizeof(float);

// Returns scratch memory of this thread for `count` numbers. The thread's next call returns the same memory.
inline float *thread_scratch(int64_t count) {
    static thread_local std::vector<float> memory;
    if (memory.size() < (size_t)count + ALIGNED) memory.resize((size_t)count + ALIGNED);
    return aligned(memory.data());
}

} // namespace
