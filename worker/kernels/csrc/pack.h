// Packs matrices: GGUF's blocks, without rounding, or numbers. Layouts of the blocks: ggml-common.h of
// llama.cpp.
#pragma once

#include "packed.h"

namespace {

// The kinds of GGUF's blocks, as quant_blocks.py numbers them.
enum Kind : int64_t { Q4_0, Q4_1, Q8_0, Q5_0, Q5_1, IQ4_NL, MXFP4, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS };
constexpr int64_t BLOCK_BYTES[] = {18, 20, 34, 22, 24, 18, 17, 84, 110, 144, 176, 210, 136};
constexpr Format PACKED_AS[] = {Q4, Q4, Q8, Q5, Q5M, I4, F4, Q2K, Q3K, Q4K, Q5K, Q6K, I4K};

// Returns the groups of a block: blocks have 32 or 256 weights.
INLINE int64_t groups_of(int64_t kind) { return kind < Q2_K ? 1 : SPAN; }

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

// ---- Integers of a row of a group.

// Writes 32 integers of a format as the row's words of a group. Signed ones have as many bits as the format.
INLINE void put_integers(int64_t format, const uint8_t *from, uint8_t *integers, int64_t row) {
    const Traits &traits = TRAITS[format];
    uint32_t words[GROUP / 4] = {};
    for (int k = 0; k < GROUP; k++) {
        const int quad = quad_index(k) / 4, byte = quad_index(k) % 4 * 8;
        if (traits.bits == 8) {
            words[quad] |= (uint32_t)from[k] << byte;
            continue;
        }
        // The sum with the offset is the integer with its highest bit flipped.
        uint32_t left = from[k] ^ (traits.bits == 4 ? 0u : (uint32_t)offset_of(traits));
        uint32_t *plane = words;
        for (const int bits : {4, 2, 1}) {
            if (!(traits.bits & bits)) continue;
            plane[quad * bits / 8] |= (left & ((1u << bits) - 1)) << (byte + quad * bits % 8);
            left >>= bits, plane += bits;
        }
    }
    for (int j = 0; j < traits.bits; j++) memcpy(integers + (j * PANEL + row) * 4, words + j, 4);
}

// ---- Blocks of 32 weights.

// Writes the integers of a block of 32 weights, or the nibbles that stand for them, to `to`. Signed ones
// have as many bits as their format.
INLINE void read_small(int64_t kind, const uint8_t *block, uint8_t *to) {
    if (kind == Q8_0) {
        memcpy(to, block + 2, GROUP);
        return;
    }
    const uint8_t *nibbles = block + BLOCK_BYTES[kind] - GROUP / 2;
    for (int k = 0; k < GROUP; k++) to[k] = k < 16 ? nibbles[k] & 15 : nibbles[k - 16] >> 4;
    if (kind != Q5_0 && kind != Q5_1) return;
    uint32_t high;
    memcpy(&high, nibbles - 4, 4);
    const uint8_t offset = kind == Q5_0 ? 16 : 0; // x - 16, in 5 bits, is x with its highest bit flipped
    for (int k = 0; k < GROUP; k++) to[k] = (uint8_t)((to[k] | (high >> k & 1) << 4) ^ offset);
}

INLINE void pack_small(int64_t kind, const uint8_t *block, uint8_t *group, int64_t row) {
    const int64_t format = PACKED_AS[kind];
    if (kind == MXFP4) group[row] = *block;
    else {
        uint16_t scale, minimum;
        memcpy(&scale, block, 2);
        memcpy(group + 2 * row, &scale, 2);
        if (TRAITS[format].has_minima) {
            if (kind == Q4_0) minimum = minus_eight(scale);
            else memcpy(&minimum, block + 2, 2);
            memcpy(group + 2 * PANEL + 2 * row, &minimum, 2);
        }
    }
    uint8_t integers[GROUP];
    read_small(kind, block, integers);
    put_integers(format, integers, group + scales_bytes(format), row);
}

// ---- Blocks of 256 weights, of which each 32 are a group.

// Unpacks 8 scales and 8 minima from 12 bytes. Bytes 0 to 3 have the first four scales, and bytes 4 to 7 the
// first four minima, in their low six bits. Bytes 8 to 11 have the low four bits of the other scales and,
// above them, of the other minima. The two high bits of these are those of bytes 0 to 7.
INLINE void read_six_bits(const uint8_t *from, uint8_t *scales, uint8_t *minima) {
    for (int j = 0; j < 4; j++) {
        scales[j] = from[j] & 63;
        minima[j] = from[j + 4] & 63;
        scales[j + 4] = (uint8_t)((from[j + 8] & 15) | from[j] >> 6 << 4);
        minima[j + 4] = (uint8_t)(from[j + 8] >> 4 | from[j + 4] >> 6 << 4);
    }
}

// Writes the integers of group j of a block to `to`, signed ones in as many bits as their format.
INLINE void read_large(int64_t kind, const uint8_t *block, int j, uint8_t *to) {
    const int half = j / 4, s = j % 4; // of 128 weights
    for (int k = 0; k < GROUP; k++) {
        if (kind == Q4_K || kind == Q5_K) {
            const uint8_t byte = block[BLOCK_BYTES[kind] - 128 + j / 2 * 32 + k];
            to[k] = j % 2 ? byte >> 4 : byte & 15;
            if (kind == Q5_K) to[k] = (uint8_t)(to[k] | (block[16 + k] >> j & 1) << 4);
        } else if (kind == Q6_K) {
            const uint8_t low = block[64 * half + 32 * (s % 2) + k], high = block[128 + 32 * half + k];
            to[k] = (uint8_t)(((low >> 4 * (s / 2) & 15) | (high >> 2 * s & 3) << 4) ^ 32);
        } else if (kind == IQ4_XS) {
            const uint8_t byte = block[8 + 16 * j + k % 16];
            to[k] = k < 16 ? byte & 15 : byte >> 4;
        } else if (kind == Q2_K) to[k] = block[16 + 32 * half + k] >> 2 * s & 3;
        else { // Q3_K: x - 4, in 3 bits
            const uint8_t low = block[32 + 32 * half + k], high = block[k];
            to[k] = (uint8_t)(((low >> 2 * s & 3) | (high >> j & 1) << 2) ^ 4);
        }
    }
}

// Writes the bytes of scales of all groups of a block, at most two for each: of Q4_K and Q5_K a scale and a
// minimum, of others the scales of the group's halves.
INLINE void read_scales(int64_t kind, const uint8_t *block, uint8_t (&to)[SPAN][2]) {
    if (kind == Q4_K || kind == Q5_K) {
        uint8_t scales[SPAN], minima[SPAN];
        read_six_bits(block + 4, scales, minima);
        for (int j = 0; j < SPAN; j++) to[j][0] = scales[j], to[j][1] = minima[j];
    } else if (kind == Q6_K) memcpy(to, block + 192, 2 * SPAN);
    else if (kind == Q2_K) memcpy(to, block, 2 * SPAN);
    else if (kind == IQ4_XS) { // the two high bits of all scales, then the low four bits
        uint16_t high;
        memcpy(&high, block + 2, 2);
        for (int j = 0; j < SPAN; j++)
            to[j][0] = (uint8_t)(((block[4 + j / 2] >> 4 * (j % 2) & 15) | (high >> 2 * j & 3) << 4) - 32);
    } else // Q3_K: the low four bits of 16 scales, then their two high bits
        for (int i = 0; i < 2 * SPAN; i++) {
            const uint8_t low = block[96 + i % 8] >> i / 8 * 4 & 15;
            const uint8_t high = block[104 + i % 4] >> i / 4 * 2 & 3;
            to[i / 2][i % 2] = (uint8_t)((low | high << 4) - 32);
        }
}

INLINE void pack_large(int64_t kind, const uint8_t *block, uint8_t *header, int64_t row) {
    const int64_t format = PACKED_AS[kind];
    const int64_t num_units = header_bytes(format) / (2 * PANEL);
    const bool is_first = kind == Q4_K || kind == Q5_K || kind == IQ4_XS; // whether the block starts with units
    const uint8_t *units = is_first ? block : block + BLOCK_BYTES[kind] - 2 * num_units;
    for (int64_t i = 0; i < num_units; i++) memcpy(header + (i * PANEL + row) * 2, units + 2 * i, 2);
    uint8_t scales[SPAN][2], integers[GROUP];
    read_scales(kind, block, scales);
    for (int j = 0; j < SPAN; j++) {
        uint8_t *group = header + header_bytes(format) + j * group_bytes(format);
        for (int i = 0; i < scales_bytes(format) / PANEL; i++) group[i * PANEL + row] = scales[j][i];
        read_large(kind, block, j, integers);
        put_integers(format, integers, group + scales_bytes(format), row);
    }
}

// Packs row `row` of a panel of `groups` groups from GGUF's blocks.
INLINE void pack_row(int64_t kind, const uint8_t *blocks, int64_t groups, uint8_t *panel, int64_t row) {
    const int64_t format = PACKED_AS[kind];
    for (int64_t g = 0; g < groups; g += groups_of(kind), blocks += BLOCK_BYTES[kind]) {
        if (groups_of(kind) == 1) pack_small(kind, blocks, panel + g * group_bytes(format), row);
        else pack_large(kind, blocks, panel + g / SPAN * span_bytes(format), row);
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
