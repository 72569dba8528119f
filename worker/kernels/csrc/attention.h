// Attention that reads keys and values in place, block by block, without copying them.
//
// A row of one token (decode): for each key/value head and piece of PIECE keys, the queries that share
// the head are multiplied with each key. The pieces of a longer row are combined at the end, in the
// order of the keys. So a row has the same bits alone, among others, and for any number of threads.
// A row of several tokens (prefill): for each tile of queries, 64 keys at a time are transposed, and
// scores are computed for 64 keys at once.
//
// Only keys that a query sees are read, so data that other requests left in a block is never read.
//
// Legend: T tokens, R rows, M columns of the block table, H query heads, H_kv key/value heads,
// D head dim, G = H / H_kv.
#pragma once

#include <vector>

#include "elementwise.h"

namespace {

constexpr int PIECE = 256;     // keys of a decode item
constexpr int TILE_TOKENS = 64; // tokens of a prefill item
constexpr int SIDE = 64;       // keys transposed at once
constexpr int TOGETHER = 4;    // queries computed at once
constexpr int ENOUGH = 16;     // with this many pieces, several heads in one item leave no thread idle
constexpr int64_t NEARBY = 1 << 18; // bytes of keys and values that the second-level cache holds
constexpr int MAX_DIM = 256;
constexpr int MAX_GROUP = 32;

// The input of a step's attention: the fields of AttentionBatch (base.py).
struct Rows {
    const int64_t *row_starts, *context_lens, *block_table;
    int64_t num_rows, num_decodes, table_width, block_tokens;
};

template <class N> struct Attend {
    const N *q;        // [T, ...], q_stride items from token to token
    N *out;            // [T, H, D]
    const N *k, *v;    // [B, block_tokens, H_kv, D]
    int64_t q_stride;
    Heads heads;
};

// A piece of a row's work. `first` is an index of keys (decode) or of tokens of the step (prefill).
struct Item {
    int64_t row;
    int64_t first;
    int64_t partial; // index of the sums of a decode piece; -1: the piece is the whole row
};

// The work of a step, the same for all layers.
//
// A token's heads lie side by side. So if there are enough pieces for all threads, several heads of a
// piece are computed one after the other. The first one reads memory without gaps, twice as fast, and
// the others find their data in the second-level cache.
struct Work {
    std::vector<Item> items; // the longest first: num_tiles of prefill, then pieces
    int64_t num_tiles = 0, num_partials = 0;

    // Heads of a piece that are computed in one item, for numbers of `bytes` bytes.
    int64_t heads_together(const Heads &h, int64_t bytes) const {
        const int64_t fitting = NEARBY / (2 * PIECE * h.dim * bytes);
        if ((int64_t)items.size() - num_tiles < ENOUGH || fitting < 1) return 1;
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

INLINE int64_t place(const Rows &rows, int64_t row, int64_t key) {
    const int64_t block = rows.block_table[row * rows.table_width + key / rows.block_tokens];
    return block * rows.block_tokens + key % rows.block_tokens;
}

// ---- decode

// Sums of a piece, for each query head of a group: greatest score, sum of weights, weighted values.
struct Partial {
    float *peak, *total, *sums; // [G], [G], [G, D]
};

INLINE int64_t partial_floats(const Heads &h) { return h.heads / h.kv_heads * (h.dim + 2); }

// The form of queries for the multiplication with keys, and one step of it. Pairs of bfloat16 are
// multiplied directly if the hardware supports it, with sums in float; otherwise all is float.
template <class N> struct Dots {
    typedef float Query;
    static INLINE Floats add(Floats sums, const float *q, Floats key) { return sums + load(q) * key; }
    static INLINE Floats key(const N *from) { return load(from); }
    static constexpr int WIDTH = LANES;
};
#if defined(__AVX512BF16__)
template <> struct Dots<bf16> {
    typedef bf16 Query;
    static INLINE Floats add(Floats sums, const bf16 *q, __m512i key) {
        return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)load_as<__m512i>(q), (__m512bh)key);
    }
    static INLINE __m512i key(const bf16 *from) { return load_as<__m512i>(from); }
    static constexpr int WIDTH = 2 * LANES;
};
#endif

// Heads of neighbouring tokens are far apart, so the processor does not prefetch them itself.
template <class N> INLINE void fetch_ahead(const N *row, int64_t size) {
    for (int64_t byte = 0; byte < size * (int64_t)sizeof(N); byte += 64)
        __builtin_prefetch((const char *)row + byte);
}

constexpr int AHEAD = 12; // keys

// Scaled scores [G][PIECE] of q [G, D], for LANES keys at a time, whose sums are computed together.
// The array has space beyond `count` for the rest of the last vector. near: bytes that are prefetched
// of each key and value, from this head on; those of the next heads follow it.
template <int G, class N>
INLINE void scores_of(const typename Dots<N>::Query *q, const N *const *keys,
                      const N *const *values, int64_t count, int64_t dim, int64_t near, float scale,
                      float (*scores)[PIECE]) {
    for (int64_t j = 0; j < count && j < AHEAD; j++) fetch_ahead(keys[j], near);
    for (int64_t j = 0; j < count; j += LANES) {
        Floats dots[G][LANES];
        const int some = count - j < LANES ? (int)(count - j) : LANES;
        for (int i = some; i < LANES; i++)
            for (int g = 0; g < G; g++) dots[g][i] = Floats{};
        for (int i = 0; i < some; i++) {
            if (j + i + AHEAD < count) fetch_ahead(keys[j + i + AHEAD], near);
            fetch_ahead(values[j + i], near);
            Floats sums[G] = {};
            for (int64_t d = 0; d < dim; d += Dots<N>::WIDTH) {
                const auto key = Dots<N>::key(keys[j + i] + d);
                for (int g = 0; g < G; g++) sums[g] = Dots<N>::add(sums[g], q + g * dim + d, key);
            }
            for (int g = 0; g < G; g++) dots[g][i] = sums[g];
        }
        for (int g = 0; g < G; g++) store(scores[g] + j, sums_of(dots[g]) * scale);
    }
}

// sums [G, D] of weights [G][PIECE] times values, for ACROSS vectors from `d` on. Each weight is read
// once for all numbers whose sums fit into the registers.
template <int G, int ACROSS, class N>
INLINE void values_across(const N *const *values, int64_t count, int64_t dim, int64_t d,
                          const float (*weights)[PIECE], float *sums) {
    Floats own[G][ACROSS] = {};
    for (int64_t j = 0; j < count; j++) {
        Floats value[ACROSS];
        for (int i = 0; i < ACROSS; i++) value[i] = load(values[j] + d + i * LANES);
        for (int g = 0; g < G; g++)
            for (int i = 0; i < ACROSS; i++) own[g][i] += weights[g][j] * value[i];
    }
    for (int g = 0; g < G; g++)
        for (int i = 0; i < ACROSS; i++) store(sums + g * dim + d + i * LANES, own[g][i]);
}

template <int G, class N>
INLINE void values_of(
    const N *const *values, int64_t count, int64_t dim, const float (*weights)[PIECE], float *sums
) {
    constexpr int MOST = LANES == 16 ? 4 : 2;
    int64_t d = 0;
    for (; d + MOST * LANES <= dim; d += MOST * LANES)
        values_across<G, MOST>(values, count, dim, d, weights, sums);
    for (; d < dim; d += 2 * LANES) values_across<G, 2>(values, count, dim, d, weights, sums);
}

// Fill scores [count] up to whole vectors with those of unseen keys. Return the greatest.
INLINE float filled_up(float *scores, int64_t count) {
    const int64_t whole = (count + LANES - 1) / LANES * LANES;
    for (int64_t j = count; j < whole; j++) scores[j] = -INFINITY;
    Floats high = load(scores);
    for (int64_t j = LANES; j < whole; j += LANES) high = greater(load(scores + j), high);
    return greatest(high);
}

// Replace scores [count], whole vectors, by weights e^(score - peak). Return their sum.
INLINE float to_weights(float *scores, int64_t count, float peak) {
    Floats total = {};
    for (int64_t j = 0; j < count; j += LANES) {
        Floats score = load(scores + j);
        Floats weight = exponential(score - peak);
        weight = (Floats)(words(weight) & (Words)(score != splat(-INFINITY)));
        store(scores + j, weight);
        total += weight;
    }
    return sum(total);
}

template <int G, class N>
void decode_heads(const Attend<N> &a, const N *query, const N **keys, const N **values,
                  int64_t count, int64_t near, const Partial &to) {
    const int64_t dim = a.heads.dim;
    alignas(64) typename Dots<N>::Query q[G * MAX_DIM];
    for (int64_t d = 0; d < G * dim; d += LANES) store(q + d, load(query + d));
    alignas(64) float scores[G][PIECE];
    scores_of<G>(q, keys, values, count, dim, near, 1.0f / std::sqrt((float)dim), scores);
    for (int g = 0; g < G; g++) {
        to.peak[g] = filled_up(scores[g], count);
        to.total[g] = to_weights(scores[g], count, to.peak[g]);
    }
    values_of<G>(values, count, dim, scores, to.sums);
}

// Addresses of [count] keys and values of a row and head, from key `first` on.
template <class N>
INLINE void find(const Attend<N> &a, const Rows &rows, int64_t row, int64_t kv_head, int64_t first,
                 int64_t count, const N **keys, const N **values) {
    const int64_t apart = a.heads.kv_heads * a.heads.dim; // from token to token
    for (int64_t j = 0; j < count;) {
        const int64_t left = rows.block_tokens - (first + j) % rows.block_tokens;
        const int64_t end = j + (left < count - j ? left : count - j);
        int64_t at = place(rows, row, first + j) * apart + kv_head * a.heads.dim;
        for (; j < end; j++, at += apart) {
            keys[j] = a.k + at;
            values[j] = a.v + at;
        }
    }
}

template <class N>
void decode_piece(const Attend<N> &a, const Rows &rows, const Item &item, int64_t kv_head,
                  int64_t near, const Partial &to) {
    const Heads &h = a.heads;
    const int64_t group = h.heads / h.kv_heads, left = rows.context_lens[item.row] - item.first;
    const int64_t count = left < PIECE ? left : PIECE;
    const N *keys[PIECE], *values[PIECE];
    find(a, rows, item.row, kv_head, item.first, count, keys, values);
    const N *query = a.q + rows.row_starts[item.row] * a.q_stride + kv_head * group * h.dim;
    for (int64_t g = 0; g < group;) {
        const Partial part{to.peak + g, to.total + g, to.sums + g * h.dim};
        const int64_t some = group - g < TOGETHER ? group - g : TOGETHER;
        const N *q = query + g * h.dim;
        switch (some) {
        case 1: decode_heads<1>(a, q, keys, values, count, near, part); break;
        case 2: decode_heads<2>(a, q, keys, values, count, near, part); break;
        case 3: decode_heads<3>(a, q, keys, values, count, near, part); break;
        default: decode_heads<4>(a, q, keys, values, count, near, part);
        }
        g += some;
    }
}

// Combine the pieces of a query head, in the order of their keys.
template <class N>
INLINE void joined(const Partial *parts, int64_t count, int64_t head, int64_t dim, N *out) {
    float peak = parts[0].peak[head], total = 0;
    for (int64_t i = 1; i < count; i++)
        peak = parts[i].peak[head] > peak ? parts[i].peak[head] : peak;
    alignas(64) float sums[MAX_DIM] = {};
    for (int64_t i = 0; i < count; i++) {
        const float share = std::exp(parts[i].peak[head] - peak);
        total += share * parts[i].total[head];
        for (int64_t d = 0; d < dim; d += LANES)
            store(sums + d, load(sums + d) + share * load(parts[i].sums + head * dim + d));
    }
    for (int64_t d = 0; d < dim; d += LANES) store(out + d, load(sums + d) / total);
}

// The sums of pieces in `scratch`, with partial_floats each.
INLINE Partial partial_at(float *scratch, int64_t index, const Heads &h) {
    const int64_t group = h.heads / h.kv_heads;
    float *at = scratch + index * partial_floats(h);
    return {at + group * h.dim, at + group * h.dim + group, at};
}

template <class N>
void decode_item(const Attend<N> &a, const Rows &rows, const Item &item, int64_t kv_head,
                 int64_t near, float *partials) {
    const Heads &h = a.heads;
    const int64_t group = h.heads / h.kv_heads;
    if (item.partial >= 0) {
        const int64_t index = item.partial * h.kv_heads + kv_head;
        decode_piece(a, rows, item, kv_head, near, partial_at(partials, index, h));
        return;
    }
    alignas(64) float own[MAX_GROUP * (MAX_DIM + 2)];
    const Partial part = partial_at(own, 0, h);
    decode_piece(a, rows, item, kv_head, near, part);
    N *out = a.out + (rows.row_starts[item.row] * h.heads + kv_head * group) * h.dim;
    for (int64_t g = 0; g < group; g++) joined(&part, 1, g, h.dim, out + g * h.dim);
}

// Finish a row of several pieces after all are done; items[0, count) are its pieces.
template <class N>
void join_row(const Attend<N> &a, const Rows &rows, const Item *items, int64_t count,
              float *partials) {
    const Heads &h = a.heads;
    const int64_t group = h.heads / h.kv_heads;
    std::vector<Partial> parts((size_t)count);
    for (int64_t head = 0; head < h.heads; head++) {
        for (int64_t i = 0; i < count; i++)
            parts[i] = partial_at(partials, items[i].partial * h.kv_heads + head / group, h);
        N *out = a.out + (rows.row_starts[items[0].row] * h.heads + head) * h.dim;
        joined(parts.data(), count, head % group, h.dim, out);
    }
}

} // namespace
