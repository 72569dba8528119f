// Attention that reads keys and values in place, block by block, without copying them.
//
// The keys of a row are cut into pieces of PIECE keys, and these into tiles of TILE_KEYS (key_tile.h), at the
// same positions in every row. The sums of a piece's tiles are added in the order of the keys, and so are
// those of a row's pieces.
// - A row of one token (decode): an item is a piece. The pieces' sums are added when all are there.
// - A row of several tokens (prefill.h): an item is TILE_TOKENS tokens, with all their keys.
// Both ways give a position the same bits, alone and in any batch, for any number of threads.
//
// Only keys that a row sees are read, so data that other requests left in a block is never read.
//
// Legend: T tokens, R rows, M columns of the block table, H query heads, H_kv key/value heads,
// D head dim, G = H / H_kv.
#pragma once

#include <vector>

#include "key_tile.h"

namespace {

constexpr int PIECE = 256;         // keys of a decode item
constexpr int TILE_TOKENS = 64;    // tokens of a prefill item
// With at least this many pieces, an item has several heads, and there are still items for all threads.
constexpr int MIN_PIECES = 16;
constexpr int64_t L2_BYTES = 1 << 18; // bytes of keys and values that the second-level cache holds
constexpr int MAX_GROUP = 128;

// The input of a step's attention: the fields of AttentionBatch (base.py).
struct Rows {
    const int64_t *row_starts, *context_lens, *block_table;
    int64_t num_rows, num_decodes, table_width, block_tokens;
    const int64_t *seen_ends; // [T]: a token sees the keys before this one of its row; null: those up to itself
};

// How a layer turns products of queries and keys into scores, and which keys its queries see.
struct Scoring {
    double scale;    // factor of the scores
    double soft_cap; // scores become soft_cap * tanh(score / soft_cap); 0: they stay as they are
    int64_t window;  // a query sees this many last keys, its own included; 0: all
    const float *sinks; // [H]: a score of each head that joins the softmax without a value; null: none
    int64_t sees_runs;  // whether `seen_ends` applies

    // Returns the first key that the query at position `last` sees.
    INLINE int64_t first_key(int64_t last) const {
        return window && last >= window ? last + 1 - window : 0;
    }

    // Returns the sum of a head's weights e^(score - peak), including its sink, from the sum of its keys.
    INLINE float with_sink(int64_t head, float peak, float total) const {
        if (!sinks) return total;
        const float above = sinks[head] - peak;
        return above > 88 ? INFINITY : total + exponential(above); // 88: the most that `exponential` computes
    }
};

// The attention of one layer. N: numbers of queries and results. S: how the cache stores keys and values
// (stored_kv.h).
template <class N, class S> struct Attend {
    const N *q;        // [T, ...], q_stride items from token to token
    N *out;            // [T, H, D]
    const S *k, *v;    // [B, block_tokens, H_kv, stored_width], block_items items from block to block
    int64_t block_items;
    int64_t q_stride;
    Heads heads;
    Scoring scoring;
};

// A piece of a decode row, or a tile of a prefill row.
struct Item {
    int64_t row;
    int64_t first;   // first key of the row (decode), or first token of the step (prefill)
    int64_t partial; // index of the piece's Sums; -1 if the piece is the whole row, or for a tile
};

// The items of a step, which are the same for all layers.
//
// The heads of a token are adjacent in memory. So if there are enough pieces for all threads, one
// thread computes several heads of a piece one after the other. For the first head, it reads memory
// without gaps, which is twice as fast. The data of the other heads is then in the second-level cache.
struct Work {
    std::vector<Item> items; // first num_tiles tiles, which take longest, then the decode pieces
    int64_t num_tiles = 0, num_partials = 0;

    // Returns how many heads of a piece one thread computes. head_bytes: size of a stored head.
    int64_t heads_per_item(const Heads &h, int64_t head_bytes) const {
        const int64_t fitting = L2_BYTES / (2 * PIECE * head_bytes);
        if ((int64_t)items.size() - num_tiles < MIN_PIECES || fitting < 1) return 1;
        return fitting < h.kv_heads ? fitting : h.kv_heads;
    }

    explicit Work(const Rows &rows) {
        for (int64_t row = rows.num_rows; row-- > rows.num_decodes;) {
            const int64_t start = rows.row_starts[row], stop = rows.row_starts[row + 1];
            int64_t tile = start + (stop - start - 1) / TILE_TOKENS * TILE_TOKENS;
            for (; tile >= start; tile -= TILE_TOKENS) items.push_back({row, tile, -1});
        }
        num_tiles = (int64_t)items.size();
        for (int64_t row = 0; row < rows.num_decodes; row++) {
            const bool whole = rows.context_lens[row] <= PIECE;
            for (int64_t key = 0; key < rows.context_lens[row]; key += PIECE)
                items.push_back({row, key, whole ? -1 : num_partials++});
        }
    }
};

// Returns the first item of a row's key in the cache of a layer. apart: items from token to token.
template <class N, class S>
INLINE int64_t cache_index(const Attend<N, S> &a, const Rows &rows, int64_t row, int64_t key, int64_t apart) {
    const int64_t block = rows.block_table[row * rows.table_width + key / rows.block_tokens];
    return block * a.block_items + key % rows.block_tokens * apart;
}

// Writes the addresses of the keys and values [first, count) of a row and head, counted from key `start`.
template <class N, class S>
INLINE void find_keys(const Attend<N, S> &a, const Rows &rows, int64_t row, int64_t kv_head, int64_t start,
                      int64_t first, int64_t count, const S **keys, const S **values) {
    const int64_t width = stored_width<S>(a.heads.dim), apart = a.heads.kv_heads * width;
    for (int64_t j = first; j < count;) {
        const int64_t left = rows.block_tokens - (start + j) % rows.block_tokens;
        const int64_t end = j + (left < count - j ? left : count - j);
        int64_t at = cache_index(a, rows, row, start + j, apart) + kv_head * width;
        for (; j < end; j++, at += apart) {
            keys[j] = a.k + at;
            values[j] = a.v + at;
        }
    }
}

// Writes the output [D] of query head `head` from the sums of all its keys.
template <class N, class S>
INLINE void finish_head(const Attend<N, S> &a, int64_t head, const Sums &sums, N *out) {
    const float total = a.scoring.with_sink(head, *sums.peak, *sums.total);
    for (int64_t d = 0; d < a.heads.dim; d += LANES) store(out + d, load(sums.values + d) / total);
}

// ---- decode

// Returns the number of floats of the sums of the query heads that share a key/value head.
INLINE int64_t group_floats(const Heads &h) { return h.heads / h.kv_heads * (h.dim + 2); }

// Returns the sums of query number `g` of those that share a key/value head. floats: their memory.
INLINE Sums sums_at(float *floats, int64_t g, const Heads &h) {
    const int64_t group = h.heads / h.kv_heads;
    float *after = floats + group * h.dim;
    return {after + g, after + group + g, floats + g * h.dim};
}

// A tile of a piece, and what is prefetched meanwhile.
template <class S> struct Tile {
    const S *const *keys, *const *values; // addresses
    int64_t first, count; // the row sees the keys [first, count)
    int64_t ahead;        // keys from which on there is nothing to prefetch
    int64_t prefetch_size;
    float *key_scales, *value_scales; // [TILE_KEYS], of rounded keys and values
};

// Adds the keys of a tile to the sums of Q query heads, from number `g` on.
//
// q: [G, D]. floats: the memory of the sums of all heads that share the key/value head.
template <int Q, class N, class S>
INLINE void decode_heads(const Attend<N, S> &a, const typename Dots<N>::Query *q, const Tile<S> &tile, int64_t g,
                         float *floats) {
    const int64_t dim = a.heads.dim, from = tile.first / LANES * LANES;
    const int64_t to = (tile.count + LANES - 1) / LANES * LANES;
    alignas(64) float scores[Q * TILE_KEYS];
    scores_in_place<Q, N>(q + g * dim, tile.keys, tile.values, tile.first, tile.count, tile.ahead, dim,
                          g == 0 ? tile.prefetch_size : 0, (float)a.scoring.scale, scores);
    if (g == 0) { // not before the scores: by now they are prefetched
        load_scales(tile.keys, tile.first, tile.count, dim, tile.key_scales);
        load_scales(tile.values, tile.first, tile.count, dim, tile.value_scales);
    }
    for (int m = 0; m < Q; m++) {
        float *own = scores + m * TILE_KEYS;
        scale_scores<S>(own, from, to, tile.key_scales);
        if (a.scoring.soft_cap != 0) cap_scores(own + from, to - from, (float)a.scoring.soft_cap);
        add_weights(own, from, to, tile.first, tile.count, sums_at(floats, g + m, a.heads), dim);
        scale_weights<S>(own, from, to, tile.value_scales);
    }
    add_values<Q, N>(scores, tile.values, tile.first, tile.count, dim, floats + g * dim);
}

// Computes the sums of a piece and all query heads that share a key/value head.
//
// prefetch_size: items to prefetch of each key and value, from this head on. More than a head's items also
// prefetch the heads that follow.
template <class N, class S>
void decode_piece(const Attend<N, S> &a, const Rows &rows, const Item &item, int64_t kv_head,
                  int64_t prefetch_size, float *floats) {
    const Heads &h = a.heads;
    const int64_t group = h.heads / h.kv_heads, dim = h.dim, context = rows.context_lens[item.row];
    const int64_t end = context - item.first < PIECE ? context - item.first : PIECE;
    const int64_t visible = a.scoring.first_key(context - 1) - item.first;
    const int64_t start = visible > 0 ? visible : 0; // the first key of the piece that is seen
    memset(floats, 0, (size_t)group_floats(h) * sizeof(float));
    for (int64_t g = 0; g < group; g++) *sums_at(floats, g, h).peak = -INFINITY;
    if (start >= end) return; // the window starts after this piece
    const S *keys[PIECE], *values[PIECE];
    alignas(64) float key_scales[TILE_KEYS] = {}, value_scales[TILE_KEYS] = {};
    find_keys(a, rows, item.row, kv_head, item.first, start, end, keys, values);
    alignas(64) typename Dots<N>::Query q[MAX_GROUP * MAX_DIM];
    convert_row(a.q + rows.row_starts[item.row] * a.q_stride + kv_head * group * dim, q, group * dim);
    for (int64_t j = start; j < end && j < start + KEYS_AHEAD; j++) prefetch(keys[j], prefetch_size);
    for (int64_t at = start / TILE_KEYS * TILE_KEYS; at < end; at += TILE_KEYS) {
        const Tile<S> tile{keys + at, values + at, start > at ? start - at : 0,
                           end - at < TILE_KEYS ? end - at : TILE_KEYS, end - at, prefetch_size,
                           key_scales, value_scales};
        for (int64_t g = 0; g < group; g += QUERIES_AT_ONCE) {
            switch (group - g) {
            case 1: decode_heads<1>(a, q, tile, g, floats); break;
            case 2: decode_heads<2>(a, q, tile, g, floats); break;
            case 3: decode_heads<3>(a, q, tile, g, floats); break;
            default: decode_heads<4>(a, q, tile, g, floats);
            }
        }
    }
}

// Computes one piece for one key/value head. A piece that is the whole row is finished at once.
template <class N, class S>
void decode_item(const Attend<N, S> &a, const Rows &rows, const Item &item, int64_t kv_head,
                 int64_t prefetch_size, float *partials) {
    const Heads &h = a.heads;
    const int64_t group = h.heads / h.kv_heads, size = group_floats(h);
    if (item.partial >= 0) {
        float *floats = partials + (item.partial * h.kv_heads + kv_head) * size;
        return decode_piece(a, rows, item, kv_head, prefetch_size, floats);
    }
    alignas(64) float own[MAX_GROUP * (MAX_DIM + 2)];
    decode_piece(a, rows, item, kv_head, prefetch_size, own);
    N *out = a.out + (rows.row_starts[item.row] * h.heads + kv_head * group) * h.dim;
    for (int64_t g = 0; g < group; g++)
        finish_head(a, kv_head * group + g, sums_at(own, g, h), out + g * h.dim);
}

// Finishes a row of several pieces, items[0, count), after all of them are computed. Their sums are added
// to those of the first piece.
template <class N, class S>
void join_row(const Attend<N, S> &a, const Rows &rows, const Item *items, int64_t count,
              float *partials) {
    const Heads &h = a.heads;
    const int64_t group = h.heads / h.kv_heads, size = group_floats(h);
    N *out = a.out + rows.row_starts[items[0].row] * h.heads * h.dim;
    for (int64_t head = 0; head < h.heads; head++) {
        auto piece = [&](int64_t i) {
            float *floats = partials + (items[i].partial * h.kv_heads + head / group) * size;
            return sums_at(floats, head % group, h);
        };
        for (int64_t i = 1; i < count; i++) add_sums(piece(0), piece(i), h.dim);
        finish_head(a, head, piece(0), out + head * h.dim);
    }
}

} // namespace
