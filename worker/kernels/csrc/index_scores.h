// The scores of an indexer (worker/layers/indexer.py), which reads index keys in place, block by block.
//
// An item is a token of the step with a piece of the keys that it sees. Products are those of attention (key_tile.h),
// and are added in the order of the heads. So a score has the same bits in a chunk and alone, for any number of threads.
//
// Legend: n tokens, R rows, M columns of the block table, H index heads, D numbers of an index key.
#pragma once

#include "attention.h"

namespace {

// The tokens of one call, and the cache of the layer's index keys.
struct IndexedTokens {
    const int64_t *rows;        // [n] row of each token
    const int64_t *visible;     // [n] how many tokens it sees
    const int64_t *block_table; // [R, M]
    int64_t count, table_width, block_tokens, block_items;
    int64_t heads, dim;
    int64_t width; // scores of a token
};

// The tensors of one call. N: numbers of queries. S: how the cache stores keys (stored_kv.h).
template <class N, class S> struct IndexScores {
    const N *queries;     // [n, H, D]
    const float *weights; // [n, H]
    const S *keys;        // [B, block_tokens, 1, stored_width]
    float *out;           // [n, width]
};

// Adds the weighted positive products of Q heads, from number `head` on, and the keys [0, count) to sums [TILE_KEYS].
template <int Q, class N, class S>
INLINE void add_heads(const typename Dots<N>::Query *queries, const float *weights, const S *const *keys, int64_t head,
                      int64_t count, int64_t dim, const float *scales, float *sums) {
    alignas(64) float products[Q * TILE_KEYS];
    scores_in_place<Q, N>(queries + head * dim, keys, keys, 0, count, count, dim, 0, 1.0f, products);
    for (int m = 0; m < Q; m++) {
        float *own = products + m * TILE_KEYS;
        const int64_t to = (count + LANES - 1) / LANES * LANES;
        scale_scores<S>(own, 0, to, scales);
        for (int64_t j = 0; j < to; j += LANES)
            store(sums + j, fused(max_of(load(own + j), Floats{}), splat(weights[head + m]), load(sums + j)));
    }
}

// Writes the scores of the keys [first, end) of token number `token`.
template <class N, class S>
void score_piece(const IndexScores<N, S> &s, const IndexedTokens &tokens, int64_t token, int64_t first, int64_t end) {
    const int64_t heads = tokens.heads, dim = tokens.dim, size = stored_width<S>(dim);
    const int64_t *table = tokens.block_table + tokens.rows[token] * tokens.table_width;
    const float *weights = s.weights + token * heads;
    alignas(64) typename Dots<N>::Query queries[MAX_GROUP * MAX_DIM];
    convert_row(s.queries + token * heads * dim, queries, heads * dim);
    for (int64_t at = first; at < end; at += TILE_KEYS) {
        const int64_t count = end - at < TILE_KEYS ? end - at : TILE_KEYS;
        const S *keys[TILE_KEYS];
        for (int64_t j = 0; j < count; j++) {
            const int64_t key = at + j;
            keys[j] = s.keys + table[key / tokens.block_tokens] * tokens.block_items + key % tokens.block_tokens * size;
        }
        alignas(64) float scales[TILE_KEYS] = {}, sums[TILE_KEYS] = {};
        load_scales(keys, 0, count, dim, scales);
        for (int64_t head = 0; head < heads; head += QUERIES_AT_ONCE) {
            switch (heads - head) {
            case 1: add_heads<1, N>(queries, weights, keys, head, count, dim, scales, sums); break;
            case 2: add_heads<2, N>(queries, weights, keys, head, count, dim, scales, sums); break;
            case 3: add_heads<3, N>(queries, weights, keys, head, count, dim, scales, sums); break;
            default: add_heads<4, N>(queries, weights, keys, head, count, dim, scales, sums);
            }
        }
        memcpy(s.out + token * tokens.width + at, sums, (size_t)count * sizeof(float));
    }
}

// Computes the scores. Calls `share` once.
template <class N, class S> void compute_scores(Team &team, const IndexScores<N, S> &s, const IndexedTokens &tokens) {
    const int64_t pieces = (tokens.width + PIECE - 1) / PIECE;
    team.share(ATTENTION, tokens.count * pieces, [&](int64_t item) {
        const int64_t token = item / pieces, first = item % pieces * PIECE;
        const int64_t end = first + PIECE < tokens.width ? first + PIECE : tokens.width;
        const int64_t visible = tokens.visible[token] < end ? tokens.visible[token] : end;
        if (first < visible) score_piece(s, tokens, token, first, visible);
        for (int64_t i = first < visible ? visible : first; i < end; i++) s.out[token * tokens.width + i] = -INFINITY;
    });
}

} // namespace
