// The sizes of the tiles in which rows are multiplied by weights, and what all kinds of tiles need.
#pragma once

#include "unpack.h"

namespace {

// Most rows, and vectors of outputs, that are computed together: their sums fit into the registers.
constexpr int TILE_ROWS = LANES == 16 ? 12 : 6;
constexpr int TILE_VECTORS = 2;
constexpr int PREFETCH_BYTES = 8192; // weights are prefetched this many bytes before they are read

// Prefetches the weights that are PREFETCH_BYTES after group g of `packed`. The hardware's own prefetching
// stops while a group is multiplied, because nothing is read from memory.
INLINE void prefetch_after(int64_t format, const uint8_t *packed, int64_t g) {
    const int64_t size = group_bytes(format);
    for (int64_t line = 0; line < size; line += 64)
        __builtin_prefetch(packed + g * size + PREFETCH_BYTES + line);
}

} // namespace
