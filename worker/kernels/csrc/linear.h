// Computes y = x W^T for packed weights (packed.h), for one row and for hundreds.
//
// Quantised weights are unpacked (unpack.h), a run of groups at a time, into integers in the number type of
// the multiplication, which represents them exactly. The type is pairs of bfloat16 if x is bfloat16 and the
// hardware multiplies such pairs, and float otherwise. Scales are applied to the sum of the weights that
// share one, not to each weight, so quantised weights cause no rounding beyond that of float sums.
//
// Every output is summed in the same order for any number of rows and threads, so a row has the same
// bits alone and in any batch.
#pragma once

#include <vector>

#include "multiply.h"
#include "team.h"
#include "unpack.h"

namespace {

constexpr int BLOCK_ROWS = 132; // most rows that use a run of weights after it is unpacked once
constexpr int PREFETCH_BYTES = 8192; // weights are prefetched this many bytes before they are read
// Most rows, and vectors of outputs, that are computed together: their sums fit into the registers.
constexpr int TILE_ROWS = LANES == 16 ? 12 : 6;
constexpr int TILE_VECTORS = 2;

// ---- Multiplying.

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
    bool is_first;                      // whether this is the first tile of rows, which prefetches
};

// Prefetches the weights that are PREFETCH_BYTES after group g. The hardware's own prefetching stops while
// a group is multiplied, because nothing is read from memory.
template <class By, class X> INLINE void prefetch_weights(const Run<By, X> &run, int64_t g) {
    if (!run.is_first) return;
    const int64_t size = group_bytes(run.format);
    for (int64_t line = 0; line < size; line += 64)
        __builtin_prefetch(run.packed + g * size + PREFETCH_BYTES + line);
}

// Multiplies a tile of ROWS rows by weights with BLOCKS scales for each row of a group, and with as many
// minima if MINIMA.
template <int ROWS, int BLOCKS, bool MINIMA, class By, class X>
INLINE void multiply_scaled(const Run<By, X> &run) {
    constexpr int COUNT = GROUP / BLOCKS;
    for (int o = 0; o < PANEL; o += TILE_VECTORS * LANES)
        for (int64_t g = 0; g < run.groups; g++) {
            if (o == 0) prefetch_weights(run, g);
            for (int b = 0; b < BLOCKS; b++) {
                const int64_t first = (g * GROUP + b * COUNT) / By::COLUMNS;
                Floats part[ROWS][TILE_VECTORS] = {};
                multiply_columns<ROWS, COUNT, By>(run.weights + first * PANEL + o,
                                                  run.x + g * GROUP + b * COUNT, run.ldx, part);
                forget_memory(); // otherwise the compiler keeps sums in the registers that `part` needs
                for (int j = 0; j < TILE_VECTORS; j++) {
                    const Floats scale = load(run.unpacked->scales[g][b] + o + j * LANES);
                    const Floats minimum =
                        MINIMA ? load(run.unpacked->minima[g][b] + o + j * LANES) : Floats{};
                    for (int m = 0; m < ROWS; m++) {
                        float *at = run.sums + m * PANEL + o + j * LANES;
                        Floats total = load(at) + scale * part[m][j];
                        if (MINIMA) total += minimum * run.xsums[m * run.ldsums + g * BLOCKS + b];
                        store(at, total);
                    }
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
            if (o == 0) prefetch_weights(run, g);
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
            if (traits.has_minima) multiply_scaled<ROWS, 1, true>(run);
            else multiply_scaled<ROWS, 1, false>(run);
        } else {
            if (traits.has_minima) multiply_scaled<ROWS, 2, true>(run);
            else multiply_scaled<ROWS, 2, false>(run);
        }
    } else if constexpr (ROWS > 1) multiply_tile<ROWS - 1>(rows, run);
}

// Multiplies any number of rows, in tiles of nearly equal size. A small tile would be slow, because each
// of its multiplications has to wait for the one before.
template <class By, class X>
__attribute__((noinline)) void multiply_rows(int64_t rows, Run<By, X> run) {
    for (int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS; tiles > 0; tiles--) {
        const int64_t count = (rows + tiles - 1) / tiles;
        multiply_tile<TILE_ROWS>(count, run);
        rows -= count;
        run.x += count * run.ldx;
        run.xsums += count * run.ldsums;
        run.sums += count * PANEL;
        run.is_first = false;
    }
}

// ---- The whole linear.

// What happens with a result r: y = r, or y += r with r rounded to y's type first, as in torch.
enum Then { STORE, ADD };

// The arguments of a linear.
template <class X, class Y> struct Linear {
    const X *x;      // [rows, inputs]
    Packed weight;
    const X *bias;   // [outputs], or null
    Y *y;            // [rows, outputs]
    int64_t rows;
    Then then;
    float scale = 1; // factor of what is added
};

// A thread's scratch memory for the rows and weights that it multiplies.
struct RowScratch {
    std::vector<float> xsums[MAX_BLOCKS]; // [b - 1]: the sums of x, b for each group
    std::vector<float> x;     // the rows as float, if they have to be converted
    alignas(64) float sums[BLOCK_ROWS * PANEL];
    Unpacked unpacked;
};

// Writes the sum of each SIZE numbers of x, which has `count`.
template <int SIZE, class X> INLINE void sum_blocks(const X *x, int64_t count, std::vector<float> &to) {
    to.resize((size_t)(count / SIZE));
    for (int64_t i = 0; i < count; i += SIZE) {
        Floats total = {};
        for (int k = 0; k < SIZE; k += LANES) total += load(x + i + k);
        to[(size_t)(i / SIZE)] = sum(total);
    }
}

// Writes the sums of one row and panel to y, with the bias. first: the panel's first output. count: the
// outputs of the panel.
template <class X, class Y>
INLINE void finish(const Linear<X, Y> &l, int64_t row, int64_t first, int64_t count, const float *sums) {
    Y *y = l.y + row * l.weight.outputs + first;
    alignas(64) Y ready[PANEL];
    alignas(64) Y before[PANEL] = {};
    alignas(64) X bias[PANEL] = {};
    if (l.bias) memcpy(bias, l.bias + first, (size_t)count * sizeof(X));
    if (l.then == ADD) memcpy(before, y, (size_t)count * sizeof(Y));
    for (int o = 0; o < PANEL; o += LANES) {
        Floats result = load(sums + o);
        if (l.bias) result += load(bias + o);
        if (l.then == ADD) result = load(before + o) + as_stored(Y{}, result) * l.scale;
        store(ready + o, result);
    }
    memcpy(y, ready, (size_t)count * sizeof(Y));
}

// Computes a panel of outputs for the rows [first, first + count).
//
// x: the first of these rows, in the number type of the multiplication.
template <class By, class N, class X, class Y>
void linear_item(const Linear<X, Y> &l, int64_t panel, int64_t first, int64_t count, const N *x,
                 RowScratch &s) {
    const Part *part = l.weight.parts;
    int64_t output = 0; // the part's first
    for (; panel >= panels_of(part->outputs); part++) {
        panel -= panels_of(part->outputs);
        output += part->outputs;
    }
    const int64_t format = part->format, groups = l.weight.inputs / GROUP;
    const uint8_t *packed = part->data + panel * panel_bytes(format, groups);
    const bool direct = format == (By::COLUMNS == 2 ? BF16 : F32);
    const int64_t blocks = TRAITS[format].blocks ? TRAITS[format].blocks : 1;
    const float *xsums = s.xsums[blocks - 1].data();
    memset(s.sums, 0, (size_t)count * PANEL * sizeof(float));
    for (int64_t g = 0; g < groups; g += RUN_GROUPS) {
        const int64_t some = groups - g < RUN_GROUPS ? groups - g : RUN_GROUPS;
        const uint8_t *from = group_at(format, packed, g);
        using Weight = typename By::Weight;
        if (!direct) unpack_run<Weight>(format, header_at(format, packed, g), from, some, s.unpacked);
        const auto *weights = (const Weight *)(direct ? (const void *)from : s.unpacked.weights);
        multiply_rows(count, Run<By, N>{format, some, weights, &s.unpacked, from, x + g * GROUP,
                                        l.weight.inputs, xsums + g * blocks, groups * blocks, s.sums, true});
    }
    const int64_t left = part->outputs - panel * PANEL, width = left < PANEL ? left : PANEL;
    for (int64_t m = 0; m < count; m++)
        finish(l, first + m, output + panel * PANEL, width, s.sums + m * PANEL);
}

// The scratch memory of this thread.
inline RowScratch &row_scratch() {
    static thread_local RowScratch scratch;
    return scratch;
}

// Returns the items of a linear. An item is one panel for one block of rows; all panels of a block
// precede those of the next block.
template <class X, class Y> INLINE int64_t items_of(const Linear<X, Y> &l) {
    return panels_of(l.weight) * ((l.rows + BLOCK_ROWS - 1) / BLOCK_ROWS);
}

// Computes an item. block: the block of which the scratch memory holds the rows; -1 if none.
template <class X, class Y>
INLINE void compute_item(const Linear<X, Y> &l, int64_t item, RowScratch &s, int64_t &block) {
    constexpr bool PAIRS = HAS_PAIRS && sizeof(X) == 2;
    const int64_t panels = panels_of(l.weight), inputs = l.weight.inputs;
    const int64_t first = item / panels * BLOCK_ROWS;
    const int64_t count = l.rows - first < BLOCK_ROWS ? l.rows - first : BLOCK_ROWS;
    const X *x = l.x + first * inputs;
    if (block != item / panels) {
        block = item / panels;
        if (has_minima(l.weight, 1)) sum_blocks<GROUP>(x, count * inputs, s.xsums[0]);
        if (has_minima(l.weight, 2)) sum_blocks<GROUP / 2>(x, count * inputs, s.xsums[1]);
        if constexpr (!PAIRS && sizeof(X) == 2) {
            s.x.resize((size_t)(count * inputs));
            for (int64_t i = 0; i < count * inputs; i += LANES) store(s.x.data() + i, load(x + i));
        }
    }
    if constexpr (PAIRS) linear_item<ByPairs>(l, item % panels, first, count, x, s);
    else if constexpr (sizeof(X) == 2)
        linear_item<ByFloats>(l, item % panels, first, count, s.x.data(), s);
    else linear_item<ByFloats>(l, item % panels, first, count, x, s);
}

// Computes a linear. All threads of the team call this.
template <class X, class Y> INLINE void linear(Team &team, const Linear<X, Y> &l) {
    RowScratch &s = row_scratch();
    int64_t block = -1;
    team.share(items_of(l), [&](int64_t item) { compute_item(l, item, s, block); });
}

// Computes the linears linear_of(0), ..., linear_of(count - 1) in one phase. All threads of the team call
// this.
template <class LinearOf> INLINE void linears(Team &team, int64_t count, LinearOf &&linear_of) {
    RowScratch &s = row_scratch();
    int64_t total = 0, index = 0, first = 0, block = -1; // first: the first item of linear `index`
    for (int64_t i = 0; i < count; i++) total += items_of(linear_of(i));
    team.share(total, [&](int64_t item) { // the items of one thread are ascending
        for (int64_t items; item >= first + (items = items_of(linear_of(index))); index++) {
            first += items;
            block = -1;
        }
        compute_item(linear_of(index), item - first, s, block);
    });
}

// Writes row `row` of a matrix to `to` [inputs], as embeddings are read.
template <class N> INLINE void gather_row(const Packed &matrix, int64_t row, N *to) {
    static thread_local Unpacked unpacked;
    const Part *part = matrix.parts;
    for (; row >= part->outputs; part++) row -= part->outputs;
    const int64_t format = part->format, groups = matrix.inputs / GROUP, lane = row % PANEL;
    const uint8_t *panel = part->data + row / PANEL * panel_bytes(format, groups);
    const Traits &traits = TRAITS[format];
    for (int64_t g = 0; g < groups; g += RUN_GROUPS) {
        const int64_t some = groups - g < RUN_GROUPS ? groups - g : RUN_GROUPS;
        const uint8_t *from = group_at(format, panel, g);
        if (format != F32) unpack_run<float>(format, header_at(format, panel, g), from, some, unpacked);
        const float *weights = (const float *)(format == F32 ? (const void *)from : unpacked.weights);
        alignas(64) float values[RUN_GROUPS * GROUP];
        for (int64_t k = 0; k < some * GROUP; k++) {
            values[k] = weights[k * PANEL + lane];
            if (!traits.blocks) continue;
            const int64_t b = k % GROUP * traits.blocks / GROUP;
            values[k] *= unpacked.scales[k / GROUP][b][lane];
            if (traits.has_minima) values[k] += unpacked.minima[k / GROUP][b][lane];
        }
        for (int64_t k = 0; k < some * GROUP; k += LANES) store(to + g * GROUP + k, load(values + k));
    }
}

} // namespace
