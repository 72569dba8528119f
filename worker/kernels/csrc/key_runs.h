// The keys and values that the decode rows of a layer see, as runs of adjacent memory (read_ahead.h).
#pragma once

#include <algorithm>
#include <atomic>

#include "attention.h"
#include "read_ahead.h"

namespace {

// A run is what one row sees of one block of keys, or of values. Each thread has its own KeyRuns. Threads take pieces of
// rows from the list of attention's work, in its order. The token of this step is left out: it is not in the cache yet.
class KeyRuns final : public RunSource {
  public:
    // token_bytes: of the keys of a token, and of its values. taken: how many pieces the threads have taken.
    KeyRuns(const void *keys, const void *values, int64_t token_bytes, const Rows &rows, const Work &work,
            const Scoring &scoring, std::atomic<int64_t> &taken)
        : keys_((const char *)keys), values_((const char *)values), token_bytes_(token_bytes), rows_(rows), work_(&work),
          scoring_(scoring), taken_(&taken) {}

    // Returns the bytes of all runs.
    int64_t bytes() const {
        int64_t tokens = 0;
        for (int64_t row = 0; row < rows_.num_decodes; row++) {
            const int64_t last = rows_.context_lens[row] - 1;
            tokens += last - std::min(scoring_.first_key(last), last);
        }
        return 2 * tokens * token_bytes_;
    }

    // Leaves out the pieces after the first ones, which have at most this many bytes.
    void limit(int64_t bytes) { most_pieces_ = bytes / (2 * PIECE * token_bytes_); }

    bool next(MemoryRun &run) override {
        if (key_ >= end_ && !take_piece()) return false;
        const int64_t size = rows_.block_tokens, stop = std::min((key_ / size + 1) * size, end_);
        const int64_t block = rows_.block_table[row_ * rows_.table_width + key_ / size];
        const int64_t token = block * size + key_ % size;
        run = {(is_value_ ? values_ : keys_) + token * token_bytes_, (stop - key_) * token_bytes_};
        if (is_value_) key_ = stop;
        is_value_ = !is_value_;
        return true;
    }

  private:
    // Takes the next piece of which anything is seen. Returns false if there is none.
    bool take_piece() {
        const int64_t pieces = std::min((int64_t)work_->items.size() - work_->num_tiles, most_pieces_);
        do {
            const int64_t i = taken_->fetch_add(1, std::memory_order_relaxed);
            if (i >= pieces) return false;
            const Item &item = work_->items[(size_t)(work_->num_tiles + i)];
            row_ = item.row;
            const int64_t last = rows_.context_lens[row_] - 1;
            key_ = std::max(item.first, scoring_.first_key(last));
            end_ = std::min(item.first + PIECE, last);
        } while (key_ >= end_);
        return true;
    }

    const char *keys_, *values_;
    int64_t token_bytes_;
    Rows rows_;
    const Work *work_;
    Scoring scoring_;
    std::atomic<int64_t> *taken_;
    int64_t most_pieces_ = INT64_MAX;
    int64_t row_ = 0, key_ = 0, end_ = 0; // keys [key_, end_) of the piece are left
    bool is_value_ = false;               // whether the next run has values: those of the run before
};

} // namespace
