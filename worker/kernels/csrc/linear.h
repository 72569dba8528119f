// Computes y = x W^T for packed weights (packed.h), for one row and for hundreds.
//
// Quantised weights are unpacked, a run of groups at a time, into integers in the number type of the
// multiplication, which represents them exactly. The type is pairs of bfloat16 if x is bfloat16 and the
// hardware multiplies such pairs, and float otherwise. Scales are applied to the sum of a group, not to
// each weight, so quantised weights cause no rounding beyond that of float sums.
//
// Every output is summed in the same order for any number of rows and threads, so a row has the same
// bits alone and in any batch.
#pragma once

#include <vector>

#include "packed.h"
#include "team.h"

namespace {

constexpr int BLOCK_ROWS = 132; // most rows that use a run of weights after it is unpacked once
constexpr int RUN_GROUPS = 4;   // groups unpacked at a time; they fit into the first-level cache
constexpr int PREFETCH_BYTES = 8192; // weights are prefetched this many bytes before they are read
// Most rows, and vectors of outputs, that are computed together: their sums fit into the registers.
constexpr int TILE_ROWS = LANES == 16 ? 12 : 6;
constexpr int TILE_VECTORS = 2;

// ---- The two ways to multiply: one column at a time in float, or pairs of columns in bfloat16.

struct ByFloats {
    static constexpr int COLUMNS = 1;
    typedef float Weight; // unpacked: [column][PANEL]
    typedef Floats Vector;
    static INLINE Floats multiply(Floats sums, const float *x, Floats w) { return sums + *x * w; }
};

#if defined(__AVX512BF16__)
constexpr bool HAS_PAIRS = true;
struct ByPairs {
    static constexpr int COLUMNS = 2;
    typedef uint32_t Weight; // unpacked: [pair][PANEL]
    typedef Words Vector;
    static INLINE Floats multiply(Floats sums, const bf16 *x, Words w) {
        uint32_t pair;
        memcpy(&pair, x, 4);
        return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32((int)pair), (__m512bh)w);
    }
};
#else
constexpr bool HAS_PAIRS = false;
typedef ByFloats ByPairs;
#endif

// ---- Unpacking one group.

INLINE void unpack(int64_t format, const uint8_t *group, float *to) {
    for (int o = 0; o < PANEL; o += LANES) {
        if (format == Q4)
            for (int j = 0; j < 4; j++) {
                Words word = load_as<Words>(group + 128 + (j * PANEL + o) * 4);
                for (int s = 0; s < 8; s++) {
                    Ints nibble = (Ints)((word >> (4 * s)) & 15);
                    const int column = 2 * (4 * j + s % 4) + s / 4;
                    store(to + column * PANEL + o, __builtin_convertvector(nibble, Floats));
                }
            }
        else if (format == Q8)
            for (int j = 0; j < 8; j++) {
                Words word = load_as<Words>(group + 64 + (j * PANEL + o) * 4);
                for (int s = 0; s < 4; s++) {
                    Ints byte = (Ints)(word << (24 - 8 * s)) >> 24;
                    const int column = 2 * (2 * j + s % 2) + s / 2;
                    store(to + column * PANEL + o, __builtin_convertvector(byte, Floats));
                }
            }
        else
            for (int p = 0; p < GROUP / 2; p++) {
                Words pair = load_as<Words>(group + (p * PANEL + o) * 4);
                store(to + 2 * p * PANEL + o, (Floats)(pair << 16));
                store(to + (2 * p + 1) * PANEL + o, (Floats)(pair & 0xffff0000u));
            }
    }
}

#if defined(__AVX512BF16__)
// Returns the integers 0 to 15 as bfloat16, twice.
INLINE __m512i nibble_table() {
    alignas(64) uint16_t table[32];
    for (int i = 0; i < 32; i++) {
        const float value = (float)(i % 16);
        memcpy(table + i, (const char *)&value + 2, 2);
    }
    return _mm512_load_si512(table);
}

INLINE void unpack(int64_t format, const uint8_t *group, uint32_t *to) {
    const __m512i table = nibble_table(), low = _mm512_set1_epi16(15);
    for (int o = 0; o < PANEL; o += LANES) {
        if (format == Q4)
            for (int j = 0; j < 4; j++) {
                const __m512i word = load_as<__m512i>(group + 128 + (j * PANEL + o) * 4);
                for (int s = 0; s < 4; s++) {
                    const __m512i nibble = _mm512_and_si512(_mm512_srli_epi16(word, 4 * s), low);
                    store_as(to + (4 * j + s) * PANEL + o, _mm512_permutexvar_epi16(nibble, table));
                }
            }
        else
            for (int j = 0; j < 8; j++) {
                const Words word = load_as<Words>(group + 64 + (j * PANEL + o) * 4);
                for (int s = 0; s < 2; s++) {
                    const Ints even = (Ints)(word << (24 - 8 * s)) >> 24;
                    const Ints odd = (Ints)(word << (8 - 8 * s)) >> 24;
                    const Words a = words(__builtin_convertvector(even, Floats)) >> 16;
                    store_as(to + (2 * j + s) * PANEL + o, a | words(__builtin_convertvector(odd, Floats)));
                }
            }
    }
}
#endif

// ---- Multiplying.

// Multiplies ROWS rows of x by one group, and adds the products to part [ROWS][TILE_VECTORS].
template <int ROWS, class By, class X>
INLINE void multiply_group(const typename By::Weight *w, const X *x, int64_t ldx,
                           Floats (&part)[ROWS][TILE_VECTORS]) {
    for (int k = 0; k < GROUP; k += By::COLUMNS, w += PANEL) {
        typename By::Vector across[TILE_VECTORS];
        for (int j = 0; j < TILE_VECTORS; j++)
            across[j] = load_as<typename By::Vector>(w + j * LANES);
        for (int m = 0; m < ROWS; m++)
            for (int j = 0; j < TILE_VECTORS; j++)
                part[m][j] = By::multiply(part[m][j], x + m * ldx + k, across[j]);
    }
}

// The operands of a multiplication: rows of x, a run of groups, and the sums so far.
template <class By, class X> struct Run {
    int64_t format, groups;
    const typename By::Weight *weights; // unpacked
    const uint8_t *packed;              // the same groups as stored, with their scales
    const X *x;                         // starts at the run's first column
    int64_t ldx;                        // numbers from row to row of x
    const float *xsums;                 // the sum of each group of x, for the minima of Q4
    int64_t ldsums;                     // numbers from row to row of xsums
    float *sums;                        // [rows, PANEL]; the products are added
    bool is_first;                      // whether this is the first tile of rows, which prefetches
};

// Prefetches the weights that are PREFETCH_BYTES after group g. The hardware's own prefetching stops while
// a group is multiplied, because nothing is read from memory.
template <class By, class X> INLINE void prefetch_weights(const Run<By, X> &run, int64_t g) {
    if (!run.is_first) return;
    const int64_t size = GROUP_BYTES[run.format];
    for (int64_t line = 0; line < size; line += 64)
        __builtin_prefetch(run.packed + g * size + PREFETCH_BYTES + line);
}

// Multiplies a tile of ROWS rows by weights with scales, and with minima if MINIMA.
template <int ROWS, bool MINIMA, class By, class X> INLINE void multiply_scaled(const Run<By, X> &run) {
    for (int o = 0; o < PANEL; o += TILE_VECTORS * LANES)
        for (int64_t g = 0; g < run.groups; g++) {
            Floats part[ROWS][TILE_VECTORS] = {};
            if (o == 0) prefetch_weights(run, g);
            multiply_group<ROWS, By>(run.weights + g * (GROUP / By::COLUMNS * PANEL) + o,
                                     run.x + g * GROUP, run.ldx, part);
            forget_memory(); // otherwise the compiler keeps sums in the registers that `part` needs
            const uint8_t *group = run.packed + g * GROUP_BYTES[MINIMA ? Q4 : Q8];
            for (int j = 0; j < TILE_VECTORS; j++) {
                const uint16_t *scales = (const uint16_t *)group + o + j * LANES;
                const Floats scale = load_f16(scales);
                const Floats minimum = MINIMA ? load_f16(scales + PANEL) : Floats{};
                for (int m = 0; m < ROWS; m++) {
                    float *at = run.sums + m * PANEL + o + j * LANES;
                    Floats total = load(at) + scale * part[m][j];
                    if (MINIMA) total += minimum * run.xsums[m * run.ldsums + g];
                    store(at, total);
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
            multiply_group<ROWS, By>(run.weights + g * (GROUP / By::COLUMNS * PANEL) + o,
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
        if (run.format == Q4) multiply_scaled<ROWS, true>(run);
        else if (run.format == Q8) multiply_scaled<ROWS, false>(run);
        else multiply_plain<ROWS>(run);
    } else if constexpr (ROWS > 1) multiply_tile<ROWS - 1>(rows, run);
}

// Multiplies any number of rows, in tiles of nearly equal size. A small tile would be slow, because each
// of its multiplications has to wait for the one before.
template <class By, class X> INLINE void multiply_rows(int64_t rows, Run<By, X> run) {
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
    std::vector<float> xsums; // the sum of each group of x
    std::vector<float> x;     // the rows as float, if they have to be converted
    alignas(64) float sums[BLOCK_ROWS * PANEL];
    alignas(64) uint32_t weights[RUN_GROUPS * GROUP * PANEL];
};

// Writes the sum of each of `count` groups of x.
template <class X> INLINE void sum_groups(const X *x, int64_t count, float *to) {
    for (int64_t g = 0; g < count; g++) {
        Floats total = {};
        for (int k = 0; k < GROUP; k += LANES) total += load(x + g * GROUP + k);
        to[g] = sum(total);
    }
}

// Writes the sums of one row and panel to y, with the bias. first: the panel's first output.
template <class X, class Y>
INLINE void finish(const Linear<X, Y> &l, int64_t row, int64_t first, const float *sums) {
    Y *y = l.y + row * l.weight.outputs + first;
    const int64_t left = l.weight.outputs - first, count = left < PANEL ? left : PANEL;
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
    const int64_t groups = l.weight.inputs / GROUP, stride = GROUP_BYTES[l.weight.format];
    const uint8_t *packed = l.weight.data + panel * groups * stride;
    const bool direct = l.weight.format == (By::COLUMNS == 2 ? BF16 : F32);
    memset(s.sums, 0, (size_t)count * PANEL * sizeof(float));
    for (int64_t g = 0; g < groups; g += RUN_GROUPS) {
        const int64_t some = groups - g < RUN_GROUPS ? groups - g : RUN_GROUPS;
        const uint8_t *from = packed + g * stride;
        auto *weights = (const typename By::Weight *)from;
        if (!direct) {
            auto *to = (typename By::Weight *)s.weights;
            for (int64_t i = 0; i < some; i++)
                unpack(l.weight.format, from + i * stride, to + i * (GROUP / By::COLUMNS * PANEL));
            weights = to;
        }
        multiply_rows(count, Run<By, N>{l.weight.format, some, weights, from, x + g * GROUP,
                                        l.weight.inputs, s.xsums.data() + g, groups, s.sums, true});
    }
    for (int64_t m = 0; m < count; m++) finish(l, first + m, panel * PANEL, s.sums + m * PANEL);
}

// The scratch memory of this thread.
inline RowScratch &row_scratch() {
    static thread_local RowScratch scratch;
    return scratch;
}

// Returns the items of a linear. An item is one panel for one block of rows; all panels of a block
// precede those of the next block.
template <class X, class Y> INLINE int64_t items_of(const Linear<X, Y> &l) {
    return panels_of(l.weight.outputs) * ((l.rows + BLOCK_ROWS - 1) / BLOCK_ROWS);
}

// Computes an item. block: the block of which the scratch memory holds the rows; -1 if none.
template <class X, class Y>
INLINE void compute_item(const Linear<X, Y> &l, int64_t item, RowScratch &s, int64_t &block) {
    constexpr bool PAIRS = HAS_PAIRS && sizeof(X) == 2;
    const int64_t panels = panels_of(l.weight.outputs), inputs = l.weight.inputs;
    const int64_t first = item / panels * BLOCK_ROWS;
    const int64_t count = l.rows - first < BLOCK_ROWS ? l.rows - first : BLOCK_ROWS;
    const X *x = l.x + first * inputs;
    if (block != item / panels) {
        block = item / panels;
        s.xsums.resize((size_t)(count * inputs / GROUP));
        if (l.weight.format == Q4) sum_groups(x, count * inputs / GROUP, s.xsums.data());
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

} // namespace
