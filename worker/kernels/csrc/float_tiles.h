// Multiplies tiles of rows by unpacked weights, in float or in pairs of bfloat16.
//
// Scales are applied to the sum of the weights that share one, not to each weight, so quantised weights
// cause no rounding beyond that of float sums.
#pragma once

#include "multiply.h"
#include "tiles.h"

namespace {

// Multiplies ROWS rows of x by COUNT columns, and adds the products to part [ROWS][TILE_VECTORS].
template <int ROWS, int COUNT, class By, class X>
INLINE void multiply_columns(const typename By::Weight *w, const X *x, int64_t ldx,
                             Floats (&part)[ROWS][TILE_VECTORS]) {
    auto multiply_column = [&](int k) __attribute__((always_inline)) {
        typename By::Vector across[TILE_VECTORS];
        for (int j = 0; j < TILE_VECTORS; j++)
            across[j] = load_as<typename By::Vector>(w + k / By::COLUMNS * PANEL + j * LANES);
        for (int m = 0; m < ROWS; m++)
            for (int j = 0; j < TILE_VECTORS; j++)
                part[m][j] = By::multiply(part[m][j], x + m * ldx + k, across[j]);
    };
    // Every multiplication of a small tile waits for the one before. Without the loop's own instructions, the
    // processor starts the next group meanwhile.
    if constexpr (ROWS <= 2) {
#pragma GCC unroll 32
        for (int k = 0; k < COUNT; k += By::COLUMNS) multiply_column(k);
    } else {
#pragma GCC unroll 4
        for (int k = 0; k < COUNT; k += By::COLUMNS) multiply_column(k);
    }
}

// The operands of a multiplication: rows of x, a run of groups, and the sums so far.
template <class By, class X> struct Run {
    int64_t format, groups;
    const typename By::Weight *weights; // unpacked
    const Unpacked *unpacked;           // their scales and minima
    const uint8_t *packed;              // the same groups as stored
    const X *x;                         // starts at the run's first column
    int64_t ldx;                        // numbers from row to row of x
    const float *xsums;                 // the sum of each block of x, for minima
    int64_t ldsums;                     // numbers from row to row of xsums
    float *sums;                        // [rows, PANEL]; the products are added
    bool is_first = true;               // whether this is the first tile of rows, which prefetches

    // Returns the operands of the rows from `row` on.
    INLINE Run from_row(int64_t row) const {
        Run rest = *this;
        rest.x += row * ldx;
        rest.xsums += row * ldsums;
        rest.sums += row * PANEL;
        rest.is_first = row == 0;
        return rest;
    }
};

// Adds the product `part` of LANES outputs and a block of columns to their sums, times the outputs' scales,
// and the block's sum of x times their minima.
template <bool MINIMA> INLINE void add_scaled(float *sums, Floats part, const Scaling &scaling, float xsum) {
    Floats total = fused(scaling.scale, part, load(sums));
    if (MINIMA) total = fused(scaling.minimum, splat(xsum), total);
    store(sums, total);
}

// Multiplies a tile of ROWS rows by weights with BLOCKS scales for each row of a group, and with as many
// minima if MINIMA.
template <int ROWS, int BLOCKS, bool MINIMA, class By, class X>
INLINE void multiply_scaled(const Run<By, X> &run) {
    constexpr int COUNT = GROUP / BLOCKS;
    for (int o = 0; o < PANEL; o += TILE_VECTORS * LANES)
        for (int64_t g = 0; g < run.groups; g++) {
            if (o == 0 && run.is_first) prefetch_after(run.format, run.packed + g * group_bytes(run.format));
            for (int b = 0; b < BLOCKS; b++) {
                const int64_t first = (g * GROUP + b * COUNT) / By::COLUMNS;
                Floats part[ROWS][TILE_VECTORS] = {};
                multiply_columns<ROWS, COUNT, By>(run.weights + first * PANEL + o,
                                                  run.x + g * GROUP + b * COUNT, run.ldx, part);
                forget_memory(); // otherwise the compiler keeps sums in the registers that `part` needs
                for (int j = 0; j < TILE_VECTORS; j++) {
                    const Scaling scaling = run.unpacked->template scaling<MINIMA>(g, b, o + j * LANES);
                    for (int m = 0; m < ROWS; m++)
                        add_scaled<MINIMA>(run.sums + m * PANEL + o + j * LANES, part[m][j], scaling,
                                           MINIMA ? run.xsums[m * run.ldsums + g * BLOCKS + b] : 0);
                }
            }
        }
}

// Multiplies a tile of ROWS rows by weights without scales.
template <int ROWS, class By, class X> INLINE void multiply_plain(const Run<By, X> &run) {
    for (int o = 0; o < PANEL; o += TILE_VECTORS * LANES) {
        Floats part[ROWS][TILE_VECTORS];
        for (int m = 0; m < ROWS; m++)
            for (int j = 0; j < TILE_VECTORS; j++)
                part[m][j] = load(run.sums + m * PANEL + o + j * LANES);
        for (int64_t g = 0; g < run.groups; g++) {
            if (o == 0 && run.is_first) prefetch_after(run.format, run.packed + g * group_bytes(run.format));
            multiply_columns<ROWS, GROUP, By>(run.weights + g * group_words<typename By::Weight>() + o,
                                              run.x + g * GROUP, run.ldx, part);
        }
        for (int m = 0; m < ROWS; m++)
            for (int j = 0; j < TILE_VECTORS; j++)
                store(run.sums + m * PANEL + o + j * LANES, part[m][j]);
    }
}

// Multiplies a tile of `rows` rows, at most ROWS.
template <int ROWS, class By, class X> INLINE void multiply_tile(int64_t rows, const Run<By, X> &run) {
    if (rows == ROWS) {
        const Traits &traits = TRAITS[run.format];
        if (traits.blocks == 0) multiply_plain<ROWS>(run);
        else if (traits.blocks == 1) {
            if constexpr (By::COLUMNS == 1) { // pairs are multiplied in pair_rows.h
                if (traits.has_minima) multiply_scaled<ROWS, 1, true>(run);
                else multiply_scaled<ROWS, 1, false>(run);
            }
        } else {
            if (traits.has_minima) multiply_scaled<ROWS, 2, true>(run);
            else multiply_scaled<ROWS, 2, false>(run);
        }
    } else if constexpr (ROWS > 1) multiply_tile<ROWS - 1>(rows, run);
}

// Multiplies any number of rows.
template <class By, class X>
__attribute__((noinline)) void multiply_rows(int64_t rows, const Run<By, X> &run) {
    in_tiles(rows, TILE_ROWS, [&](int64_t first, int64_t count) {
        multiply_tile<TILE_ROWS>(count, run.from_row(first));
    });
}

} // namespace
