// Computes y = x W^T for packed weights (packed.h), for one row and for hundreds.
//
// Quantised weights are unpacked (unpack.h), a run of groups at a time, into integers in the number type of
// the multiplication, which represents them exactly. The type is pairs of bfloat16 if x is bfloat16 and the
// hardware multiplies such pairs, and float otherwise. Pairs are unpacked in registers (pair_rows.h), unless a
// group has several scales; other integers in the first-level cache. Scales are applied to the sum of the
// weights that share one, not to each weight, so quantised weights cause no rounding beyond that of float sums.
//
// If the matrix says so (Packed.rounds_inputs), x is rounded to eight bits (rounded.h), and the integers are
// multiplied as such, which is faster: most for many rows.
//
// Every output is summed in the same order for any number of rows and threads, so a row has the same
// bits alone and in any batch.
#pragma once

#include <vector>

#include "float_tiles.h"
#include "integer_tiles.h"
#include "pair_rows.h"
#include "sums.h"
#include "team.h"

namespace {

constexpr int BLOCK_ROWS = 132; // most rows that use a run of weights while it is in the first-level cache

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
    const RoundedRows *rounded = nullptr; // x rounded to eight bits; null: every thread rounds what it reads
};

// A thread's scratch memory for the rows and weights that it multiplies.
struct RowScratch {
    RoundedRows rounded; // a block of rows, if these are not shared
    RefinedOrder order;  // of a block's refined groups
    std::vector<float> xsums[MAX_BLOCKS]; // [b - 1]: the sums of x, b for each group
    std::vector<float> x;     // the rows as float, if they have to be converted
    alignas(64) float sums[BLOCK_ROWS * PANEL];
    Unpacked unpacked;
    ReadAhead reader;
};

// Writes the sum of each SIZE numbers of x, which has `count`.
template <int SIZE, class X> INLINE void sum_blocks(const X *x, int64_t count, std::vector<float> &to) {
    to.resize((size_t)(count / SIZE));
    for (int64_t i = 0; i < count; i += SIZE)
        to[(size_t)(i / SIZE)] = sum_over(SIZE, [&](Floats sums, int64_t k) { return sums + load(x + i + k); });
}

// Writes the sums of one row and panel to y, with the bias. y, bias: of the panel's outputs.
template <class X, class Y>
INLINE void finish_panel(const Linear<X, Y> &l, const X *bias, const float *sums, Y *y) {
    for (int o = 0; o < PANEL; o += LANES) {
        Floats result = load(sums + o);
        if (bias) result += load(bias + o);
        if (l.then == ADD) result = fused(as_stored(Y{}, result), splat(l.scale), load(y + o));
        store(y + o, result);
    }
}

// The same for the first `count` outputs of a panel.
template <class X, class Y>
INLINE void finish(const Linear<X, Y> &l, int64_t row, int64_t first, int64_t count, const float *sums) {
    Y *y = l.y + row * l.weight.outputs + first;
    const X *bias = l.bias ? l.bias + first : nullptr;
    if (count == PANEL) return finish_panel(l, bias, sums, y);
    alignas(64) Y some_y[PANEL] = {};
    alignas(64) X some_bias[PANEL] = {};
    memcpy(some_y, y, (size_t)count * sizeof(Y));
    if (bias) memcpy(some_bias, bias, (size_t)count * sizeof(X));
    finish_panel(l, bias ? some_bias : nullptr, sums, some_y);
    memcpy(y, some_y, (size_t)count * sizeof(Y));
}

// The part of a matrix that a panel is in.
struct Place {
    const Part *part;
    int64_t panel;  // of the part
    int64_t output; // the first of the panel
    int64_t width;  // outputs of the panel
};
INLINE Place place_of(const Packed &matrix, int64_t panel) {
    const Part *part = matrix.parts;
    int64_t output = 0; // the part's first
    for (; panel >= panels_of(part->outputs); part++) {
        panel -= panels_of(part->outputs);
        output += part->outputs;
    }
    const int64_t left = part->outputs - panel * PANEL;
    return {part, panel, output + panel * PANEL, left < PANEL ? left : PANEL};
}

// Calls multiply(g, some, header, packed) for each run of `some` groups from group g of a panel.
template <class Multiply> INLINE void in_runs(const Place &at, int64_t groups, Multiply &&multiply) {
    const int64_t format = at.part->format;
    const uint8_t *panel = at.part->data + at.panel * panel_bytes(format, groups);
    for (int64_t g = 0; g < groups; g += RUN_GROUPS) {
        const int64_t some = groups - g < RUN_GROUPS ? groups - g : RUN_GROUPS;
        multiply(g, some, header_at(format, panel, g), group_at(format, panel, g));
    }
}

// Multiplies `count` rows by a panel, in the number type of `By`, and adds the products to s.sums.
//
// x: the first of these rows, in that number type.
template <class By, class N>
void multiply_panel(const Place &at, int64_t inputs, int64_t count, const N *x, RowScratch &s) {
    const int64_t format = at.part->format, groups = inputs / GROUP;
    const bool direct = format == (By::COLUMNS == 2 ? BF16 : F32);
    const int64_t blocks = TRAITS[format].blocks ? TRAITS[format].blocks : 1;
    const float *xsums = s.xsums[blocks - 1].data();
    in_runs(at, groups, [&](int64_t g, int64_t some, const uint8_t *header, const uint8_t *packed) {
        using Weight = typename By::Weight;
#if defined(__AVX512BF16__)
        if constexpr (By::COLUMNS == 2) {
            const Run<By, N> run{format, some, nullptr, nullptr, packed, x + g * GROUP, inputs,
                                 xsums + g * blocks, groups * blocks, s.sums};
            if (multiply_without_storing(count, header, run)) return;
        }
#endif
        if (!direct) unpack_run<Weight>(format, header, packed, some, s.unpacked);
        const auto *weights = (const Weight *)(direct ? (const void *)packed : s.unpacked.weights);
        multiply_rows(count, Run<By, N>{format, some, weights, &s.unpacked, packed, x + g * GROUP, inputs,
                                        xsums + g * blocks, groups * blocks, s.sums});
    });
}

// The same in integers. x: rounded rows, of which rows [first, first + count) are multiplied.
inline void multiply_panel_in_integers(const Place &at, int64_t inputs, const RoundedRows &x, int64_t first,
                                       int64_t count, RowScratch &s) {
    const int64_t format = at.part->format, groups = inputs / GROUP, refined = num_refined(groups);
    const uint8_t *panel = at.part->data + at.panel * panel_bytes(format, groups);
    const RoundedGroups rows = x.whole.groups().from_group(first * groups), remainders = x.remainders.groups();
    if (is_in_place(format)) multiply_rows(count, rows, groups, {format, 0, groups, panel, nullptr}, s.sums, s.reader);
    else
        in_runs(at, groups, [&](int64_t g, int64_t some, const uint8_t *header, const uint8_t *packed) {
            unpack_run<Quad>(format, header, packed, some, s.unpacked);
            multiply_rows(count, rows, groups, {format, g, some, panel, &s.unpacked}, s.sums, s.reader);
        });
    if (count == 1 && is_in_place(format)) { // in one call, with the sums in registers
        const int32_t *listed = x.refined.data() + first * refined;
        return multiply_listed({{format, 0, refined, panel, nullptr, listed}, remainders, {first * refined}, {s.sums}, {}});
    }
    IntegerTile tile{{format, 0, 1, panel, &s.unpacked}, remainders, {}, {}, {}};
    MultiplyTile *const multiply = multiply_tile_of(format);
    for (const RefinedOrder::Group &each : s.order.groups) {
        const int64_t g = each.group;
        const int32_t *items = s.order.items.data() + each.first;
        tile.weights.first = g;
        if (!is_in_place(format))
            unpack_run<Quad>(format, header_at(format, panel, g), group_at(format, panel, g), 1, s.unpacked);
        in_tiles(each.end - each.first, INTEGER_ROWS, [&](int64_t from, int64_t some) {
            for (int64_t m = 0; m < some; m++) {
                tile.at[m] = items[from + m];
                tile.sums[m] = s.sums + (items[from + m] / refined - first) * PANEL;
            }
            multiply(some, tile);
        });
    }
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

// Returns whether a matrix reads rounded rows.
INLINE bool reads_rounded(const Packed &weight) { return weight.rounds_inputs && is_any(weight, true); }

// Prepares rows [first, first + rows) of a linear in the forms in which they will be multiplied.
template <class X, class Y> INLINE void prepare_rows(const Linear<X, Y> &l, int64_t first, int64_t rows, RowScratch &s) {
    constexpr bool PAIRS = HAS_PAIRS && sizeof(X) == 2;
    const int64_t inputs = l.weight.inputs, count = rows * inputs;
    const X *x = l.x + first * inputs;
    if (reads_rounded(l.weight)) {
        if (!l.rounded) {
            s.rounded.fit(rows, inputs);
            for (int64_t m = 0; m < rows; m++) round_row(x + m * inputs, m, inputs, s.rounded);
        }
        if (l.rounded) s.order.sort(*l.rounded, first, rows, inputs / GROUP);
        else s.order.sort(s.rounded, 0, rows, inputs / GROUP);
        if (!is_any(l.weight, false)) return;
    }
    if (has_minima(l.weight, 1)) sum_blocks<GROUP>(x, count, s.xsums[0]);
    if (has_minima(l.weight, 2)) sum_blocks<GROUP / 2>(x, count, s.xsums[1]);
    if constexpr (!PAIRS && sizeof(X) == 2) {
        s.x.resize((size_t)count);
        for (int64_t i = 0; i < count; i += LANES) store(s.x.data() + i, load(x + i));
    }
}

// Computes an item. block: the block of which the scratch memory holds the rows; -1 if none.
template <class X, class Y>
INLINE void compute_item(const Linear<X, Y> &l, int64_t item, RowScratch &s, int64_t &block) {
    constexpr bool PAIRS = HAS_PAIRS && sizeof(X) == 2;
    const int64_t panels = panels_of(l.weight), inputs = l.weight.inputs;
    const int64_t first = item / panels * BLOCK_ROWS;
    const int64_t count = l.rows - first < BLOCK_ROWS ? l.rows - first : BLOCK_ROWS;
    if (block != item / panels) {
        block = item / panels;
        prepare_rows(l, first, count, s);
    }
    const X *x = l.x + first * inputs;
    const Place at = place_of(l.weight, item % panels);
    memset(s.sums, 0, (size_t)count * PANEL * sizeof(float));
    if (l.weight.rounds_inputs && TRAITS[at.part->format].blocks) {
        if (l.rounded) multiply_panel_in_integers(at, inputs, *l.rounded, first, count, s);
        else multiply_panel_in_integers(at, inputs, s.rounded, 0, count, s);
    } else if constexpr (PAIRS) multiply_panel<ByPairs>(at, inputs, count, x, s);
    else {
        const float *floats;
        if constexpr (sizeof(X) == 2) floats = s.x.data();
        else floats = x;
        if (HAS_FMA || l.weight.rounds_inputs) multiply_panel<ByFloats>(at, inputs, count, floats, s);
        else if constexpr (!HAS_FMA) multiply_panel<ByQuickFloats>(at, inputs, count, floats, s);
    }
    for (int64_t m = 0; m < count; m++) finish(l, first + m, at.output, at.width, s.sums + m * PANEL);
}

// Computes a linear. All threads of the team call this.
template <class X, class Y> INLINE void linear(Team &team, const Linear<X, Y> &l, StepPart part = LINEARS) {
    RowScratch &s = row_scratch();
    int64_t block = -1;
    team.share(part, items_of(l), [&](int64_t item) { compute_item(l, item, s, block); }, true);
}

// The same, with `others` further items of other work in the same phase.
template <class X, class Y, class Other>
INLINE void linear_and(Team &team, const Linear<X, Y> &l, int64_t others, Other &&other) {
    RowScratch &s = row_scratch();
    int64_t block = -1;
    team.share(LINEARS, others + items_of(l), [&](int64_t item) {
        if (item < others) other(item);
        else compute_item(l, item - others, s, block);
    }, true);
}

// Computes the linears linear_of(0), ..., linear_of(count - 1) in one phase. All threads of the team call
// this.
template <class LinearOf> INLINE void linears(Team &team, int64_t count, LinearOf &&linear_of) {
    RowScratch &s = row_scratch();
    int64_t total = 0, index = 0, first = 0, block = -1; // first: the first item of linear `index`
    for (int64_t i = 0; i < count; i++) total += items_of(linear_of(i));
    team.share(LINEARS, total, [&](int64_t item) { // the items of one thread are ascending
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
