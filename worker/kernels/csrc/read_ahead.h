// Reads memory that a later phase needs, while this phase multiplies.
//
// Linears of several rows wait for the processor and leave memory idle. Attention waits for memory, because each row has
// keys and values of its own. So while the linears before it are computed, each tile reads a few cache lines of these keys
// and values.
//
// A line is prefetched, and read when LAG further lines were prefetched. Prefetching alone is not enough: a layer's keys and
// values are more than the second-level cache holds, and a Zen 3 evicts a line from there to the third-level cache only if
// the line was read. Reading alone would wait for memory.
#pragma once

#include <cstdint>
#include <cstdio>

#include "simd.h"

namespace {

constexpr int64_t LINE = 64; // bytes of a cache line
constexpr int64_t LAG = 512; // lines

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

// What a reader does with a line.
struct CacheLines {
    static INLINE void prefetch(const char *line) { __builtin_prefetch(line, 0, 3); }
    static INLINE void read(const char *line) { (void)*(const volatile char *)line; }
};

// Reads the runs of a source. Each thread has its own reader.
template <class Lines> class RunReader {
  public:
    static constexpr int64_t WHOLE = 256; // a rate of one line

    // From now on, each call of `advance` reads rate / WHOLE lines. The source is used until `end`.
    void begin(RunSource &source, int64_t rate) {
        source_ = &source;
        rate_ = rate;
        owed_ = at_ = count_ = 0;
        run_ = {};
    }
    void end() { source_ = nullptr; }

    INLINE void advance() {
        if (source_) read_some();
    }

  private:
    __attribute__((noinline)) void read_some() {
        for (owed_ += rate_; owed_ >= WHOLE; owed_ -= WHOLE) {
            if (at_ >= run_.bytes) {
                at_ = 0;
                if (!source_->next(run_)) return end();
            }
            const char *&place = lines_[count_ % LAG];
            if (count_ >= LAG) Lines::read(place);
            place = run_.first + at_;
            Lines::prefetch(place);
            count_++;
            at_ += LINE;
        }
    }

    RunSource *source_ = nullptr;
    MemoryRun run_;
    int64_t rate_ = 0, owed_ = 0; // in 1 / WHOLE lines
    int64_t at_ = 0, count_ = 0;  // bytes of the run, and lines of all runs, that were prefetched
    const char *lines_[LAG];      // those prefetched last, a ring
};
typedef RunReader<CacheLines> ReadAhead;

// Returns how many bytes are read ahead at most: half of the third-level cache, or a little if Linux does not tell its size.
inline int64_t most_bytes_ahead() {
    static const int64_t most = [] {
        int64_t kib = 8192;
        long found;
        if (FILE *file = std::fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "r")) {
            if (std::fscanf(file, "%ldK", &found) == 1 && found > 0) kib = found;
            std::fclose(file);
        }
        return kib * 1024 / 2;
    }();
    return most;
}

} // namespace
