// Multiplies tiles of rows that are rounded to eight bits (rounded.h) by unpacked quads of weights, in
// integers. Sums of integers are exact in any order; scales are applied to the sums of blocks.
#pragma once

#include "rounded.h"
#include "tiles.h"

namespace {

// Most rows of a tile. With six, the instructions that add do not wait for one another, and more sizes of
// tiles would take long to compile. Without AVX2, tiles would be slow to compile and not faster.
constexpr int INTEGER_ROWS = LANES > 4 ? 6 : 1;

// The operands of a multiplication: rows of x, a run of groups, and the sums so far.
struct IntegerRun {
    int64_t format, groups;
    const Quad *weights;      // unpacked
    const Unpacked *unpacked; // their scales and minima
    const uint8_t *packed;    // the same groups as stored
    const uint8_t *x;         // starts at the run's first column
    int64_t ldx;              // bytes from row to row of x
    const float *xscales;     // of groups of x
    const int32_t *xtotals;   // the sum of integers of each block of x
    const float *xsums;       // the same, times the scale
    int64_t num_groups;       // of a row of x
    float *sums;              // [rows, PANEL]; the products are added
    bool is_first = true;     // whether this is the first tile of rows, which prefetches
};

// A block: the columns of a group that share a scale. What differs between formats is the number of blocks
// in a group, and the greatest integer after the offset is added.
template <int BLOCKS, int GREATEST> struct QuadBlock {
    static constexpr int WORDS = GROUP / 4 / BLOCKS; // of a block
    static constexpr int PLANES = planes_of(GREATEST);
    // Words whose products are added before `in_32_bits`. A sum in 16 bits gets two products of each.
    static constexpr int SUMS = MOST_SHORT / (2 * 127 * (PLANES == 2 ? 15 : GREATEST));
    static constexpr int DEPTH = ADDS_IN_SHORTS && SUMS < WORDS ? SUMS : WORDS;
    static_assert(WORDS % DEPTH == 0, "a block is cut evenly");
};

// Multiplies ROWS rows of x by a block, given the words [PLANES][GROUP / 4][PANEL] of its first plane, and
// adds the products to `total`.
template <int ROWS, class K>
INLINE void multiply_quads(const Quad *w, const uint8_t *x, int64_t ldx, Ints (&total)[ROWS][TILE_VECTORS]) {
    auto word_of_x = [&](int m, int k) __attribute__((always_inline)) {
        return load_as<uint32_t>(x + m * ldx + 4 * k);
    };
    auto word_of_weights = [&](int p, int k, int j) __attribute__((always_inline)) {
        return load_as<Words>(w + (p * GROUP / 4 + k) * PANEL + j * LANES);
    };
    for (int p = 0; p < K::PLANES; p++)
        for (int first = 0; first < K::WORDS; first += K::DEPTH) {
            QuadSums part[ROWS][TILE_VECTORS] = {};
#pragma GCC unroll 8
            for (int k = 0; k < K::DEPTH; k++) {
                Words across[TILE_VECTORS];
                for (int j = 0; j < TILE_VECTORS; j++) across[j] = word_of_weights(p, first + k, j);
                for (int m = 0; m < ROWS; m++)
                    for (int j = 0; j < TILE_VECTORS; j++)
                        part[m][j] = add_products(part[m][j], across[j], word_of_x(m, first + k));
                forget_memory(); // otherwise the compiler loads all words of x before it multiplies
            }
            for (int m = 0; m < ROWS; m++)
                for (int j = 0; j < TILE_VECTORS; j++)
                    total[m][j] += in_32_bits(part[m][j], p == 0 ? 1 : 16);
        }
}

// Multiplies a tile of ROWS rows. MINIMA is whether the format has minima; asking that in the loops would
// leave too few registers.
template <int ROWS, int BLOCKS, bool MINIMA, int GREATEST>
INLINE void multiply_kind(const IntegerRun &run) {
    using K = QuadBlock<BLOCKS, GREATEST>;
    const int offset = offset_of(TRAITS[run.format]);
    for (int o = 0; o < PANEL; o += TILE_VECTORS * LANES)
        for (int64_t g = 0; g < run.groups; g++) {
            if (o == 0 && run.is_first) prefetch_after(run.format, run.packed, g);
            for (int b = 0; b < BLOCKS; b++) {
                Ints total[ROWS][TILE_VECTORS] = {};
                const Quad *w = run.weights + (g * K::PLANES * GROUP / 4 + b * K::WORDS) * PANEL + o;
                multiply_quads<ROWS, K>(w, run.x + g * GROUP + b * K::WORDS * 4, run.ldx, total);
                forget_memory(); // otherwise the compiler keeps numbers in the registers that sums need
                for (int j = 0; j < TILE_VECTORS; j++) {
                    const Floats scale = load(run.unpacked->scales[g][b] + o + j * LANES);
                    const Floats minimum =
                        MINIMA ? load(run.unpacked->minima[g][b] + o + j * LANES) : Floats{};
                    for (int m = 0; m < ROWS; m++) {
                        float *at = run.sums + m * PANEL + o + j * LANES;
                        const int64_t block = (m * run.num_groups + g) * BLOCKS + b;
                        // Formats with minima have no negative integers, and so no offset.
                        const Ints whole = MINIMA ? total[m][j] : total[m][j] - offset * run.xtotals[block];
                        const Floats both = scale * run.xscales[m * run.num_groups + g];
                        Floats result = load(at) + both * __builtin_convertvector(whole, Floats);
                        if (MINIMA) result += minimum * run.xsums[block];
                        store(at, result);
                    }
                }
            }
        }
}

// Multiplies a tile of `rows` rows, at most ROWS.
template <int ROWS> INLINE void multiply_integer_tile(int64_t rows, const IntegerRun &run) {
    if (rows == ROWS) {
        constexpr int FIVE_BITS = ADDS_IN_SHORTS ? 31 : 15; // without shorts, all sizes are one kind
        const Traits &traits = TRAITS[run.format];
        if (traits.blocks == 2) {
            if (traits.has_minima) multiply_kind<ROWS, 2, true, 3>(run);
            else multiply_kind<ROWS, 2, false, 63>(run);
        } else if (traits.has_minima) {
            if (traits.bits == 4) multiply_kind<ROWS, 1, true, 15>(run);
            else multiply_kind<ROWS, 1, true, FIVE_BITS>(run);
        } else if (greatest_of(traits) > 31) multiply_kind<ROWS, 1, false, 255>(run);
        else multiply_kind<ROWS, 1, false, ADDS_IN_SHORTS ? 31 : 255>(run);
    } else if constexpr (ROWS > 1) multiply_integer_tile<ROWS - 1>(rows, run);
}

// Multiplies any number of rows.
__attribute__((noinline)) inline void multiply_rows(int64_t rows, const IntegerRun &run) {
    in_tiles(rows, INTEGER_ROWS, [&](int64_t first, int64_t count) {
        const int64_t groups = first * run.num_groups, blocks = groups * TRAITS[run.format].blocks;
        IntegerRun tile = run;
        tile.x += first * run.ldx;
        tile.xscales += groups;
        tile.xtotals += blocks;
        tile.xsums += blocks;
        tile.sums += first * PANEL;
        tile.is_first = first == 0;
        multiply_integer_tile<INTEGER_ROWS>(count, tile);
    });
}

} // namespace
