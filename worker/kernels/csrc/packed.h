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
//
// In the last four formats, SPAN groups follow a header: 32 units f16 and, in Q4K and Q5K, 32 steps f16.
// Q3K and Q6K have a scale for each half of a group.
//
// Integers are stored in 32-bit words, words [j][output], so one shift and one mask extract a column, or a
// pair of neighbouring columns, for all outputs.
// - Nibbles and bytes: the lower half of a word holds even columns, the upper half odd ones. Nibble s of
//   half h of word j is column 2 (4 j + s) + h, and byte s is column 2 (2 j + s) + h.
// - B = 3, 5 or 6 bits: B words hold columns 0 to 29, 32 / B in each, lowest bits first. The two top bits of
//   the words hold columns 30 and 31: see put_field in pack.h.
//
// The scales, minima and integers are those of GGUF's blocks, in another order.
#pragma once

#include "simd.h"

namespace {

constexpr int PANEL = 32, GROUP = 32;
constexpr int SPAN = 8;      // groups that share a header
constexpr int MAX_PARTS = 3; // queries, keys and values
constexpr int WHOLE_COLUMNS = 30; // columns of fields of 3, 5 or 6 bits that are in a single word
enum Format : int64_t { Q4, Q8, BF16, F32, Q5, Q5M, Q3K, Q4K, Q5K, Q6K };

// What a format's groups contain.
struct Traits {
    int bits;           // of an integer; 16 and 32: of a number
    int blocks;         // scales of a row in a group
    int scale_bytes;    // 2: f16. 1: multiplied by the header's units
    bool has_minima;
    bool is_signed;     // whether fields of 3, 5 and 6 bits are signed
};
constexpr Traits TRAITS[] = {
    {4, 1, 2, true, false},  {8, 1, 2, false, true},  {16, 0, 0, false, true},
    {32, 0, 0, false, true}, {5, 1, 2, false, true},  {5, 1, 2, true, false},
    {3, 2, 1, false, true},  {4, 1, 1, true, false},  {5, 1, 1, true, false},
    {6, 2, 1, false, true},
};

// Returns the bytes of a group before its integers.
constexpr int64_t scales_bytes(int64_t format) {
    const Traits t = TRAITS[format];
    return PANEL * t.scale_bytes * (t.blocks + t.has_minima);
}
constexpr int64_t group_bytes(int64_t format) {
    return scales_bytes(format) + PANEL * GROUP * TRAITS[format].bits / 8;
}
// Returns the bytes of the header of SPAN groups; 0 if the format has none.
constexpr int64_t header_bytes(int64_t format) {
    const Traits t = TRAITS[format];
    return t.scale_bytes == 1 ? PANEL * 2 * (1 + t.has_minima) : 0;
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
    int64_t num_parts;
    Part parts[MAX_PARTS];
};

INLINE int64_t panels_of(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }
INLINE int64_t panels_of(const Packed &matrix) {
    int64_t panels = 0;
    for (int64_t i = 0; i < matrix.num_parts; i++) panels += panels_of(matrix.parts[i].outputs);
    return panels;
}
INLINE bool has_minima(const Packed &matrix) {
    bool found = false;
    for (int64_t i = 0; i < matrix.num_parts; i++) found |= TRAITS[matrix.parts[i].format].has_minima;
    return found;
}

} // namespace
