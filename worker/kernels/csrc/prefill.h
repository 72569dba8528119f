// Attention of rows of several tokens: a tile of queries against 64 keys at a time.
//
// Keys are transposed to [D, keys]. So the scores of one query for neighbouring keys form a vector, and
// no sum runs across a vector. As in flash attention, the sums of a query are relative to its greatest
// score so far, and are rescaled if a later key has a greater one.
//
// Legend in attention.h. A tile has TILE_TOKENS * G queries, ordered by token.
#pragma once

#include "attention.h"

namespace {

// Vectors computed at once for each of QUERIES_AT_ONCE queries; they fit into the registers.
constexpr int ACROSS = LANES == 16 ? 4 : 2;

// Computes c = a * b, or c += a * b if ADD, for ACROSS vectors of the columns of c:
// a [QUERIES_AT_ONCE, depth], b [depth, width], c [QUERIES_AT_ONCE, width]. lda, ldb, ldc: numbers from
// row to row.
template <bool ADD, int ACROSS>
INLINE void tile_of(const float *a, int64_t lda, const float *b, int64_t ldb, int64_t depth, float *c,
                 int64_t ldc) {
    Floats sums[QUERIES_AT_ONCE][ACROSS];
    for (int i = 0; i < QUERIES_AT_ONCE; i++)
        for (int j = 0; j < ACROSS; j++)
            sums[i][j] = ADD ? load(c + i * ldc + j * LANES) : Floats{};
    for (int64_t d = 0; d < depth; d++) {
        Floats side[ACROSS];
        for (int j = 0; j < ACROSS; j++) side[j] = load(b + d * ldb + j * LANES);
        for (int i = 0; i < QUERIES_AT_ONCE; i++)
            for (int j = 0; j < ACROSS; j++) sums[i][j] += a[i * lda + d] * side[j];
    }
    for (int i = 0; i < QUERIES_AT_ONCE; i++)
        for (int j = 0; j < ACROSS; j++) store(c + i * ldc + j * LANES, sums[i][j]);
}

// As tile_of, for all columns of c. The width must be a multiple of LANES.
template <bool ADD>
INLINE void tile(const float *a, int64_t lda, const float *b, int64_t ldb, int64_t depth, float *c,
                 int64_t ldc, int64_t width) {
    int64_t j = 0;
    for (; j + ACROSS * LANES <= width; j += ACROSS * LANES)
        tile_of<ADD, ACROSS>(a, lda, b + j, ldb, depth, c + j, ldc);
    for (; j < width; j += LANES) tile_of<ADD, 1>(a, lda, b + j, ldb, depth, c + j, ldc);
}

// A thread's scratch memory for a tile. It is allocated once.
struct TileScratch {
    std::vector<float> queries, sums, peaks, totals; // [queries, D] twice, [queries] twice
    alignas(64) float keys[MAX_DIM * KEYS_AT_ONCE];   // [D, KEYS_AT_ONCE]
    alignas(64) float values[KEYS_AT_ONCE * MAX_DIM]; // [KEYS_AT_ONCE, D]
    // `update_softmax` replaces the scores by weights.
    alignas(64) float scores[QUERIES_AT_ONCE * KEYS_AT_ONCE];

    void fit(int64_t queries_, int64_t dim) {
        queries.assign((size_t)(queries_ * dim), 0);
        sums.assign((size_t)(queries_ * dim), 0);
        peaks.assign((size_t)queries_, -INFINITY);
        totals.assign((size_t)queries_, 0);
    }
};

// Writes `size` numbers of queries to `to`, as floats multiplied by `scale`.
template <class N> INLINE void scale_queries(const N *from, float *to, int64_t size, float scale) {
    for (int64_t d = 0; d < size; d += LANES) store(to + d, load(from + d) * scale);
}

// Copies keys and values [first, first + count) of a row and head to the scratch memory, the keys
// transposed, and pads them with zeros to KEYS_AT_ONCE.
template <class N>
void load_keys(const Attend<N> &a, const Rows &rows, int64_t row, int64_t kv_head, int64_t first,
          int64_t count, TileScratch &s) {
    const Heads &h = a.heads;
    alignas(64) float key[MAX_DIM];
    for (int64_t j = 0; j < KEYS_AT_ONCE; j++) {
        float *value = s.values + j * h.dim;
        if (j >= count) {
            memset(value, 0, (size_t)h.dim * sizeof(float));
            for (int64_t d = 0; d < h.dim; d++) s.keys[d * KEYS_AT_ONCE + j] = 0;
            continue;
        }
        const int64_t at = (cache_index(rows, row, first + j) * h.kv_heads + kv_head) * h.dim;
        for (int64_t d = 0; d < h.dim; d += LANES) {
            store(key + d, load(a.k + at + d));
            store(value + d, load(a.v + at + d));
        }
        for (int64_t d = 0; d < h.dim; d++) s.keys[d * KEYS_AT_ONCE + j] = key[d];
    }
}

// Replaces the scores of QUERIES_AT_ONCE queries by softmax weights, and rescales their sums to the new
// greatest score. Of the KEYS_AT_ONCE keys, query i sees those from hidden[i] to seen[i] - 1.
INLINE void update_softmax(
    TileScratch &s, int64_t query, const int64_t *hidden, const int64_t *seen, int64_t dim
) {
    for (int i = 0; i < QUERIES_AT_ONCE; i++) {
        float *scores = s.scores + i * KEYS_AT_ONCE;
        if (seen[i] <= hidden[i]) {
            memset(scores, 0, KEYS_AT_ONCE * sizeof(float));
            continue;
        }
        for (int64_t j = 0; j < hidden[i]; j++) scores[j] = -INFINITY;
        for (int64_t j = seen[i]; j < KEYS_AT_ONCE; j++) scores[j] = -INFINITY;
        Floats high = load(scores);
        for (int j = LANES; j < KEYS_AT_ONCE; j += LANES) high = max_of(load(scores + j), high);
        const float before = s.peaks[query + i], here = max_in(high);
        const float peak = here > before ? here : before;
        const float share = before == peak ? 1.0f : std::exp(before - peak);
        const float total = to_weights(scores, KEYS_AT_ONCE, peak);
        s.totals[query + i] = s.totals[query + i] * share + total;
        s.peaks[query + i] = peak;
        if (share != 1.0f) {
            float *sums = s.sums.data() + (query + i) * dim;
            for (int64_t d = 0; d < dim; d += LANES) store(sums + d, load(sums + d) * share);
        }
    }
}

// Computes one tile of a row for one key/value head.
template <class N>
void prefill_item(const Attend<N> &a, const Rows &rows, const Item &item, int64_t kv_head) {
    static thread_local TileScratch scratch;
    TileScratch &s = scratch;
    const Heads &h = a.heads;
    const int64_t group = h.heads / h.kv_heads, stop = rows.row_starts[item.row + 1];
    const int64_t left = stop - item.first, tokens = left < TILE_TOKENS ? left : TILE_TOKENS;
    const int64_t queries = tokens * group;
    const int64_t whole = (queries + QUERIES_AT_ONCE - 1) / QUERIES_AT_ONCE * QUERIES_AT_ONCE;
    const int64_t before = rows.context_lens[item.row] - (stop - item.first); // keys that precede the tile
    s.fit(whole, h.dim);
    for (int64_t t = 0; t < tokens; t++)
        scale_queries(a.q + (item.first + t) * a.q_stride + kv_head * group * h.dim,
               s.queries.data() + t * group * h.dim, group * h.dim,
               (float)a.scoring.scale);
    const int64_t start = a.scoring.first_key(before) / KEYS_AT_ONCE * KEYS_AT_ONCE;
    for (int64_t key = start; key < before + tokens; key += KEYS_AT_ONCE) {
        const int64_t count = before + tokens - key < KEYS_AT_ONCE ? before + tokens - key : KEYS_AT_ONCE;
        load_keys(a, rows, item.row, kv_head, key, count, s);
        for (int64_t query = 0; query < whole; query += QUERIES_AT_ONCE) {
            int64_t hidden[QUERIES_AT_ONCE], seen[QUERIES_AT_ONCE], most = 0;
            for (int i = 0; i < QUERIES_AT_ONCE; i++) {
                const int64_t last = query + i < queries ? before + (query + i) / group + 1 : 0;
                const int64_t first = a.scoring.first_key(last - 1);
                hidden[i] = first > key ? first - key : 0;
                seen[i] = last - key < count ? last - key : count;
                if (seen[i] > hidden[i] && seen[i] > most) most = seen[i];
            }
            if (!most) continue;
            const float *q = s.queries.data() + query * h.dim;
            tile<false>(q, h.dim, s.keys, KEYS_AT_ONCE, h.dim, s.scores, KEYS_AT_ONCE, KEYS_AT_ONCE);
            if (a.scoring.soft_cap != 0)
                cap_scores(s.scores, QUERIES_AT_ONCE * KEYS_AT_ONCE, (float)a.scoring.soft_cap);
            update_softmax(s, query, hidden, seen, h.dim);
            float *sums = s.sums.data() + query * h.dim;
            tile<true>(s.scores, KEYS_AT_ONCE, s.values, h.dim, most, sums, h.dim, h.dim);
        }
    }
    for (int64_t query = 0; query < queries; query++) {
        const int64_t head = kv_head * group + query % group;
        N *out = a.out + ((item.first + query / group) * h.heads + head) * h.dim;
        const float *sums = s.sums.data() + query * h.dim;
        const float total = a.scoring.with_sink(head, s.peaks[query], s.totals[query]);
        for (int64_t d = 0; d < h.dim; d += LANES) store(out + d, load(sums + d) / total);
    }
}

// Computes the attention of one layer. All threads of the team call this.
//
// partials: scratch memory of num_partials * H_kv * partial_floats floats.
template <class N>
INLINE void attend(Team &team, const Attend<N> &a, const Rows &rows, const Work &work,
                   float *partials) {
    const int64_t kv_heads = a.heads.kv_heads, dim = a.heads.dim, tiles = work.num_tiles * kv_heads;
    const int64_t some = work.heads_per_item(a.heads, sizeof(N)), parts = (kv_heads + some - 1) / some;
    const int64_t pieces = ((int64_t)work.items.size() - work.num_tiles) * parts;
    team.share(tiles + pieces, [&](int64_t i) {
        if (i < tiles) return prefill_item(a, rows, work.items[(size_t)(i / kv_heads)], i % kv_heads);
        const Item &item = work.items[(size_t)(work.num_tiles + (i - tiles) / parts)];
        const int64_t first = (i - tiles) % parts * some;
        const int64_t end = first + some < kv_heads ? first + some : kv_heads;
        for (int64_t head = first; head < end; head++)
            decode_item(a, rows, item, head, head == first ? (end - first) * dim : dim, partials);
    });
    if (!work.num_partials) return;
    team.share((int64_t)work.items.size(), [&](int64_t i) {
        const Item &item = work.items[(size_t)i];
        if (item.partial < 0 || item.first) return;
        const int64_t count = (rows.context_lens[item.row] + PIECE - 1) / PIECE;
        join_row(a, rows, &item, count, partials);
    });
}

} // namespace
