// The causal convolution of a recurrent layer over the latest tokens, for each channel on its own.
// worker/layers/recurrence.py (`convolved`) defines it.
//
// Legend: T tokens, C width of the convolution.
#pragma once

#include <memory>

#include "states.h"
#include "sums.h"
#include "team.h"

namespace {

// How the C channels are cut into vectors: `count` vectors of `dim` channels, then `more` of `more_dim`. A thread
// computes one vector of one row at a time.
struct Vectors {
    int64_t num, dim, num_more, more_dim;

    int64_t count() const { return num + num_more; }
    int64_t size(int64_t vector) const { return vector < num ? dim : more_dim; }
    // Returns the index of the vector's first channel. With count(), returns C.
    int64_t start(int64_t vector) const { return sum_before(vector, dim, more_dim); }
    int64_t width() const { return start(count()); }

    // Returns the size with zeros after the vector, so that it can be read SUMS numbers at a time.
    int64_t padded(int64_t vector) const { return vector < num ? whole(dim) : whole(more_dim); }
    // Returns how many numbers the vectors before this one have, all padded.
    int64_t padded_start(int64_t vector) const { return sum_before(vector, whole(dim), whole(more_dim)); }

  private:
    static int64_t whole(int64_t numbers) { return in_sixteens(numbers); }
    int64_t sum_before(int64_t vector, int64_t each, int64_t each_more) const {
        const int64_t first = std::min(vector, num);
        return first * each + (vector - first) * each_more;
    }
};

constexpr int64_t CHANNELS_TOGETHER = 64; // that a thread computes at a time

// Returns the vectors that `width` channels are cut into if they need not form others.
inline Vectors channel_vectors(int64_t width) {
    const int64_t rest = width % CHANNELS_TOGETHER;
    return {width / CHANNELS_TOGETHER, CHANNELS_TOGETHER, rest ? 1 : 0, rest};
}

// The tensors of a convolution.
struct Convolution {
    int64_t kernel, width;
    const float *taps; // [kernel, C], oldest token first
    const float *bias; // [C]; null: nothing is added

    int64_t before() const { return kernel - 1; }
    // Returns the size of the tail [kernel - 1, C], the inputs of the latest tokens.
    int64_t tail_items() const { return before() * width; }
};

// Inputs are prefetched this many tokens ahead. The processor does not do so by itself, because the inputs of two
// tokens are far apart in memory.
constexpr int64_t TOKENS_AHEAD = 6;

// Some adjacent channels of a row's convolution. If IS_PRODUCT, an input is the product of two numbers.
template <bool IS_PRODUCT> struct RowChannels {
    const Convolution &conv;
    StateRow row;
    int64_t start, size;
    const float *x;       // [T, C]: inputs of the first token, first channel
    const float *factors; // [T, C], if IS_PRODUCT
    int64_t stride;       // numbers from token to token of both

    // Returns the inputs i, i + 1, ... of the row's token n, with zeros after the last channel. Those before the row
    // are in the tail.
    INLINE Floats input(int64_t n, int64_t i) const {
        if (n < 0) return load_first(row.held + (conv.before() + n) * conv.width + start + i, size - i);
        const int64_t at = (row.first + n) * stride + start + i;
        const Floats inputs = load_first(x + at, size - i);
        return IS_PRODUCT ? inputs * load_first(factors + at, size - i) : inputs;
    }

    // Returns the results i, i + 1, ... of the row's token n.
    INLINE Floats at(int64_t n, int64_t i) const {
        const int64_t ahead = (row.first + std::min(n + TOKENS_AHEAD, row.count - 1)) * stride + start + i;
        __builtin_prefetch(x + ahead);
        if (IS_PRODUCT) __builtin_prefetch(factors + ahead);
        Floats sum = conv.bias ? load_first(conv.bias + start + i, size - i) : Floats{};
        for (int64_t tap = 0; tap < conv.kernel; tap++) {
            const Floats weights = load_first(conv.taps + tap * conv.width + start + i, size - i);
            sum = fused(input(n - conv.before() + tap, i), weights, sum);
        }
        return sum;
    }

    // Writes the tails of these channels that are kept. The row's own tail is the last to be overwritten, because the
    // others are made of it. Afterwards, no result can be computed.
    void keep_tails() {
        for (int64_t done = 0; done <= row.kept; done++)
            row.keep(done, [&](float *tail) {
                for (int64_t j = 0; j < conv.before(); j++)
                    for (int64_t i = 0; i < size; i += LANES)
                        store_first(tail + j * conv.width + start + i, input(done - conv.before() + j, i), size - i);
            });
    }
};

// The activation of a convolution that has none.
struct Identity {
    static INLINE Floats of(Floats x) { return x; }
};

// The tensors of a call that computes only a convolution. The states are those of the tail.
struct ConvolutionStep {
    States states;
    Convolution conv;
    const float *inputs; // [T, C]
    int64_t stride;      // numbers from token to token of inputs
    float *out;          // [T, C]
};

// Computes some channels of all tokens of a row, and their new tails.
template <class Act> void convolve(const ConvolutionStep &s, const StateRow &row, int64_t start, int64_t size) {
    RowChannels<false> channels{s.conv, row, start, size, s.inputs, nullptr, s.stride};
    for (int64_t n = 0; n < row.count; n++) {
        float *out = s.out + (row.first + n) * s.conv.width + start;
        for (int64_t i = 0; i < size; i += LANES) store_first(out + i, Act::of(channels.at(n, i)), size - i);
    }
    channels.keep_tails();
}

// Computes the activation of the convolution of a step. Calls `share` once.
template <class Act> void compute_convolution(Team &team, const ConvolutionStep &s) {
    const Vectors vectors = channel_vectors(s.conv.width);
    const int64_t count = vectors.count();
    team.share(OTHER_LAYERS, s.states.num_rows * count, [&](int64_t item) {
        const int64_t vector = item % count;
        convolve<Act>(s, StateRow(s.states, item / count), vectors.start(vector), vectors.size(vector));
    }, true);
}

// What a convolution makes of all tokens of a step, vector by vector: token after token, padded with zeros.
struct Mixed {
    Vectors vectors;
    int64_t tokens;
    float *numbers;

    INLINE float *at(int64_t vector, int64_t t) const {
        return numbers + vectors.padded_start(vector) * tokens + t * vectors.padded(vector);
    }
};

// The memory of it during a call.
class MixedMemory {
  public:
    MixedMemory(const Vectors &vectors, int64_t tokens)
        : memory_(new float[(size_t)(vectors.padded_start(vectors.count()) * tokens) + ALIGNED]),
          mixed{vectors, tokens, aligned(memory_.get())} {}

  private:
    std::unique_ptr<float[]> memory_; // before `mixed`, which is made of it

  public:
    const Mixed mixed;
};

} // namespace
