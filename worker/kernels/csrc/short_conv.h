// A short convolution between two gates. worker/layers/short_conv_rule.py defines it.
//
// Legend: T tokens, C width of the convolution.
#pragma once

#include "convolution.h"
#include "team.h"

namespace {

// The tensors of one call. A state is the tail of the convolution alone.
struct ShortConv {
    States states;
    Convolution conv;
    const float *inputs; // [T, 3 C]: the gate B, the gate C, and x
    int64_t stride;      // numbers from token to token of inputs
    float *out;          // [T, C]
};

// Computes some channels of all tokens of a row, and their new tails.
inline void convolve(const ShortConv &s, const StateRow &row, int64_t start, int64_t size) {
    const int64_t width = s.conv.width;
    RowChannels<true> channels{s.conv, row, start, size, s.inputs + 2 * width, s.inputs, s.stride};
    for (int64_t n = 0; n < row.count; n++) {
        const int64_t t = row.first + n;
        const float *gate = s.inputs + t * s.stride + width + start;
        float *out = s.out + t * width + start;
        for (int64_t i = 0; i < size; i += LANES)
            store_first(out + i, channels.at(n, i) * load_first(gate + i, size - i), size - i);
    }
    channels.keep_tails();
}

// Computes the step. Calls `share` once.
inline void compute_short_conv(Team &team, const ShortConv &s) {
    const Vectors vectors = channel_vectors(s.conv.width);
    const int64_t count = vectors.count();
    team.share(OTHER_LAYERS, s.states.num_rows * count, [&](int64_t item) {
        const int64_t vector = item % count;
        convolve(s, StateRow(s.states, item / count), vectors.start(vector), vectors.size(vector));
    }, true);
}

} // namespace
