// y = x W^T for packed weights (packed.h), for one row and for hundreds.
//
// Weights are unpacked, a run of groups at a time, into integers that are exact in the number type of
// the multiplication: pairs of bfloat16 if the hardware multiplies those and x is bfloat16, else float.
// A group's sum is scaled once, so nothing is rounded that a product of floats would not round. Every
// output is summed in the same order for any number of rows and threads, so a row has the same bits
// alone and in any batch.
#pragma once

#include <vector>

#include "packed.h"
#include "team.h"

namespace {

constexpr int BLOCK_ROWS = 132; // rows for which a run of weights is unpacked once
constexpr int RUN = 4;          // groups unpacked at a time; they fit into the first-level cache
constexpr int FETCHED = 8192;   // bytes of weights that are prefetched
constexpr int AT_ONCE = LANES == 16 ? 12 : 6; // rows whose sums fit into the registers
constexpr int ABREAST = 2;                     // vectors of outputs, for the same reason

// ---- the two ways to multiply: the columns of a step, and the type of an unpacked weight

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

// ---- unpacking one group

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
// The integers 0 to 15 as bfloat16.
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

// ---- multiplying

// Multiply one group with ROWS rows, and add to part [ROWS][ABREAST].
template <int ROWS, class By, class X>
INLINE void multiply_group(const typename By::Weight *w, const X *x, int64_t ldx,
                           Floats (&part)[ROWS][ABREAST]) {
    for (int k = 0; k < GROUP; k += By::COLUMNS, w += PANEL) {
        typename By::Vector across[ABREAST];
        for (int j = 0; j < ABREAST; j++)
            across[j] = load_as<typename By::Vector>(w + j * LANES);
        for (int m = 0; m < ROWS; m++)
            for (int j = 0; j < ABREAST; j++)
                part[m][j] = By::multiply(part[m][j], x + m * ldx + k, across[j]);
    }
}

// The operands of a tile of rows: a run of groups, and the sums so far.
template <class By, class X> struct Run {
    int64_t format, groups;
    const typename By::Weight *weights; // unpacked
    const uint8_t *packed;              // for the scales
    const X *x;                         // from the run's first column on
    int64_t ldx;
    const float *xsums;                 // sums of each row's groups
    int64_t ldsums;
    float *sums;                        // [rows, PANEL], continued
    bool is_first;                      // the first tile prefetches the weights after the run
};

// Weights are read once, from memory. While a group is multiplied, the weights FETCHED bytes ahead are
// prefetched, because the hardware's own prefetching stops while nothing is read.
template <class By, class X> INLINE void fetch_ahead(const Run<By, X> &run, int64_t g) {
    if (!run.is_first) return;
    const int64_t size = GROUP_BYTES[run.format];
    for (int64_t line = 0; line < size; line += 64)
        __builtin_prefetch(run.packed + g * size + FETCHED + line);
}

// Weights with scales.
template <int ROWS, bool MINIMA, class By, class X> INLINE void multiply_scaled(const Run<By, X> &run) {
    for (int o = 0; o < PANEL; o += ABREAST * LANES)
        for (int64_t g = 0; g < run.groups; g++) {
            Floats part[ROWS][ABREAST] = {};
            if (o == 0) fetch_ahead(run, g);
            multiply_group<ROWS, By>(run.weights + g * (GROUP / By::COLUMNS * PANEL) + o,
                                     run.x + g * GROUP, run.ldx, part);
            forget_memory(); // otherwise the compiler keeps sums in registers that the parts need
            const uint8_t *group = run.packed + g * GROUP_BYTES[MINIMA ? Q4 : Q8];
            for (int j = 0; j < ABREAST; j++) {
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

// Weights without scales.
template <int ROWS, class By, class X> INLINE void multiply_plain(const Run<By, X> &run) {
    for (int o = 0; o < PANEL; o += ABREAST * LANES) {
        Floats part[ROWS][ABREAST];
        for (int m = 0; m < ROWS; m++)
            for (int j = 0; j < ABREAST; j++)
                part[m][j] = load(run.sums + m * PANEL + o + j * LANES);
        for (int64_t g = 0; g < run.groups; g++) {
            if (o == 0) fetch_ahead(run, g);
            multiply_group<ROWS, By>(run.weights + g * (GROUP / By::COLUMNS * PANEL) + o,
                                     run.x + g * GROUP, run.ldx, part);
        }
        for (int m = 0; m < ROWS; m++)
            for (int j = 0; j < ABREAST; j++)
                store(run.sums + m * PANEL + o + j * LANES, part[m][j]);
    }
}

// A tile of at most ROWS rows.
template <int ROWS, class By, class X> INLINE void multiply_tile(int64_t rows, const Run<By, X> &run) {
    if (rows == ROWS) {
        if (run.format == Q4) multiply_scaled<ROWS, true>(run);
        else if (run.format == Q8) multiply_scaled<ROWS, false>(run);
        else multiply_plain<ROWS>(run);
    } else if constexpr (ROWS > 1) multiply_tile<ROWS - 1>(rows, run);
}

// Any number of rows, in tiles of nearly equal size: with few rows a multiplication waits for the last.
template <class By, class X> INLINE void multiply_rows(int64_t rows, Run<By, X> run) {
    for (int64_t tiles = (rows + AT_ONCE - 1) / AT_ONCE; tiles > 0; tiles--) {
        const int64_t count = (rows + tiles - 1) / tiles;
        multiply_tile<AT_ONCE>(count, run);
        rows -= count;
        run.x += count * run.ldx;
        run.xsums += count * run.ldsums;
        run.sums += count * PANEL;
        run.is_first = false;
    }
}

// ---- the whole linear

enum Then { STORE, ADD }; // use of a result r: y = r or y += r (rounded as in torch)

template <class X, class Y> struct Linear {
    const X *x;      // [rows, inputs]
    Packed weight;
    const X *bias;   // [outputs], or null
    Y *y;            // [rows, outputs]
    int64_t rows;
    Then then;
};

// A thread's copies of the rows that it works on.
struct RowScratch {
    std::vector<float> xsums, x;
    alignas(64) float sums[BLOCK_ROWS * PANEL];
    alignas(64) uint32_t weights[RUN * GROUP * PANEL];
};

template <class X> INLINE void sum_groups(const X *x, int64_t count, float *to) {
    for (int64_t g = 0; g < count; g++) {
        Floats total = {};
        for (int k = 0; k < GROUP; k += LANES) total += load(x + g * GROUP + k);
        to[g] = sum(total);
    }
}

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
        if (l.then == ADD) result = load(before + o) + as_stored(Y{}, result);
        store(ready + o, result);
    }
    memcpy(y, ready, (size_t)count * sizeof(Y));
}

// One panel of outputs for one block of rows. x has the number type of the multiplication.
template <class By, class N, class X, class Y>
void linear_item(const Linear<X, Y> &l, int64_t panel, int64_t first, int64_t count, const N *x,
                 RowScratch &s) {
    const int64_t groups = l.weight.inputs / GROUP, stride = GROUP_BYTES[l.weight.format];
    const uint8_t *packed = l.weight.data + panel * groups * stride;
    const bool direct = l.weight.format == (By::COLUMNS == 2 ? BF16 : F32);
    memset(s.sums, 0, (size_t)count * PANEL * sizeof(float));
    for (int64_t g = 0; g < groups; g += RUN) {
        const int64_t some = groups - g < RUN ? groups - g : RUN;
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

// Run by the whole team. An item is a panel for a block of rows; blocks follow one another.
template <class X, class Y> INLINE void linear(Team &team, const Linear<X, Y> &l) {
    constexpr bool PAIRS = HAS_PAIRS && sizeof(X) == 2;
    static thread_local RowScratch scratch;
    RowScratch &s = scratch;
    const int64_t panels = panels_of(l.weight.outputs), inputs = l.weight.inputs;
    const int64_t blocks = (l.rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    int64_t block = -1;
    team.share(panels * blocks, [&](int64_t item) {
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
    });
}

} // namespace
