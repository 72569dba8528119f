// The layout of packed weights: panels of 32 outputs, cut into groups of 32 inputs.
//
// A matrix [outputs, inputs] consists of parts, which are ranges of its rows. Each part has a format of
// its own, so matrices that are computed together need not have the same type. A part is cut into panels
// of PANEL rows, of which the last is padded with zeros. A panel is stored as its groups of GROUP columns,
// one after the other. A group contains, by format:
//
//   Q4    32 scales f16, 32 minima f16, 512 bytes of nibbles    weight = scale * nibble + minimum
//   Q8    32 scales f16, 1024 bytes                             weight = scale * signed byte
//   BF16  16 pairs of columns, each [32 outputs][2]
//   F32   32 columns, each [32 outputs]
//   Q5    32 scales f16, 5 bits a weight                        weight = scale * signed integer
//   Q5M   32 scales f16, 32 minima f16, 5 bits a weight         weight = scale * integer + minimum
//   Q3K   32 scales i8, twice, 3 bits a weight                  weight = unit * scale * signed integer
//   Q4K   32 scales u8, 32 minima u8, 512 bytes of nibbles      weight = unit * scale * nibble - step * minimum
//   Q5K   32 scales u8, 32 minima u8, 5 bits a weight           as Q4K
//   Q6K   32 scales i8, twice, 6 bits a weight                  as Q3K
//   Q2K   32 bytes, twice, 2 bits a weight                      as Q4K; a byte is a scale, above it a minimum
//   I4    32 scales f16, 512 bytes of nibbles                   weight = scale * CURVE[nibble]
//   I4K   32 scales i8, 512 bytes of nibbles                    weight = unit * scale * CURVE[nibble]
//   F4    32 exponents, 512 bytes of nibbles                    weight = 2^(exponent - 128) * DOUBLED[nibble]
//
// In formats with units, SPAN groups follow a header: 32 units f16 and, in Q2K, Q4K and Q5K, 32 steps f16.
// Q2K, Q3K and Q6K have a scale, and Q2K a minimum, for each half of a group.
//
// Integers are stored in 32-bit words, words [j][output], so that few operations extract four columns for all outputs:
// a quad, a word of four bytes. The 8 quads of a group hold its columns in QUAD_ORDER.
// - 8 bits: the words are the quads.
// - Fewer bits are cut into planes: their lower four bits, the two bits above, if the number of bits contains a 2, and the
//   bit above, if it is odd. A word of a plane of b bits holds the bits of 8 / b quads: bits s b, ... of each byte are those
//   of quad s. The words of the planes follow one another. Of signed integers, the sum with the offset is stored.
//
// The scales, minima and integers are those of GGUF's blocks, in another order.
#pragma once

#include "simd.h"

namespace {

constexpr int PANEL = 32, GROUP = 32;
constexpr int SPAN = 8;      // groups that share a header
constexpr int MAX_PARTS = 5; // queries, keys, values, and what decays and gates are made of
enum Format : int64_t { Q4, Q8, BF16, F32, Q5, Q5M, Q3K, Q4K, Q5K, Q6K, Q2K, I4, I4K, F4 };

// The order in which bytes of 8 neighbouring columns are stored, and in which a multiplication of integers
// reads them: two words of four. So one shift and mask of a word of nibbles gives a pair of columns, too.
constexpr int QUAD_ORDER[] = {0, 4, 1, 5, 2, 6, 3, 7};
// Returns the index of a column's byte in QUAD_ORDER.
constexpr int quad_index(int column) { return column / 8 * 8 + column % 4 * 2 + column / 4 % 2; }

// How the scales and minima of a group are stored.
enum Scales {
    NONE,
    HALVES,    // f16
    BYTES,     // multiplied by the header's units and steps; signed if there are no minima
    NIBBLES,   // the same: the lower half of a byte is a scale, the upper half a minimum
    EXPONENTS, // the exponent of a power of two, plus 128
};

// The integers that nibbles stand for.
enum Nibbles { THEMSELVES, CURVE, DOUBLED };
constexpr int8_t INTEGERS[][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}, // of IQ4_NL and IQ4_XS
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}, // numbers of E2M1, doubled
};

// What a format's groups contain.
struct Traits {
    int bits;   // of an integer; 16 and 32: of a number
    int blocks; // scales of a row in a group
    Scales scales;
    bool has_minima; // as many as there are scales
    bool is_signed;  // whether integers that are no nibbles are signed
    Nibbles nibbles = THEMSELVES;
};
constexpr Traits TRAITS[] = {
    {4, 1, HALVES, true, false},
    {8, 1, HALVES, false, true},
    {16, 0, NONE, false, true},
    {32, 0, NONE, false, true},
    {5, 1, HALVES, false, true},
    {5, 1, HALVES, true, false},
    {3, 2, BYTES, false, true},
    {4, 1, BYTES, true, false},
    {5, 1, BYTES, true, false},
    {6, 2, BYTES, false, true},
    {2, 2, NIBBLES, true, false},
    {4, 1, HALVES, false, true, CURVE},
    {4, 1, BYTES, false, true, CURVE},
    {4, 1, EXPONENTS, false, true, DOUBLED},
};

// Returns what is added to integers of a format so that the least of them is 0.
constexpr int offset_of(const Traits &t) {
    if (t.bits != 4) return t.is_signed ? 1 << (t.bits - 1) : 0;
    int least = 0;
    for (int i = 0; i < 16; i++) least = INTEGERS[t.nibbles][i] < least ? INTEGERS[t.nibbles][i] : least;
    return -least;
}
// Returns the greatest integer of a format after the offset is added.
constexpr int greatest_of(const Traits &t) {
    if (t.bits != 4) return (1 << t.bits) - 1;
    int most = 0;
    for (int i = 0; i < 16; i++) most = INTEGERS[t.nibbles][i] > most ? INTEGERS[t.nibbles][i] : most;
    return most + offset_of(t);
}

// Returns the bytes of a group before its integers.
constexpr int64_t scales_bytes(int64_t format) {
    const Traits t = TRAITS[format];
    if (t.scales == NIBBLES) return PANEL * t.blocks;
    return PANEL * t.blocks * (1 + t.has_minima) * (t.scales == HALVES ? 2 : 1);
}
constexpr int64_t group_bytes(int64_t format) {
    return scales_bytes(format) + PANEL * GROUP * TRAITS[format].bits / 8;
}
// Returns the bytes of the header of SPAN groups; 0 if the format has none.
constexpr int64_t header_bytes(int64_t format) {
    const Traits t = TRAITS[format];
    return t.scales == BYTES || t.scales == NIBBLES ? PANEL * 2 * (1 + t.has_minima) : 0;
}
INLINE int64_t span_bytes(int64_t format) { return header_bytes(format) + SPAN * group_bytes(format); }

// Returns the bytes of a panel of `groups` groups.
INLINE int64_t panel_bytes(int64_t format, int64_t groups) {
    return groups * group_bytes(format) + (groups + SPAN - 1) / SPAN * header_bytes(format);
}

// Returns group g of a panel. Groups of the same span follow one another.
INLINE const uint8_t *group_at(int64_t format, const uint8_t *panel, int64_t g) {
    return panel + g / SPAN * span_bytes(format) + header_bytes(format) + g % SPAN * group_bytes(format);
}
// Returns the header of group g.
INLINE const uint8_t *header_at(int64_t format, const uint8_t *panel, int64_t g) {
    return panel + g / SPAN * span_bytes(format);
}

// Rows of a packed matrix that have one format.
struct Part {
    const uint8_t *data;
    int64_t format;
    int64_t outputs; // without padding
};

// A packed matrix [outputs, inputs].
struct Packed {
    int64_t outputs;
    int64_t inputs; // a multiple of GROUP
    int64_t rounds_inputs; // whether x is rounded to eight bits for the parts that are quantised
    int64_t num_parts;
    Part parts[MAX_PARTS];
};

INLINE int64_t panels_of(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }
INLINE int64_t panels_of(const Packed &matrix) {
    int64_t panels = 0;
    for (int64_t i = 0; i < matrix.num_parts; i++) panels += panels_of(matrix.parts[i].outputs);
    return panels;
}
// Returns whether any part of the matrix is quantised, or whether any is not.
INLINE bool is_any(const Packed &matrix, bool quantised) {
    bool found = false;
    for (int64_t i = 0; i < matrix.num_parts; i++)
        found |= (TRAITS[matrix.parts[i].format].blocks > 0) == quantised;
    return found;
}
// Returns whether groups of the matrix have minima, and `blocks` of them.
INLINE bool has_minima(const Packed &matrix, int blocks) {
    bool found = false;
    for (int64_t i = 0; i < matrix.num_parts; i++) {
        const Traits &traits = TRAITS[matrix.parts[i].format];
        found |= traits.has_minima && traits.blocks == blocks;
    }
    return found;
}

} // namespace
