// Multiplies tiles of rows that are rounded to eight bits (rounded.h) by quads of weights, in integers.
//
// Sums of integers are exact in any order. The sum of a block is multiplied by its scales, and these products
// are added in the order of the blocks. Then the remainders of refined groups are added, in their order.
//
// Nibbles and bytes are unpacked in registers, for each tile of rows. Other integers are unpacked in the
// first-level cache, a run of groups at a time.
#pragma once

#include "arm_quads.h"
#include "rounded.h"
#include "tiles.h"

namespace {

// Most rows of a tile. With six, the instructions that add do not wait for one another, and more sizes of
// tiles would take long to compile. Without an instruction for quads, tiles would be slow to compile and not faster.
constexpr int INTEGER_ROWS = LANES > 4 || SIGNED_QUADS ? 6 : 1;

// Returns the vectors of outputs of a tile. One row has few sums, so all outputs of a panel are computed together, if there
// are registers for them. Then memory is read once, in its order.
constexpr int vectors_of(int rows) {
    return rows == 1 && (HAS_QUAD_PRODUCTS || LANES > 4) ? PANEL / LANES : TILE_VECTORS;
}

// Vectors of outputs whose integers are added at a time if what is unpacked needs registers as well.
constexpr int FEW_VECTORS = 4;

// Groups of a panel, as they are stored, and unpacked if the format is not read in place.
struct GroupRun {
    int64_t format, first, groups; // groups [first, first + groups)
    const uint8_t *panel;
    const Unpacked *unpacked;
    const int32_t *listed = nullptr; // `groups` groups in place of adjacent ones; `first` is 0 then
};

// The operands of a tile: rows of x, a run of groups, and the sums so far.
struct IntegerTile {
    GroupRun weights;
    RoundedGroups x;
    int64_t at[INTEGER_ROWS];   // of each row: the group of x that is multiplied by the run's first group
    float *sums[INTEGER_ROWS];  // [PANEL] of each row; the products are added
    Ahead ahead;
};

// A block: the columns of a group that share a scale. What differs between formats is the number of blocks
// in a group, and the greatest integer after the offset is added.
template <int BLOCKS, int GREATEST> struct QuadBlock {
    static constexpr int WORDS = GROUP / 4 / BLOCKS; // of a block
    static constexpr int PLANES = planes_of(GREATEST);
    // Words whose products are added before `in_32_bits`. A sum in 16 bits gets two products of each.
    static constexpr int SUMS = MOST_SHORT / (2 * 127 * (PLANES == 2 ? 15 : GREATEST));
    static constexpr int depth() {
        int depth = WORDS; // a power of two, so a block is cut evenly
        while (ADDS_IN_SHORTS && depth > SUMS) depth /= 2;
        return depth;
    }
    static constexpr int DEPTH = depth();
};

// Reads a group whose integers are nibbles or bytes, as it is stored.
template <int64_t FORMAT> struct GroupInPlace {
    static constexpr Traits T = TRAITS[FORMAT];
    static constexpr bool MINIMA = T.has_minima;
    static constexpr int BLOCKS = T.blocks;
    typedef QuadBlock<BLOCKS, greatest_of(T)> Block;
    static constexpr bool SIGNED = MULTIPLIES_SIGNED && Block::PLANES == 2; // one product instead of two
    // Whether the scales of several groups are computed from factors that a span shares.
    static constexpr bool IN_SPANS = SIGNED_QUADS && T.scales == BYTES && T.has_minima;
    // Most vectors of outputs whose integers are added at a time. On ARM, more would leave too few registers for nibbles.
    static constexpr int MOST_VECTORS = SIGNED_QUADS && T.bits == 4 ? FEW_VECTORS : PANEL / LANES;
    const uint8_t *header, *group;

    INLINE GroupInPlace(const GroupRun &run, int64_t g)
        : header(header_at(FORMAT, run.panel, run.first + g)), group(group_at(FORMAT, run.panel, run.first + g)) {}
    // Continues with the next group. It must be before `end_of_stretch`.
    INLINE void next() { group += group_bytes(FORMAT); }
    // Returns the end of the groups from group g on that follow one another in memory.
    static INLINE int64_t end_of_stretch(const GroupRun &run, int64_t g) {
        const int64_t left = header_bytes(FORMAT) ? SPAN - (run.first + g) % SPAN : run.groups;
        return left < run.groups - g ? g + left : run.groups;
    }

    // Returns word `w` of a block for outputs o, ...: its signed bytes, or those of one plane with the offset added: the
    // lower nibbles in plane 0, the higher in plane 1.
    INLINE Words quad(int b, int plane, int w, int o) const {
        const int word = b * Block::WORDS + w;
        const uint8_t *words = group + scales_bytes(FORMAT) + o * 4;
        if constexpr (T.bits == 4) {
            const Words nibbles = nibbles_of(load_as<Words>(words + word / 2 * PANEL * 4), word % 2);
            if constexpr (T.nibbles == THEMSELVES) return nibbles;
            else if constexpr (SIGNED) return looked_up(INTEGERS[T.nibbles], nibbles);
            else return in_plane(plane, looked_up(OFFSET_INTEGERS<FORMAT>.of, nibbles));
        } else {
            const Words bytes = load_as<Words>(words + word * PANEL * 4);
            return SIGNED ? bytes : in_plane(plane, bytes ^ quad_offset(T) * 0x01010101u);
        }
    }
    static INLINE Words in_plane(int plane, Words bytes) {
        return Block::PLANES == 1 ? bytes : bytes >> 4 * plane & 0x0f0f0f0f;
    }
    INLINE Scaling scaling(int b, int o) const { return scaling_of<FORMAT>(header, group, b, o); }
    static INLINE int offset(const GroupRun &) { return quad_offset(T); }
};

// Reads an unpacked group with BLOCKS blocks, of integers up to GREATEST.
template <int NUM_BLOCKS, bool HAS_MINIMA, int GREATEST> struct GroupUnpacked {
    static constexpr bool MINIMA = HAS_MINIMA;
    static constexpr int BLOCKS = NUM_BLOCKS;
    typedef QuadBlock<BLOCKS, GREATEST> Block;
    static constexpr bool SIGNED = false;
    static constexpr bool IN_SPANS = false;
    static constexpr int MOST_VECTORS = PANEL / LANES;
    const Unpacked &unpacked;
    int64_t g;

    INLINE GroupUnpacked(const GroupRun &run, int64_t g) : unpacked(*run.unpacked), g(g) {}
    INLINE void next() { g++; }
    static INLINE int64_t end_of_stretch(const GroupRun &run, int64_t) { return run.groups; }

    INLINE Words quad(int b, int plane, int w, int o) const {
        const int64_t word = (g * Block::PLANES + plane) * (GROUP / 4) + b * Block::WORDS + w;
        return load_as<Words>((const Quad *)unpacked.weights + word * PANEL + o);
    }
    INLINE Scaling scaling(int b, int o) const { return unpacked.scaling<MINIMA>(g, b, o); }
    static INLINE int offset(const GroupRun &run) { return quad_offset(TRAITS[run.format]); }
};

// Adds the products of ROWS rows of x and a block to `total`.
#if defined(__ARM_FEATURE_DOTPROD)
template <int ROWS, int VECTORS, class G>
INLINE void multiply_quads(const G &group, int b, int o, const uint8_t *const (&x)[ROWS],
                           Ints (&total)[ROWS][VECTORS]) {
    constexpr int WORDS = G::Block::WORDS;
    const uint8_t *of_block[ROWS];
    for (int m = 0; m < ROWS; m++) of_block[m] = x[m] + b * WORDS * 4;
    auto quad = [&](int w, int j) __attribute__((always_inline)) { return group.quad(b, 0, w, o + j * LANES); };
#if defined(__ARM_FEATURE_MATMUL_INT8)
    if constexpr (ROWS > 1) return add_by_pairs<WORDS>(of_block, quad, total);
#endif
    add_by_words<WORDS>(of_block, quad, total);
}
#else
template <int ROWS, int VECTORS, class G>
INLINE void multiply_quads(const G &group, int b, int o, const uint8_t *const (&x)[ROWS],
                           Ints (&total)[ROWS][VECTORS]) {
    using K = typename G::Block;
    auto word_of_x = [&](int m, int k) __attribute__((always_inline)) {
        return load_as<uint32_t>(x[m] + (b * K::WORDS + k) * 4);
    };
    if constexpr (G::SIGNED) {
#pragma GCC unroll 8
        for (int k = 0; k < K::WORDS; k++) {
            SignedWords across[VECTORS];
            for (int j = 0; j < VECTORS; j++) across[j] = signed_words(group.quad(b, 0, k, o + j * LANES));
            for (int m = 0; m < ROWS; m++)
                for (int j = 0; j < VECTORS; j++)
                    total[m][j] = add_products(total[m][j], across[j], word_of_x(m, k));
            forget_memory();
        }
        return;
    }
    for (int p = 0; p < K::PLANES; p++)
        for (int first = 0; first < K::WORDS; first += K::DEPTH) {
            QuadSums part[ROWS][VECTORS] = {};
#pragma GCC unroll 8
            for (int k = 0; k < K::DEPTH; k++) {
                Words across[VECTORS];
                for (int j = 0; j < VECTORS; j++) across[j] = group.quad(b, p, first + k, o + j * LANES);
                for (int m = 0; m < ROWS; m++)
                    for (int j = 0; j < VECTORS; j++)
                        part[m][j] = add_products(part[m][j], across[j], word_of_x(m, first + k));
                if (ADDS_IN_SHORTS) forget_memory(); // otherwise the compiler loads all words of x first
            }
            for (int m = 0; m < ROWS; m++)
                for (int j = 0; j < VECTORS; j++)
                    total[m][j] += in_32_bits(part[m][j], p == 0 ? 1 : 16);
        }
}
#endif

// Reads the scales of VECTORS vectors of outputs o, ... of a panel.
template <class G, int VECTORS> struct ScalesOfGroup {
    const int o;

    INLINE ScalesOfGroup(const G &, int o) : o(o) {}
    // Writes the scales of vectors first, ... and block `b` of a group to `to`.
    template <int SLICE> INLINE void read(const G &group, int b, int first, Scaling (&to)[SLICE]) const {
        for (int j = 0; j < SLICE; j++) to[j] = group.scaling(b, o + (first + j) * LANES);
    }
};

template <class G, int VECTORS> struct ScalesOfSpan;
#if defined(__ARM_FEATURE_DOTPROD)
// The same for the groups of a span, whose scales and minima are bytes. A unit u and a byte b are multiplied as
// u * (2^23 + b) - u * 2^23, rounded once, which is exact as u * b is. For 2^23 + b is a byte with the upper bits of 2^23:
// half of the instructions that convert a byte.
template <class G, int VECTORS> struct ScalesOfSpan {
    alignas(64) float units[VECTORS][2][LANES], steps[VECTORS][2][LANES]; // u, and -u * 2^23
    const int o;

    INLINE ScalesOfSpan(const G &group, int o) : o(o) {
        const uint16_t *halves = (const uint16_t *)group.header + o;
        for (int j = 0; j < VECTORS; j++) {
            put(halves + j * LANES, units[j]);
            put(halves + PANEL + j * LANES, steps[j]);
        }
    }
    template <int SLICE> INLINE void read(const G &group, int, int first, Scaling (&to)[SLICE]) const {
        const uint8_t *bytes = group.group + o + first * LANES;
        Floats scales[4], minima[4];
        above_power(bytes, scales);
        above_power(bytes + PANEL, minima);
        for (int j = 0; j < SLICE; j++)
            to[j] = {product(units[first + j], scales[j]), -product(steps[first + j], minima[j])};
    }

private:
    static INLINE void put(const uint16_t *halves, float (&to)[2][LANES]) {
        const Floats unit = load_f16(halves);
        store(to[0], unit);
        store(to[1], unit * -0x1p23f);
    }
    static INLINE Floats product(const float (&unit)[2][LANES], Floats byte) {
        return fused(load(unit[0]), byte, load(unit[1]));
    }
    // Writes 2^23 + b for each of 16 bytes b. Bytes after those that are used belong to the group, too.
    static INLINE void above_power(const uint8_t *from, Floats (&to)[4]) {
        const uint8x16_t bytes = load_as<uint8x16_t>(from);
        const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_high_u8(bytes), upper = vdupq_n_u16(0x4b00);
        to[0] = (Floats)vzip1q_u16(low, upper), to[1] = (Floats)vzip2q_u16(low, upper);
        to[2] = (Floats)vzip1q_u16(high, upper), to[3] = (Floats)vzip2q_u16(high, upper);
    }
};
#endif

// Multiplies the groups of x that belong to the run's group g by that group, and adds the products to the sums of
// VECTORS vectors of outputs.
template <int ROWS, int VECTORS, class G, class S>
INLINE void multiply_group(const RoundedGroups &x, const int64_t (&at)[ROWS], int offset, const G &group, const S &scales,
                           Floats (&sums)[ROWS][VECTORS]) {
    // smmla's pairs of sums start at zero.
    typedef std::conditional_t<SIGNED_QUADS && !(HAS_PAIR_PRODUCTS && ROWS > 1), FromPower, FromZero> Sums;
    static_assert(GROUP * 128 * 127 < 1 << 22, "FromPower converts the sum of a group");
    constexpr int BLOCKS = G::BLOCKS, SLICE = VECTORS < G::MOST_VECTORS ? VECTORS : G::MOST_VECTORS;
    const uint8_t *bytes[ROWS];
    for (int m = 0; m < ROWS; m++) bytes[m] = x.bytes + at[m] * GROUP;
    for (int b = 0; b < BLOCKS; b++)
#pragma GCC unroll 2
        for (int first = 0; first < VECTORS; first += SLICE) {
            Ints total[ROWS][SLICE];
            for (int m = 0; m < ROWS; m++)
                for (int j = 0; j < SLICE; j++) total[m][j] = Sums::start();
            multiply_quads<ROWS, SLICE>(group, b, scales.o + first * LANES, bytes, total);
            Scaling scaling[SLICE];
            scales.template read<SLICE>(group, b, first, scaling);
            for (int j = 0; j < SLICE; j++)
                for (int m = 0; m < ROWS; m++) {
                    const int64_t block = at[m] * BLOCKS + b;
                    // Formats with minima have no negative integers, and so no offset.
                    const Ints whole = G::MINIMA || G::SIGNED
                                           ? total[m][j]
                                           : total[m][j] - offset * x.totals[BLOCKS - 1][block];
                    const Floats scale = scaling[j].scale * x.scales[at[m]];
                    Floats &sum = sums[m][first + j];
                    sum = fused(scale, Sums::floats(whole), sum);
                    if (G::MINIMA) sum = fused(scaling[j].minimum, splat(x.sums[BLOCKS - 1][block]), sum);
                }
        }
}

// Multiplies a tile of ROWS rows by groups that G reads. LISTED: by those of the run's list.
template <int ROWS, class G, bool LISTED = false> INLINE void multiply_groups(const IntegerTile &tile) {
    constexpr int VECTORS = vectors_of(ROWS);
    typedef std::conditional_t<G::IN_SPANS && !LISTED, ScalesOfSpan<G, VECTORS>, ScalesOfGroup<G, VECTORS>> Scales;
    const GroupRun &run = tile.weights;
    const RoundedGroups x = tile.x;
    const int offset = G::offset(run);
    for (int o = 0; o < PANEL; o += VECTORS * LANES) {
        int64_t at[ROWS];
        Floats sums[ROWS][VECTORS];
        for (int m = 0; m < ROWS; m++) at[m] = tile.at[m];
        for (int m = 0; m < ROWS; m++)
            for (int j = 0; j < VECTORS; j++) sums[m][j] = load(tile.sums[m] + o + j * LANES);
        for (int64_t g = 0; g < run.groups;) {
            G group(run, LISTED ? run.listed[g] : g);
            const Scales scales(group, o);
            for (const int64_t end = LISTED ? g + 1 : G::end_of_stretch(run, g); g < end; g++, group.next()) {
                if (o == 0) {
                    if constexpr (ROWS > 2) tile.ahead.read(); // with fewer, only some processors have registers for a call
                    tile.ahead.prefetch(g);
                }
                multiply_group<ROWS>(x, at, offset, group, scales, sums);
                for (int m = 0; m < ROWS; m++) at[m]++;
            }
        }
        for (int m = 0; m < ROWS; m++)
            for (int j = 0; j < VECTORS; j++) store(tile.sums[m] + o + j * LANES, sums[m][j]);
    }
}

// Multiplies a tile of `rows` rows, at most ROWS.
template <int ROWS, class G> INLINE void multiply_integer_tile_as(int64_t rows, const IntegerTile &tile) {
    if (rows == ROWS) multiply_groups<ROWS, G>(tile);
    else if constexpr (ROWS > 1) multiply_integer_tile_as<ROWS - 1, G>(rows, tile);
}
template <class G> __attribute__((noinline)) void multiply_tile_by(int64_t rows, const IntegerTile &tile) {
    multiply_integer_tile_as<INTEGER_ROWS, G>(rows, tile);
}

// Multiplies one row by listed groups.
template <class G> __attribute__((noinline)) void multiply_listed_by(const IntegerTile &tile) {
    multiply_groups<1, G, true>(tile);
}

// Returns whether the integers of a format are read in place.
constexpr bool is_in_place(int64_t format) { return TRAITS[format].bits == 4 || TRAITS[format].bits == 8; }

// A function that multiplies a tile of `rows` rows, at most INTEGER_ROWS.
typedef void MultiplyTile(int64_t rows, const IntegerTile &tile);

// Returns the function for weights of a format.
inline MultiplyTile *multiply_tile_of(int64_t format) {
    constexpr int FIVE_BITS = ADDS_IN_SHORTS ? 31 : 15; // without shorts, all sizes are one kind
    switch (format) {
    case Q4: return multiply_tile_by<GroupInPlace<Q4>>;
    case Q8: return multiply_tile_by<GroupInPlace<Q8>>;
    case Q4K: return multiply_tile_by<GroupInPlace<Q4K>>;
    case I4: return multiply_tile_by<GroupInPlace<I4>>;
    case I4K: return multiply_tile_by<GroupInPlace<I4K>>;
    case F4: return multiply_tile_by<GroupInPlace<F4>>;
    case Q5: return multiply_tile_by<GroupUnpacked<1, false, 31>>;
    case Q5M:
    case Q5K: return multiply_tile_by<GroupUnpacked<1, true, FIVE_BITS>>;
    case Q2K: return multiply_tile_by<GroupUnpacked<2, true, 3>>;
    case Q3K:
    case Q6K: return multiply_tile_by<GroupUnpacked<2, false, 63>>;
    }
    __builtin_unreachable(); // other formats have no integers
}

// Multiplies one row by the groups of the run's list, of a format that is read in place.
inline void multiply_listed(const IntegerTile &tile) {
    switch (tile.weights.format) {
    case Q4: return multiply_listed_by<GroupInPlace<Q4>>(tile);
    case Q8: return multiply_listed_by<GroupInPlace<Q8>>(tile);
    case Q4K: return multiply_listed_by<GroupInPlace<Q4K>>(tile);
    case I4: return multiply_listed_by<GroupInPlace<I4>>(tile);
    case I4K: return multiply_listed_by<GroupInPlace<I4K>>(tile);
    case F4: return multiply_listed_by<GroupInPlace<F4>>(tile);
    }
}

// Returns how often a reader advances while `rows` rows are multiplied by `groups` groups of a panel.
INLINE int64_t advances_of(int64_t rows, int64_t groups) { return (rows + INTEGER_ROWS - 1) / INTEGER_ROWS * groups; }

// Adds the products of `rows` rows of x, of `groups` groups each, and a run to the sums [rows, PANEL].
INLINE void multiply_rows(int64_t rows, const RoundedGroups &x, int64_t groups, const GroupRun &run, float *sums,
                          ReadAhead &reader) {
    // All tiles together prefetch the same groups of the next panel, each an equal part.
    const int64_t tiles = (rows + INTEGER_ROWS - 1) / INTEGER_ROWS;
    const int64_t bytes = (panel_bytes(run.format, groups) / groups + tiles - 1) / tiles;
    const uint8_t *next = group_at(run.format, run.panel, run.first) + panel_bytes(run.format, groups);
    MultiplyTile *const multiply = multiply_tile_of(run.format);
    in_tiles(rows, INTEGER_ROWS, [&](int64_t first, int64_t count) {
        IntegerTile tile{run, x, {}, {}, {next, bytes, &reader}};
        next += bytes * run.groups;
        for (int64_t m = 0; m < count; m++) {
            tile.at[m] = (first + m) * groups + run.first;
            tile.sums[m] = sums + (first + m) * PANEL;
        }
        multiply(count, tile);
    });
}

} // namespace
