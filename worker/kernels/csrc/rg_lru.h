// The recurrence of an RG-LRU layer, and the gate after it. The layer's convolution is that of convolution.h.
// worker/layers/rg_lru_rule.py defines both.
//
// Each number of a state changes independently of the others. So a thread computes all tokens of a row for a few
// channels of one head, whose states stay in the first cache.
//
// Legend: T tokens, H heads, D channels of a head, C = H * D.
#pragma once

#include "activation.h"
#include "convolution.h"
#include "team.h"

namespace {

// The weights of the recurrence, [C] each: the factor of the logarithm of the decay, and the biases of both gates.
struct LruWeights {
    const float *decay, *input_bias, *decay_bias;
};

// What the recurrence reads of each token.
struct LruInputs {
    const float *x;      // [T, C]
    const float *gates;  // [H, T, 2 D]: of the input, then of the decay
    const float *gate;   // [T, C], of the result
    int64_t gate_stride; // numbers from token to token of the gate
};

// The tensors of a call. The states are those of the recurrence [C].
struct RgLru {
    int64_t heads, dim, tokens;
    int64_t activation; // an ActivationKind without numbers of its own
    States states;
    LruWeights weights;
    LruInputs inputs;
    float *out; // [T, C]
};

// Some adjacent channels of a head.
struct LruChannels {
    int64_t head, start, size; // `start` is counted from the head's first channel
};

// Returns the states s of some channels after a token: s = a * s + sqrt(1 - a^2) * x, with a = e^log. The first token
// of a text has a = 0.
INLINE Floats changed_lru(Floats s, Floats x, Floats log, bool is_first) {
    if (is_first) return x;
    const Floats twice = log + log;
    return fused(exponential(log), s, square_root(-(exponential_rest(twice) + twice)) * x);
}

// Changes the states s of the channels by token t, and writes their results.
template <class Act> INLINE void change_lru(const RgLru &m, LruChannels c, float *s, int64_t t, bool is_first) {
    const int64_t first = c.head * m.dim + c.start, at = t * m.heads * m.dim + first;
    const float *gates = m.inputs.gates + (c.head * m.tokens + t) * 2 * m.dim + c.start;
    for (int64_t i = 0; i < c.size; i += LANES) {
        const int64_t rest = c.size - i;
        auto of_channels = [&](const float *from) { return load_first(from + i, rest); };
        const Floats input = sigmoid(of_channels(gates) + of_channels(m.weights.input_bias + first));
        const Floats log = sigmoid(of_channels(gates + m.dim) + of_channels(m.weights.decay_bias + first)) *
                           of_channels(m.weights.decay + first);
        const Floats held = changed_lru(of_channels(s), of_channels(m.inputs.x + at) * input, log, is_first);
        store_first(s + i, held, rest);
        const Floats gate = of_channels(m.inputs.gate + t * m.inputs.gate_stride + first);
        store_first(m.out + at + i, held * Act::of(gate), rest);
    }
}

// Computes the channels for all tokens of a row of the step.
template <class Act> void scan_lru(const RgLru &m, StateRow row, LruChannels c) {
    float states[CHANNELS_TOGETHER];
    const int64_t at = c.head * m.dim + c.start;
    std::copy_n(row.held + at, c.size, states);
    auto keep = [&](int64_t done) { row.keep(done, [&](float *to) { std::copy_n(states, c.size, to + at); }); };
    keep(0);
    for (int64_t n = 0; n < row.count; n++) {
        change_lru<Act>(m, c, states, row.first + n, row.start + n == 0);
        keep(n + 1);
    }
}

inline void scan_lru_as(const RgLru &m, const StateRow &row, LruChannels c) {
    if (m.activation == SILU) scan_lru<Silu>(m, row, c);
    else if (m.activation == GELU) scan_lru<Gelu>(m, row, c);
    else if (m.activation == GELU_TANH) scan_lru<GeluTanh>(m, row, c);
    else scan_lru<Relu2>(m, row, c);
}

// Computes the recurrence of a step. Calls `share` once.
inline void compute_rg_lru(Team &team, const RgLru &m) {
    const Vectors vectors = channel_vectors(m.dim);
    const int64_t of_head = vectors.count(), of_row = m.heads * of_head;
    team.share(OTHER_LAYERS, m.states.num_rows * of_row, [&](int64_t item) {
        const int64_t vector = item % of_head;
        const LruChannels channels{item % of_row / of_head, vectors.start(vector), vectors.size(vector)};
        scan_lru_as(m, StateRow(m.states, item / of_row), channels);
    }, true);
}

} // namespace
