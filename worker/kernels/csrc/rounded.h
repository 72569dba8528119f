// Rounds rows of x to eight bits: the GROUP numbers of a group become integers from -127 to 127, which share
// a scale. The rounding of a group depends on nothing else, so a row has the same integers alone and in any
// batch. llama.cpp rounds in the same way (its type Q8_1).
//
// The integers are stored as bytes in QUAD_ORDER (packed.h), as unpacked weights are.
#pragma once

#include <vector>

#include "rounding.h"
#include "unpack.h"

namespace {

struct RoundedRows {
    std::vector<uint8_t> bytes;              // [rows][inputs]
    std::vector<float> scales;               // [rows][groups]
    std::vector<int32_t> totals[MAX_BLOCKS]; // [b - 1]: the sums of integers, b for each group
    std::vector<float> sums[MAX_BLOCKS];     // the same, times the scale
};

// Rounds group g of all groups of all rows.
template <class X> INLINE void round_group(const X *x, int64_t g, RoundedRows &to) {
    constexpr int HALF = GROUP / MAX_BLOCKS;
    const float largest = largest_magnitude(x, GROUP), inverse = MOST_ROUNDED / largest, scale = largest / MOST_ROUNDED;
    uint8_t *bytes = to.bytes.data() + g * GROUP;
    int32_t totals[MAX_BLOCKS];
    for (int b = 0; b < MAX_BLOCKS; b++) {
        alignas(64) uint32_t bits[HALF];
        Ints total = {};
        for (int i = 0; i < HALF; i += LANES) {
            const Words each = rounded_bits(load(x + b * HALF + i), inverse);
            store_as(bits + i, each);
            total += integers_in(each);
        }
        for (int i = 0; i < HALF; i += 8) store_quads(bytes + b * HALF + i, bits + i);
        totals[b] = sum(total);
    }
    to.scales[(size_t)g] = scale;
    for (int b = 0; b < MAX_BLOCKS; b++) {
        to.totals[1][(size_t)(g * MAX_BLOCKS + b)] = totals[b];
        to.sums[1][(size_t)(g * MAX_BLOCKS + b)] = (float)totals[b] * scale;
    }
    to.totals[0][(size_t)g] = totals[0] + totals[1];
    to.sums[0][(size_t)g] = (float)(totals[0] + totals[1]) * scale;
}

// Rounds `count` numbers, whole rows of x.
template <class X> INLINE void round_rows(const X *x, int64_t count, RoundedRows &to) {
    const size_t groups = (size_t)(count / GROUP);
    to.bytes.resize((size_t)count);
    to.scales.resize(groups);
    for (size_t b = 0; b < MAX_BLOCKS; b++) {
        to.totals[b].resize(groups * (b + 1));
        to.sums[b].resize(groups * (b + 1));
    }
    for (int64_t g = 0; g < count / GROUP; g++) round_group(x + g * GROUP, g, to);
}

} // namespace
