// The sizes of the tiles in which rows are multiplied by weights, and what all kinds of tiles need.
#pragma once

#include "read_ahead.h"
#include "unpack.h"

namespace {

// Most rows, and vectors of outputs, that are computed together: their sums fit into the registers.
constexpr int TILE_ROWS = LANES == 16 ? 12 : 6;
constexpr int TILE_VECTORS = 2;
constexpr int PREFETCH_BYTES = 16384; // weights are prefetched this many bytes before they are read

// Prefetches the weights that are PREFETCH_BYTES after a group. The hardware's own prefetching stops while the
// group is multiplied, because nothing is read from memory.
INLINE void prefetch_after(int64_t format, const uint8_t *group) {
    for (int64_t line = 0; line < group_bytes(format); line += 64)
        __builtin_prefetch(group + PREFETCH_BYTES + line, 0, 2);
}

// What a tile prefetches while it multiplies: a piece of the next panel, so that memory is read all the time and
// not only while the first tile is multiplied. If there is a reader, it also reads a few lines of what a
// later phase needs.
struct Ahead {
    const uint8_t *from;
    int64_t bytes; // for each group
    ReadAhead *reader;

    INLINE void read() const {
        if (reader) reader->advance();
    }
    INLINE void prefetch(int64_t group) const {
        for (int64_t line = group * bytes / 64; line < (group + 1) * bytes / 64; line++)
            __builtin_prefetch(from + line * 64, 0, 2);
    }
};

// Calls multiply(first, count) for tiles of nearly equal size, of at most `most` rows. A small tile would be
// slow, because each of its multiplications has to wait for the one before.
template <class Multiply> INLINE void in_tiles(int64_t rows, int most, Multiply &&multiply) {
    int64_t first = 0;
    for (int64_t tiles = (rows + most - 1) / most; tiles > 0; tiles--) {
        const int64_t count = (rows - first + tiles - 1) / tiles;
        multiply(first, count);
        first += count;
    }
}

} // namespace
