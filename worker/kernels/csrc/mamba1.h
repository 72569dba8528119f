// The recurrence of a Mamba-1 layer, and the gate after it. The layer's convolution is that of convolution.h.
// worker/layers/mamba1_rule.py defines both.
//
// Each channel has a row of a state's matrix, which changes independently of the others and lies in memory as one
// piece. So a matrix is computed in tiles of rows, which stay in the first cache while all tokens change them.
//
// Legend: T tokens, C channels, S state.
#pragma once

#include "activation.h"
#include "convolution.h"
#include "team.h"

namespace {

// The weights of the recurrence.
struct ScanWeights {
    const float *decay;       // [C, S]
    const float *bias, *skip; // [C]
};

// What the recurrence reads of each token.
struct ScanInputs {
    const float *x, *step; // [T, C]
    const float *b, *c;    // [T, S]
    const float *gate;     // [T, C]
    int64_t gate_stride;   // numbers from token to token of the gate
};

// The tensors of a call of the recurrence. The states are those of the matrix [C, S].
struct Mamba1Scan {
    int64_t channels, state;
    States states;
    ScanWeights weights;
    ScanInputs inputs;
    float *out; // [T, C]
};

constexpr int64_t SCAN_ROWS = 64; // rows of a matrix in a tile; a multiple of all LANES

// Changes the row of a channel by a token: S = exp(dt * A) * S + dt * x * B. Returns the sums whose sum is S C.
INLINE Sixteen change_channel(float *s, const float *decay, float step, float added, const float *b, const float *c,
                              int64_t size) {
    Sixteen result = {};
    for (int64_t i = 0; i < size; i += SUMS)
        for (int p = 0; p < SPLIT; p++) {
            const int64_t j = i + p * LANES, rest = size - j;
            if (rest <= 0) break;
            const Floats factor = exponential(load_first(decay + j, rest) * step);
            const Floats changed = fused(splat(added), load_first(b + j, rest), load_first(s + j, rest) * factor);
            store_first(s + j, changed, rest);
            result.of[p] = fused(changed, load_first(c + j, rest), result.of[p]);
        }
    return result;
}

// Changes `rows` rows, those of the channels from `first` on, by token t, and writes their results.
INLINE void change_channels(const Mamba1Scan &m, StateTile s, int64_t first, int64_t rows, int64_t t) {
    const ScanInputs &in = m.inputs;
    const float *b = in.b + t * m.state, *c = in.c + t * m.state;
    for (int64_t i = 0; i < rows; i += LANES) {
        const int64_t count = std::min<int64_t>(LANES, rows - i), channel = first + i, at = t * m.channels + channel;
        const Floats x = load_first(in.x + at, count), gate = load_first(in.gate + t * in.gate_stride + channel, count);
        float steps[LANES], added[LANES];
        const Floats step = softplus(load_first(in.step + at, count) + load_first(m.weights.bias + channel, count));
        store(steps, step);
        store(added, x * step);
        Sixteen products[LANES] = {};
        for (int64_t r = 0; r < count; r++)
            products[r] = change_channel(s.at + (i + r) * s.stride, m.weights.decay + (channel + r) * m.state, steps[r],
                                         added[r], b, c, m.state);
        const Floats result = fused(load_first(m.weights.skip + channel, count), x, sums_of(products));
        store_first(m.out + at, result * Silu::of(gate), count);
    }
}

// Computes `rows` channels from `first` on, for all tokens of a row of the step.
//
// scratch: [SCAN_ROWS, S]
inline void scan_channels(const Mamba1Scan &m, StateRow row, int64_t first, int64_t rows, float *scratch) {
    const int64_t at = first * m.state;
    const bool in_place = row.kept == row.count; // drafts need a copy
    const StateTile held{row.held + at, m.state}, s{in_place ? held.at : scratch, m.state};
    if (!in_place) copy_tile(held, s, rows, m.state, m.state);
    auto keep = [&](int64_t done) {
        row.keep(done, [&](float *to) {
            if (to + at != s.at) copy_tile(s, StateTile{to + at, m.state}, rows, m.state, m.state);
        });
    };
    keep(0);
    for (int64_t n = 0; n < row.count; n++) {
        change_channels(m, s, first, rows, row.first + n);
        keep(n + 1);
    }
}

// Computes the recurrence of a step. Calls `share` once.
inline void compute_mamba1_scan(Team &team, const Mamba1Scan &m) {
    const int64_t tiles = (m.channels + SCAN_ROWS - 1) / SCAN_ROWS;
    float *scratch = thread_scratch(SCAN_ROWS * m.state);
    team.share(OTHER_LAYERS, m.states.num_rows * tiles, [&](int64_t item) {
        const int64_t first = item % tiles * SCAN_ROWS;
        scan_channels(m, StateRow(m.states, item / tiles), first, std::min(SCAN_ROWS, m.channels - first), scratch);
    }, true);
}

} // namespace
