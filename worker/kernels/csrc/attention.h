// Attention that reads keys and values in place, block by block, without copying them.
//
// A row of one token (decode) is cut into pieces of PIECE keys. For each piece and key/value head, the
// queries that share the head are multiplied by each key. If a row has several pieces, their results
// are combined at the end, in the order of the keys. So a row has the same bits alone and in any
// batch, for any number of threads.
// A row of several tokens (prefill) is cut into tiles of queries. For each tile, 64 keys at a time are
// transposed, and their scores are computed together (prefill.h).
//
// Only keys that a query sees are read, so data that other requests left in a block is never read.
//
// Legend: T tokens, R rows, M columns of the block table, H query heads, H_kv key/value heads,
// D head dim, G = H / H_kv.
#pragma once

#include <vector>

#include "elementwise.h"

namespace {

constexpr int PIECE = 256;         // keys of a decode item
constexpr int TILE_TOKENS = 64;    // tokens of a prefill item
constexpr int KEYS_AT_ONCE = 64;   // keys that a prefill item transposes together
constexpr int QUERIES_AT_ONCE = 4; // queries that are computed together
// With at least this many pieces, an item has several heads, and there are still items for all threads.
constexpr int MIN_PIECES = 16;
constexpr int64_t L2_BYTES = 1 << 18; // bytes of keys and values that the second-level cache holds
constexpr int MAX_GROUP = 32;

// The input of a step's attention: the fields of AttentionBatch (base.py).
struct Rows {
    const int64_t *row_starts, *context_lens, *block_table;
    int64_t num_rows, num_decodes, table_width, block_tokens;
};

// How a layer turns products of queries and keys into scores, and which keys its queries see.
struct Scoring {
    double scale;    // factor of the scores
    double soft_cap; // scores become soft_cap * tanh(score / soft_cap); 0: they stay as they are
    int64_t window;  // a query sees this many last keys, its own included; 0: all
    const float *sinks; // [H]: a score of each head that joins the softmax without a value; null: none

    // Returns the first key that the query at position `last` sees.
    INLINE int64_t first_key(int64_t last) const {
        return window && last >= window ? last + 1 - window : 0;
    }

    // Returns the sum of a head's weights e^(score - peak), including its sink, from the sum of its keys.
    INLINE float with_sink(int64_t head, float peak, float total) const {
        return sinks ? total + std::exp(sinks[head] - peak) : total;
    }
};

template <class N> struct Attend {
    const N *q;        // [T, ...], q_stride items from token to token
    N *out;            // [T, H, D]
    const N *k, *v;    // [B, block_tokens, H_kv, D]
    int64_t q_stride;
    Heads heads;
    Scoring scoring;
};

// Applies a soft cap to `count` scores, whole vectors.
INLINE void cap_scores(float *scores, int64_t count, float cap) {
    for (int64_t j = 0; j < count; j += LANES) {
        const Floats power = exponential(load(scores + j) * (2.0f / cap));
        // tanh(x) = (e^2x - 1) / (e^2x + 1); first the quotient, because the power may be near infinity
        store(scores + j, cap * ((power - 1.0f) / (power + 1.0f)));
    }
}

// A piece of a decode row, or a tile of a prefill row.
struct Item {
    int64_t row;
    int64_t first;   // first key of the row (decode), or first token of the step (prefill)
    int64_t partial; // index of the piece's Partial; -1 if the piece is the whole row, or for a tile
};

// The items of a step, which are the same for all layers.
//
// The heads of a token are adjacent in memory. So if there are enough pieces for all threads, one
// thread computes several heads of a piece one after the other. For the first head, it reads memory
// without gaps, which is twice as fast. The data of the other heads is then in the second-level cache.
struct Work {
    std::vector<Item> items; // first num_tiles tiles, which take longest, then the decode pieces
    int64_t num_tiles = 0, num_partials = 0;

    // Returns how many heads of a piece one thread computes, for numbers of `bytes` bytes.
    int64_t heads_per_item(const Heads &h, int64_t bytes) const {
        const int64_t fitting = L2_BYTES / (2 * PIECE * h.dim * bytes);
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

// Returns the position of a row's key in the cache, counted in tokens.
INLINE int64_t cache_index(const Rows &rows, int64_t row, int64_t key) {
    const int64_t block = rows.block_table[row * rows.table_width + key / rows.block_tokens];
    return block * rows.block_tokens + key % rows.block_tokens;
}

// ---- decode

// The result of a piece for the query heads that share a key/value head.
struct Partial {
    float *peak;  // [G]: the greatest score
    float *total; // [G]: the sum of the weights e^(score - peak)
    float *sums;  // [G, D]: the sum of the weighted values
};

// Returns the number of floats in a Partial.
INLINE int64_t partial_floats(const Heads &h) { return h.heads / h.kv_heads * (h.dim + 2); }

// The form of queries for their multiplication by keys, and one step of the multiplication. Pairs of
// bfloat16 are multiplied directly, with sums in float, if the hardware supports this. Otherwise
// queries and keys are converted to float.
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

// Prefetches `size` numbers. The same head of the next token is far away in memory, so the processor
// does not prefetch it by itself.
template <class N> INLINE void prefetch(const N *row, int64_t size) {
    for (int64_t byte = 0; byte < size * (int64_t)sizeof(N); byte += 64)
        __builtin_prefetch((const char *)row + byte);
}

constexpr int KEYS_AHEAD = 12; // a key is prefetched this many keys before it is read

// Writes the scaled scores [G][PIECE] of q [G, D] and `count` keys. The dot products of LANES keys are
// summed together, so up to LANES - 1 scores after `count` are overwritten.
//
// prefetch_size: numbers to prefetch of each key and value, from this head on. More than D numbers also
// prefetch the heads that follow.
template <int G, class N>
INLINE void scores_of(const typename Dots<N>::Query *q, const N *const *keys,
                      const N *const *values, int64_t count, int64_t dim, int64_t prefetch_size,
                      float scale, float (*scores)[PIECE]) {
    for (int64_t j = 0; j < count && j < KEYS_AHEAD; j++) prefetch(keys[j], prefetch_size);
    for (int64_t j = 0; j < count; j += LANES) {
        Floats dots[G][LANES];
        const int some = count - j < LANES ? (int)(count - j) : LANES;
        for (int i = some; i < LANES; i++)
            for (int g = 0; g < G; g++) dots[g][i] = Floats{};
        for (int i = 0; i < some; i++) {
            if (j + i + KEYS_AHEAD < count) prefetch(keys[j + i + KEYS_AHEAD], prefetch_size);
            prefetch(values[j + i], prefetch_size);
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

// Writes ACROSS vectors of sums [G, D], from dimension `d` on: weights [G][PIECE] times values. The sums
// stay in registers, so each weight is read once for all of them.
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

// Writes sums [G, D]: weights [G][PIECE] times values.
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

// Pads scores [count] to whole vectors with -inf, the score of a hidden key. Returns the greatest.
INLINE float pad_scores(float *scores, int64_t count) {
    const int64_t whole = (count + LANES - 1) / LANES * LANES;
    for (int64_t j = count; j < whole; j++) scores[j] = -INFINITY;
    Floats high = load(scores);
    for (int64_t j = LANES; j < whole; j += LANES) high = max_of(load(scores + j), high);
    return max_in(high);
}

// Replaces scores [count], padded to whole vectors, by weights e^(score - peak). Returns their sum.
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

// Computes the Partial of G query heads and `count` keys.
template <int G, class N>
void decode_heads(const Attend<N> &a, const N *query, const N **keys, const N **values,
                  int64_t count, int64_t prefetch_size, const Partial &to) {
    const int64_t dim = a.heads.dim;
    alignas(64) typename Dots<N>::Query q[G * MAX_DIM];
    for (int64_t d = 0; d < G * dim; d += LANES) store(q + d, load(query + d));
    alignas(64) float scores[G][PIECE];
    scores_of<G>(q, keys, values, count, dim, prefetch_size, (float)a.scoring.scale, scores);
    if (a.scoring.soft_cap != 0)
        for (int g = 0; g < G; g++)
            cap_scores(scores[g], (count + LANES - 1) / LANES * LANES, (float)a.scoring.soft_cap);
    for (int g = 0; g < G; g++) {
        to.peak[g] = pad_scores(scores[g], count);
        to.total[g] = to_weights(scores[g], count, to.peak[g]);
    }
    values_of<G>(values, count, dim, scores, to.sums);
}

// Writes the addresses of `count` keys and values of a row and head, from key `first` on.
template <class N>
INLINE void find_keys(const Attend<N> &a, const Rows &rows, int64_t row, int64_t kv_head, int64_t first,
                 int64_t count, const N **keys, const N **values) {
    const int64_t apart = a.heads.kv_heads * a.heads.dim; // from token to token
    for (int64_t j = 0; j < count;) {
        const int64_t left = rows.block_tokens - (first + j) % rows.block_tokens;
        const int64_t end = j + (left < count - j ? left : count - j);
        int64_t at = cache_index(rows, row, first + j) * apart + kv_head * a.heads.dim;
        for (; j < end; j++, at += apart) {
            keys[j] = a.k + at;
            values[j] = a.v + at;
        }
    }
}

// Computes the Partial of a piece and all query heads that share a key/value head.
template <class N>
void decode_piece(const Attend<N> &a, const Rows &rows, const Item &item, int64_t kv_head,
                  int64_t prefetch_size, const Partial &to) {
    const Heads &h = a.heads;
    const int64_t group = h.heads / h.kv_heads, context = rows.context_lens[item.row];
    const int64_t end = item.first + PIECE < context ? item.first + PIECE : context;
    const int64_t visible = a.scoring.first_key(context - 1);
    const int64_t first = item.first > visible ? item.first : visible, count = end - first;
    if (count <= 0) { // the window starts after this piece
        for (int64_t g = 0; g < group; g++) to.peak[g] = -INFINITY, to.total[g] = 0;
        memset(to.sums, 0, (size_t)(group * h.dim) * sizeof(float));
        return;
    }
    const N *keys[PIECE], *values[PIECE];
    find_keys(a, rows, item.row, kv_head, first, count, keys, values);
    const N *query = a.q + rows.row_starts[item.row] * a.q_stride + kv_head * group * h.dim;
    for (int64_t g = 0; g < group;) {
        const Partial part{to.peak + g, to.total + g, to.sums + g * h.dim};
        const int64_t some = group - g < QUERIES_AT_ONCE ? group - g : QUERIES_AT_ONCE;
        const N *q = query + g * h.dim;
        switch (some) {
        case 1: decode_heads<1>(a, q, keys, values, count, prefetch_size, part); break;
        case 2: decode_heads<2>(a, q, keys, values, count, prefetch_size, part); break;
        case 3: decode_heads<3>(a, q, keys, values, count, prefetch_size, part); break;
        default: decode_heads<4>(a, q, keys, values, count, prefetch_size, part);
        }
        g += some;
    }
}

// Writes the output [D] of query head `head`, which is number `g` of those that share a key/value head:
// combines its pieces in the order of their keys.
template <class N>
INLINE void combine(const Attend<N> &a, const Partial *parts, int64_t count, int64_t head, N *out) {
    const int64_t dim = a.heads.dim, g = head % (a.heads.heads / a.heads.kv_heads);
    float peak = parts[0].peak[g], total = 0;
    for (int64_t i = 1; i < count; i++)
        peak = parts[i].peak[g] > peak ? parts[i].peak[g] : peak;
    alignas(64) float sums[MAX_DIM] = {};
    for (int64_t i = 0; i < count; i++) {
        const float share = std::exp(parts[i].peak[g] - peak);
        total += share * parts[i].total[g];
        for (int64_t d = 0; d < dim; d += LANES)
            store(sums + d, load(sums + d) + share * load(parts[i].sums + g * dim + d));
    }
    total = a.scoring.with_sink(head, peak, total);
    for (int64_t d = 0; d < dim; d += LANES) store(out + d, load(sums + d) / total);
}

// Returns Partial number `index` in `scratch`.
INLINE Partial partial_at(float *scratch, int64_t index, const Heads &h) {
    const int64_t group = h.heads / h.kv_heads;
    float *at = scratch + index * partial_floats(h);
    return {at + group * h.dim, at + group * h.dim + group, at};
}

// Computes one piece for one key/value head. A piece that is the whole row is finished at once.
template <class N>
void decode_item(const Attend<N> &a, const Rows &rows, const Item &item, int64_t kv_head,
                 int64_t prefetch_size, float *partials) {
    const Heads &h = a.heads;
    const int64_t group = h.heads / h.kv_heads;
    if (item.partial >= 0) {
        const int64_t index = item.partial * h.kv_heads + kv_head;
        decode_piece(a, rows, item, kv_head, prefetch_size, partial_at(partials, index, h));
        return;
    }
    alignas(64) float own[MAX_GROUP * (MAX_DIM + 2)];
    const Partial part = partial_at(own, 0, h);
    decode_piece(a, rows, item, kv_head, prefetch_size, part);
    N *out = a.out + rows.row_starts[item.row] * h.heads * h.dim;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++)
        combine(a, &part, 1, head, out + head * h.dim);
}

// Finishes a row of several pieces, items[0, count), after all of them are computed.
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
        combine(a, parts.data(), count, head, out);
    }
}

} // namespace
