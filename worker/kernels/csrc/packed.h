// The layout of packed weights: panels of 32 outputs, cut into groups of 32 inputs.
//
// A matrix [outputs, inputs] is cut into panels of PANEL rows, of which the last is padded with zeros. A
// panel is stored as its groups of GROUP columns, one after the other. A group contains, by format:
//
//   Q4    32 scales f16, 32 minima f16, 512 bytes of nibbles    weight = scale * nibble + minimum
//   Q8    32 scales f16, 1024 bytes                             weight = scale * signed byte
//   BF16  16 pairs of columns, each [32 outputs][2]
//   F32   32 columns, each [32 outputs]
//
// Nibbles and bytes are stored in 32-bit words, words [j][output]. The lower half of a word holds even
// columns, the upper half odd ones: nibble s of half h of word j is column 2 (4 j + s) + h, and byte s
// is column 2 (2 j + s) + h. So one shift and one mask extract a column, or a pair of neighbouring
// columns, for all outputs.
//
// The scales, minima and integers are those of GGUF's blocks, in another order.
#pragma once

#include "simd.h"

namespace {

constexpr int PANEL = 32, GROUP = 32;
enum Format : int64_t { Q4 = 0, Q8 = 1, BF16 = 2, F32 = 3 };
constexpr int64_t GROUP_BYTES[] = {128 + PANEL * GROUP / 2, 64 + PANEL * GROUP, PANEL * GROUP * 2,
                                   PANEL * GROUP * 4};

// A packed matrix [outputs, inputs].
struct Packed {
    const uint8_t *data;
    int64_t format;
    int64_t outputs; // without padding
    int64_t inputs;  // a multiple of GROUP
};

INLINE int64_t panels_of(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }

// The kinds of GGUF's blocks of 32 weights.
constexpr int64_t Q4_0 = 0, Q4_1 = 1, Q8_0 = 2;
constexpr int64_t BLOCK_BYTES[] = {18, 20, 34};

INLINE float half_to_float(uint16_t half) {
    float size;
    const uint32_t bits = (uint32_t)(half & 0x7fff) << 13;
    memcpy(&size, &bits, 4);
    size *= 0x1p112f;
    return half & 0x8000 ? -size : size;
}

// Returns -8 * scale as float16. Exact if the result is finite.
INLINE uint16_t minus_eight(uint16_t scale) {
    const uint16_t exponent = scale & 0x7c00, sign = (uint16_t)(~scale & 0x8000);
    if (exponent) return (uint16_t)(sign | ((scale & 0x7fff) + 0x0c00));
    const int fraction = scale & 0x3ff; // a subnormal number: fraction * 2^-24
    if (!fraction) return sign;
    int shifted = fraction * 8, power = 0;
    while (shifted >= 0x800) {
        shifted >>= 1; // loses no bit: the lowest three bits are zero
        power++;
    }
    if (shifted < 0x400) return (uint16_t)(sign | shifted);
    return (uint16_t)(sign | ((power + 1) << 10) | (shifted & 0x3ff));
}

// Writes a GGUF block to a group, as the group's row `row`.
INLINE void pack_block(int64_t kind, const uint8_t *block, uint8_t *group, int64_t row) {
    uint16_t scale, minimum;
    memcpy(&scale, block, 2);
    memcpy(group + 2 * row, &scale, 2);
    if (kind == Q8_0) {
        for (int64_t k = 0; k < GROUP; k++)
            group[64 + (k / 4 * PANEL + row) * 4 + (k % 2) * 2 + k % 4 / 2] = block[2 + k];
        return;
    }
    if (kind == Q4_1) memcpy(&minimum, block + 2, 2);
    else minimum = minus_eight(scale);
    memcpy(group + 64 + 2 * row, &minimum, 2);
    const uint8_t *nibbles = block + (kind == Q4_1 ? 4 : 2);
    for (int64_t k = 0; k < GROUP; k++) {
        const uint8_t nibble = k < 16 ? nibbles[k] & 15 : nibbles[k - 16] >> 4;
        const int64_t pair = k / 2, s = pair % 4;
        uint8_t *word = group + 128 + (pair / 4 * PANEL + row) * 4 + (k % 2) * 2;
        word[s / 2] = (uint8_t)(word[s / 2] | nibble << 4 * (s % 2));
    }
}

// Writes GROUP numbers to a group, as the group's row `row`.
INLINE void pack_values(const bf16 *from, uint8_t *group, int64_t row) {
    for (int64_t k = 0; k < GROUP; k++)
        memcpy(group + ((k / 2 * PANEL + row) * 2 + k % 2) * 2, from + k, 2);
}
INLINE void pack_values(const float *from, uint8_t *group, int64_t row) {
    for (int64_t k = 0; k < GROUP; k++) memcpy(group + (k * PANEL + row) * 4, from + k, 4);
}

} // namespace
