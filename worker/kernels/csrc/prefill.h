// Attention of rows of several tokens: TILE_TOKENS tokens against a tile of keys at a time.
//
// Legend in attention.h. An item has TILE_TOKENS * G queries, ordered by token.
#pragma once

#include <algorithm>

#include "attention.h"

namespace {

// Two sums of each query: of the current piece, and of all pieces before it.
enum { PIECE_SUMS, ROW_SUMS };

// A thread's scratch memory for an item of Q queries. It is allocated once.
template <class N> struct TileScratch {
    typedef typename Dots<N>::Query Query;
    std::vector<Query> queries;                      // [Q, D]
    std::vector<float> sums[2], peaks[2], totals[2]; // [Q, D], [Q], [Q]
    alignas(64) uint32_t keys[MAX_DIM * TILE_KEYS];  // [columns, TILE_KEYS]
    alignas(64) Query values[TILE_KEYS * MAX_DIM];   // [TILE_KEYS, D]
    alignas(64) float scores[QUERIES_AT_ONCE * TILE_KEYS];
    alignas(64) float key_scales[TILE_KEYS], value_scales[TILE_KEYS]; // of rounded keys and values

    void fit(int64_t count, int64_t dim) {
        queries.assign((size_t)(count * dim), Query{});
        for (int i = 0; i < 2; i++) {
            sums[i].resize((size_t)(count * dim));
            peaks[i].resize((size_t)count);
            totals[i].resize((size_t)count);
            clear(i);
        }
    }

    void clear(int i) {
        std::fill(sums[i].begin(), sums[i].end(), 0.0f);
        std::fill(peaks[i].begin(), peaks[i].end(), -INFINITY);
        std::fill(totals[i].begin(), totals[i].end(), 0.0f);
    }

    Sums at(int i, int64_t query, int64_t dim) {
        return {&peaks[i][(size_t)query], &totals[i][(size_t)query], sums[i].data() + query * dim};
    }
};

// Adds the sums of the current piece to those of all before, and clears them.
template <class N> INLINE void end_piece(TileScratch<N> &s, int64_t queries, int64_t dim) {
    for (int64_t i = 0; i < queries; i++) add_sums(s.at(ROW_SUMS, i, dim), s.at(PIECE_SUMS, i, dim), dim);
    s.clear(PIECE_SUMS);
}

// Loads the keys and values [first, count) of a tile, of a row and head.
template <class N, class S>
void load_tile(const Attend<N, S> &a, const Rows &rows, int64_t row, int64_t kv_head, int64_t tile,
               int64_t first, int64_t count, TileScratch<N> &s) {
    const int64_t dim = a.heads.dim;
    const S *keys[TILE_KEYS], *values[TILE_KEYS];
    find_keys(a, rows, row, kv_head, tile, first, count, keys, values);
    if constexpr (!std::is_same<S, N>::value) {
        alignas(64) N numbers[TILE_KEYS * MAX_DIM];
        const N *converted[TILE_KEYS];
        for (int64_t j = first; j < count; j++) {
            convert_row(keys[j], numbers + j * dim, dim);
            converted[j] = numbers + j * dim;
        }
        transpose_keys(converted, first, count, dim, s.keys);
    } else transpose_keys(keys, first, count, dim, s.keys);
    for (int64_t j = first; j < count; j++) convert_row(values[j], s.values + j * dim, dim);
    load_scales(keys, first, count, dim, s.key_scales);
    load_scales(values, first, count, dim, s.value_scales);
}

// Computes TILE_TOKENS tokens of a row for one key/value head.
template <class N, class S>
void prefill_item(const Attend<N, S> &a, const Rows &rows, const Item &item, int64_t kv_head) {
    static thread_local TileScratch<N> scratch;
    TileScratch<N> &s = scratch;
    const Heads &h = a.heads;
    const int64_t group = h.heads / h.kv_heads, dim = h.dim, stop = rows.row_starts[item.row + 1];
    const int64_t left = stop - item.first, tokens = left < TILE_TOKENS ? left : TILE_TOKENS;
    const int64_t queries = tokens * group;
    const int64_t whole = (queries + QUERIES_AT_ONCE - 1) / QUERIES_AT_ONCE * QUERIES_AT_ONCE;
    const int64_t before = rows.context_lens[item.row] - left; // keys that precede the item
    const int64_t *ends = a.scoring.sees_runs && rows.seen_ends ? rows.seen_ends + item.first : nullptr;
    const int64_t stop_key = ends ? *std::max_element(ends, ends + tokens) : before + tokens; // no query sees it
    s.fit(whole, dim);
    for (int64_t t = 0; t < tokens; t++)
        convert_row(a.q + (item.first + t) * a.q_stride + kv_head * group * dim,
                    s.queries.data() + t * group * dim, group * dim);
    const typename Dots<N>::Query *values[TILE_KEYS];
    for (int j = 0; j < TILE_KEYS; j++) values[j] = s.values + j * dim;
    const int64_t start = a.scoring.first_key(before); // the first key that any query sees
    for (int64_t tile = start / TILE_KEYS * TILE_KEYS; tile < stop_key; tile += TILE_KEYS) {
        if (tile % PIECE == 0) end_piece(s, queries, dim);
        const int64_t first = start > tile ? start - tile : 0;
        const int64_t count = stop_key - tile < TILE_KEYS ? stop_key - tile : TILE_KEYS;
        load_tile(a, rows, item.row, kv_head, tile, first, count, s);
        for (int64_t query = 0; query < whole; query += QUERIES_AT_ONCE) {
            // Query i sees the keys of the tile from from[i] to to[i] - 1; padding sees none.
            int64_t from[QUERIES_AT_ONCE], to[QUERIES_AT_ONCE], least = TILE_KEYS, most = 0;
            for (int i = 0; i < QUERIES_AT_ONCE; i++) {
                const int64_t token = (query + i) / group;
                const int64_t last = query + i < queries ? before + token : -1;
                const int64_t end = last >= 0 && ends ? ends[token] : last + 1;
                const int64_t visible = a.scoring.first_key(last) - tile;
                from[i] = visible > 0 ? visible : 0;
                to[i] = end - tile < count ? end - tile : count;
                if (from[i] >= to[i]) continue;
                least = from[i] < least ? from[i] : least;
                most = to[i] > most ? to[i] : most;
            }
            if (least >= most) continue;
            const int64_t low = least / LANES * LANES, high = (most + LANES - 1) / LANES * LANES;
            scores_of_transposed<QUERIES_AT_ONCE, N>(s.queries.data() + query * dim, s.keys, dim, low, high,
                                                     (float)a.scoring.scale, s.scores);
            for (int i = 0; i < QUERIES_AT_ONCE; i++) {
                float *scores = s.scores + i * TILE_KEYS;
                if (from[i] >= to[i]) {
                    memset(scores, 0, TILE_KEYS * sizeof(float));
                    continue;
                }
                scale_scores<S>(scores, low, high, s.key_scales);
                if (a.scoring.soft_cap != 0) cap_scores(scores + low, high - low, (float)a.scoring.soft_cap);
                add_weights(scores, low, high, from[i], to[i], s.at(PIECE_SUMS, query + i, dim), dim);
                scale_weights<S>(scores, low, high, s.value_scales);
            }
            float *sums = s.sums[PIECE_SUMS].data() + query * dim;
            add_values<QUERIES_AT_ONCE, N>(s.scores, values, least, most, dim, sums);
        }
    }
    end_piece(s, queries, dim);
    for (int64_t query = 0; query < queries; query++) {
        const int64_t head = kv_head * group + query % group;
        N *out = a.out + ((item.first + query / group) * h.heads + head) * dim;
        finish_head(a, head, s.at(ROW_SUMS, query, dim), out);
    }
}

// Computes the attention of one layer. All threads of the team call this.
//
// partials: scratch memory of num_partials * H_kv * group_floats floats.
template <class N, class S>
INLINE void attend(Team &team, const Attend<N, S> &a, const Rows &rows, const Work &work,
                   float *partials) {
    const int64_t kv_heads = a.heads.kv_heads, width = stored_width<S>(a.heads.dim);
    const int64_t tiles = work.num_tiles * kv_heads, some = work.heads_per_item(a.heads, width * (int64_t)sizeof(S));
    const int64_t parts = (kv_heads + some - 1) / some;
    const int64_t pieces = ((int64_t)work.items.size() - work.num_tiles) * parts;
    team.share(ATTENTION, tiles + pieces, [&](int64_t i) {
        if (i < tiles) return prefill_item(a, rows, work.items[(size_t)(i / kv_heads)], i % kv_heads);
        const Item &item = work.items[(size_t)(work.num_tiles + (i - tiles) / parts)];
        const int64_t first = (i - tiles) % parts * some;
        const int64_t end = first + some < kv_heads ? first + some : kv_heads;
        for (int64_t head = first; head < end; head++)
            decode_item(a, rows, item, head, head == first ? (end - first) * width : width, partials);
    });
    if (!work.num_partials) return;
    team.share(ATTENTION, (int64_t)work.items.size(), [&](int64_t i) {
        const Item &item = work.items[(size_t)i];
        if (item.partial < 0 || item.first) return;
        const int64_t count = (rows.context_lens[item.row] + PIECE - 1) / PIECE;
        join_row(a, rows, &item, count, partials);
    });
}

} // namespace
