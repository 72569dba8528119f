// The keys and values that the decode rows of a layer see, as runs of adjacent memory (read_ahead.h).
#pragma once

#include <algorithm>
#include <atomic>

#include "attention.h"
#include "read_ahead.h"

namespace {

// A run is what one row sees of one block of keys or of values. Threads take runs from one list, which has them in the
// order in which attention computes rows. The token of this step is left out: it is not in the cache yet.
struct KeyRuns final : RunSource {
    const char *keys, *values; // the caches of the layer
    int64_t token_bytes;       // of the keys of a token, and of its values
    Rows rows;
    Scoring scoring;
    std::atomic<int64_t> *taken; // of the list, by all threads

    KeyRuns(const void *keys, const void *values, int64_t token_bytes, const Rows &rows, const Scoring &scoring,
            std::atomic<int64_t> *taken)
        : keys((const char *)keys), values((const char *)values), token_bytes(token_bytes), rows(rows), scoring(scoring),
          taken(taken) {}

    bool next(MemoryRun &run) override {
        const int64_t blocks = rows.num_decodes * rows.table_width, size = rows.block_tokens;
        for (;;) {
            const int64_t i = taken->fetch_add(1, std::memory_order_relaxed), block = i / 2;
            if (block >= blocks) return false;
            const int64_t row = block / rows.table_width, start = block % rows.table_width * size;
            const int64_t last = rows.context_lens[row] - 1;
            const int64_t first = std::max(scoring.first_key(last) - start, (int64_t)0);
            const int64_t end = std::min(last - start, size);
            if (first >= end) continue;
            const int64_t token = rows.block_table[block] * size + first;
            run = {(i % 2 ? values : keys) + token * token_bytes, (end - first) * token_bytes};
            return true;
        }
    }

    // Returns the bytes of all runs.
    int64_t bytes() const {
        int64_t tokens = 0;
        for (int64_t row = 0; row < rows.num_decodes; row++) {
            const int64_t last = rows.context_lens[row] - 1;
            tokens += last - std::min(scoring.first_key(last), last);
        }
        return 2 * tokens * token_bytes;
    }
};

} // namespace
