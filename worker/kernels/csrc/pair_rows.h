// Multiplies rows by quantised weights in pairs of bfloat16, without storing the unpacked weights.
//
// For formats with one scale for each row of a group, it takes less time to unpack the weights for each tile of
// rows than to store and load them. The operations and their order are those of float_tiles.h.
#pragma once

#include "float_tiles.h"

#if defined(__AVX512BF16__)
namespace {

constexpr int PAIR_ROWS = 8; // most rows that are multiplied together: their sums fit into the registers

// Multiplies ROWS rows by a run of groups, which start at `run.packed` and have one header.
template <int ROWS, int64_t FORMAT>
INLINE void multiply_pairs(const uint8_t *header, const Run<ByPairs, bf16> &run) {
    constexpr Traits T = TRAITS[FORMAT];
    static_assert(T.blocks == 1, "a group has one sum for each row and output");
    // Each multiplication waits for the one before with the same sum. Few rows have few sums, so two vectors of
    // outputs are computed together if their words leave registers for the sums.
    constexpr int VECTORS = T.bits == 4 && ROWS <= 4 ? 2 : 1;
    const PairReader<FORMAT> reader;
    for (int64_t g = 0; g < run.groups; g++) {
        const uint8_t *group = run.packed + g * group_bytes(FORMAT);
        if (run.is_first) prefetch_after(FORMAT, group);
        for (int o = 0; o < PANEL; o += VECTORS * LANES) {
            Words word[VECTORS][T.bits];
            for (int j = 0; j < VECTORS; j++)
                for (int i = 0; i < T.bits; i++)
                    word[j][i] = load_as<Words>(group + scales_bytes(FORMAT) + (i * PANEL + o + j * LANES) * 4);
            Floats part[ROWS][VECTORS] = {};
#pragma GCC unroll 16
            for (int p = 0; p < GROUP / 2; p++)
                for (int j = 0; j < VECTORS; j++) {
                    const Words pair = reader.pair(word[j], p);
                    for (int m = 0; m < ROWS; m++)
                        part[m][j] = ByPairs::multiply(part[m][j], run.x + m * run.ldx + g * GROUP + 2 * p, pair);
                }
            for (int j = 0; j < VECTORS; j++) {
                const Scaling scaling = scaling_of<FORMAT>(header, group, 0, o + j * LANES);
                for (int m = 0; m < ROWS; m++)
                    add_scaled<T.has_minima>(run.sums + m * PANEL + o + j * LANES, part[m][j], scaling,
                                             T.has_minima ? run.xsums[m * run.ldsums + g] : 0);
            }
        }
    }
}

template <int ROWS, int64_t FORMAT>
INLINE void multiply_tile_of_pairs(int64_t rows, const uint8_t *header, const Run<ByPairs, bf16> &run) {
    if (rows == ROWS) multiply_pairs<ROWS, FORMAT>(header, run);
    else if constexpr (ROWS > 1) multiply_tile_of_pairs<ROWS - 1, FORMAT>(rows, header, run);
}

template <int64_t FORMAT>
__attribute__((noinline)) bool multiply_rows_of_pairs(int64_t rows, const uint8_t *header,
                                                      const Run<ByPairs, bf16> &run) {
    in_tiles(rows, PAIR_ROWS, [&](int64_t first, int64_t count) {
        multiply_tile_of_pairs<PAIR_ROWS, FORMAT>(count, header, run.from_row(first));
    });
    return true;
}

// Multiplies `rows` rows by a run of groups. Returns false, and does nothing, if the format does not have one
// scale for each row of a group.
inline bool multiply_without_storing(int64_t rows, const uint8_t *header, const Run<ByPairs, bf16> &run) {
    switch (run.format) {
    case Q4: return multiply_rows_of_pairs<Q4>(rows, header, run);
    case Q8: return multiply_rows_of_pairs<Q8>(rows, header, run);
    case Q5: return multiply_rows_of_pairs<Q5>(rows, header, run);
    case Q5M: return multiply_rows_of_pairs<Q5M>(rows, header, run);
    case Q4K: return multiply_rows_of_pairs<Q4K>(rows, header, run);
    case Q5K: return multiply_rows_of_pairs<Q5K>(rows, header, run);
    case I4: return multiply_rows_of_pairs<I4>(rows, header, run);
    case I4K: return multiply_rows_of_pairs<I4K>(rows, header, run);
    case F4: return multiply_rows_of_pairs<F4>(rows, header, run);
    }
    return false;
}

} // namespace
#endif
