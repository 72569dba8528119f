// Reads memory that a later phase needs, while this phase multiplies.
//
// Linears of several rows wait for the processor and leave memory idle. Attention waits for memory, because each row has
// keys and values of its own. So while the linears before it are computed, each tile reads a few lines of them.
//
// A line is prefetched, and read when LAG further runs were prefetched. Prefetching alone is not enough: a layer's keys and
// values are more than the second-level cache holds, and a Zen 3 moves only lines that were read from there to the
// third-level cache. Reading alone would wait for memory.
#pragma once

#include <unistd.h>

#include <cstdint>

#include "simd.h"

namespace {

constexpr int64_t LINE = 64; // bytes that are prefetched together
constexpr int LAG = 8;       // runs

// Bytes that are adjacent in memory.
struct MemoryRun {
    const char *first = nullptr;
    int64_t bytes = 0;
};

// Where the runs come from.
struct RunSource {
    // Writes the next run to `run`. Returns false if there is none.
    virtual bool next(MemoryRun &run) = 0;

protected:
    ~RunSource() = default;
};

// Reads the runs of a source. Each thread has its own.
class ReadAhead {
  public:
    // From now on, each call of `advance` reads `lines` lines. The source is used until `end`.
    void begin(RunSource &source, int64_t lines) {
        source_ = &source;
        lines_ = lines;
        run_ = {};
        at_ = 0;
        for (MemoryRun &run : before_) run = {};
    }
    void end() { source_ = nullptr; }

    INLINE void advance() {
        if (source_) read_some();
    }

  private:
    __attribute__((noinline)) void read_some() {
        for (int64_t i = 0; i < lines_; i++) {
            if (at_ >= run_.bytes) {
                before_[oldest_++ % LAG] = run_;
                at_ = 0;
                if (!source_->next(run_)) return end();
            }
            __builtin_prefetch(run_.first + at_, 0, 3);
            const MemoryRun &before = before_[oldest_ % LAG];
            if (at_ < before.bytes) (void)*(const volatile char *)(before.first + at_);
            at_ += LINE;
        }
    }

    RunSource *source_ = nullptr;
    int64_t lines_ = 0, at_ = 0; // at_: bytes of the runs that were prefetched, and read
    MemoryRun run_, before_[LAG]; // a ring
    uint64_t oldest_ = 0;
};

// Returns how many bytes are read ahead at most: what stays in the last cache that all cores share. Half of it is left to
// others.
inline int64_t most_bytes_ahead() {
    constexpr int64_t UNKNOWN = 4 << 20; // processors of ARM do not tell the size
#if defined(_SC_LEVEL3_CACHE_SIZE)
    static const int64_t size = sysconf(_SC_LEVEL3_CACHE_SIZE);
    if (size > 0) return size / 2;
#endif
    return UNKNOWN;
}

} // namespace
