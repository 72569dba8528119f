// The team of threads that computes: the threads of the OpenMP runtime that torch has loaded.
//
// A second runtime would start a second set of threads, which compete with torch's for the cores. So
// nothing here is compiled as OpenMP or linked with it. Instead, `set_runtime` receives the entry point
// of the loaded runtime. Without a runtime, a single thread computes.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#include "simd.h"

namespace {

typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned); // GOMP_parallel

inline Parallel &runtime() {
    static Parallel loaded = nullptr;
    return loaded;
}

// The parts of a step, whose times can be measured. worker/debug/benchmark has the same order.
enum StepPart : int { LINEARS, ATTENTION, HEAD, SAMPLING, OTHER_LAYERS };

// Returns where the nanoseconds of each part are added up. Null: no times are measured.
inline int64_t *&part_times() {
    static int64_t *times = nullptr;
    return times;
}

// Adds up the time of each part, as one thread sees it: its own work, and the waits for the others.
class PartClock {
  public:
    explicit PartClock(int64_t *times) : times_(times), since_(times ? now() : 0) {}

    // Counts the time since the last call for `part`.
    INLINE void count_for(StepPart part) {
        if (!times_) return;
        const int64_t at = now();
        times_[part] += at - since_;
        since_ = at;
    }

  private:
    static int64_t now() {
        const auto since = std::chrono::steady_clock::now().time_since_epoch();
        return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
    }

    int64_t *times_, since_;
};

INLINE void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb"); // takes about as long as the other; `yield` takes no time
#endif
}

// A thread that waits for the end of a phase spins this often, about 15 us, and then sleeps. Most phases
// are shorter.
constexpr int SPINS = 1000;

// A list of items, which threads compute as they become free.
//
// A phase ends when all items are computed, not when all threads have arrived. So a thread that is
// suspended, or has not woken up yet, delays the others only if it has taken items that it has not finished.
class Phase {
  public:
    // A thread takes one item at a time. If `in_runs`, it takes several, and fewer towards the end: adjacent panels
    // are adjacent in memory, and threads contend for the counter each time they take items.
    template <class Work> INLINE void share(int count, int threads, bool in_runs, Work &&work) {
        int mine = 0;
        for (int first, end; take(count, in_runs ? 2 * threads : count, first, end); mine += end - first)
            for (int i = first; i < end; i++) work(i);
        if (mine && done_.fetch_add(mine) + mine == count && sleepers_.load()) wake();
        for (int spins = 0; done_.load(std::memory_order_acquire) < count; spins++) {
            if (spins < SPINS) relax();
            else sleep(count);
        }
    }

  private:
    // Takes items [first, end), a part of those that are left, but at least one. Returns false if none are left.
    INLINE bool take(int count, int parts, int &first, int &end) {
        first = next_.load(std::memory_order_relaxed);
        do {
            if (first >= count) return false;
            const int some = (count - first) / parts;
            end = first + (some > 1 ? some : 1);
        } while (!next_.compare_exchange_weak(first, end, std::memory_order_relaxed));
        return true;
    }

    // No wake-up is lost: a thread increments sleepers_ before it checks done_ again, and the thread that
    // ends the phase changes done_ before it checks sleepers_. So at least one of them sees the other.
    void sleep(int count) {
        sleepers_.fetch_add(1);
        const int done = done_.load();
        if (done < count) wait_while(done);
        sleepers_.fetch_sub(1);
    }

#if defined(__linux__)
    void wait_while(int done) {
        syscall(SYS_futex, &done_, FUTEX_WAIT_PRIVATE, done, nullptr, nullptr, 0);
    }
    void wake() { syscall(SYS_futex, &done_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }
#else
    void wait_while(int) { sched_yield(); }
    void wake() {}
#endif

    std::atomic<int> next_{0}, done_{0}, sleepers_{0};
    char apart_[52]; // padding, so that the next phase's counters are in another cache line
};

// One thread's view of the phases: the phase that it computes next.
class Team {
  public:
    Team(Phase *phases, int threads, int64_t *times) : phase_(phases), threads_(threads), clock_(times) {}

    // Computes items [0, count) together with the other threads, and returns when all are computed. Its time
    // counts for `part`. Results must not depend on which thread computes an item. in_runs: see Phase.
    template <class Work> INLINE void share(StepPart part, int64_t count, Work &&work, bool in_runs = false) {
        (phase_++)->share((int)count, threads_, in_runs, work);
        clock_.count_for(part);
    }

  private:
    Phase *phase_;
    int threads_;
    PartClock clock_;
};

// Runs body(Team&) in at most `threads` threads. The body calls `share` at most num_phases times.
template <class Body> void together(int64_t threads, int64_t num_phases, Body &&body) {
    static thread_local char of_thread; // its address identifies the thread
    struct Call {
        Body &body;
        std::vector<Phase> phases;
        int threads;
        const char *caller;
    } call{body, std::vector<Phase>((size_t)num_phases), threads > 1 ? (int)threads : 1, &of_thread};
    auto run = [](void *data) {
        Call &call = *static_cast<Call *>(data);
        Team team(call.phases.data(), call.threads, call.caller == &of_thread ? part_times() : nullptr);
        call.body(team);
    };
    if (threads <= 1 || runtime() == nullptr) run(&call);
    else runtime()(run, &call, (unsigned)threads, 0);
}

} // namespace
