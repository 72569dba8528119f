// Rounds rows of x to eight bits: the GROUP numbers of a group become integers from -127 to 127, which share
// a scale. The rounding of a group depends on nothing else, so a row has the same integers alone and in any
// batch. llama.cpp rounds in the same way (its type Q8_1).
//
// The integers are stored as bytes in QUAD_ORDER (packed.h), as unpacked weights are.
#pragma once

#include <vector>

#include "unpack.h"

namespace {

struct RoundedRows {
    std::vector<uint8_t> bytes;              // [rows][inputs]
    std::vector<float> scales;               // [rows][groups]
    std::vector<int32_t> totals[MAX_BLOCKS]; // [b - 1]: the sums of integers, b for each group
    std::vector<float> sums[MAX_BLOCKS];     // the same, times the scale
};

constexpr float ROUND = 12582912.0f; // 1.5 * 2^23: adding it rounds to an integer, in the lowest bits

// Rounds group g of all groups of all rows. A group with NaN or an infinite number has such a scale, too, and
// any integers.
template <class X> INLINE void round_group(const X *x, int64_t g, RoundedRows &to) {
    constexpr int EACH = GROUP / LANES;
    alignas(64) uint32_t bits[GROUP];
    Ints most = {}; // of the bits without the sign, which order numbers as their sizes do, NaN last
    for (int i = 0; i < EACH; i++) {
        const Ints size = (Ints)(words(load(x + i * LANES)) & 0x7fffffff);
        most = size > most ? size : most;
    }
    int32_t largest_bits = most[0];
    for (int i = 1; i < LANES; i++) largest_bits = most[i] > largest_bits ? most[i] : largest_bits;
    float largest;
    memcpy(&largest, &largest_bits, 4);
    const float scale = largest / 127, inverse = 127 / largest;
    for (int i = 0; i < EACH; i++) {
        // Without numbers, or with tiny ones, the product is NaN or infinite. Its lowest byte is 0.
        const Words moved = words(load(x + i * LANES) * inverse + ROUND);
        store_as(bits + i * LANES, moved);
    }
    uint8_t *bytes = to.bytes.data() + g * GROUP;
    for (int i = 0; i < GROUP; i += 8) store_quads(bytes + i, bits + i);
    int32_t totals[MAX_BLOCKS] = {};
    for (int i = 0; i < GROUP; i++) totals[i * MAX_BLOCKS / GROUP] += (int8_t)bits[i];
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
