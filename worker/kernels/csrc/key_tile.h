// The arithmetic of attention, which is the same for decode and prefill: up to QUERIES_AT_ONCE queries
// against a tile of TILE_KEYS keys.
//
// The order of every sum depends only on the positions of the query and its keys:
// - A tile starts at a multiple of TILE_KEYS, and a piece (attention.h) at a multiple of PIECE.
// - A score is the sum of SUMS sums, each over every SUMS-th dimension (sums.h). A decode row computes these as
//   vectors for each key. A prefill row has many queries for the same keys, so keys are transposed: the scores
//   of neighbouring keys form a vector, and the SUMS sums are computed one by one and added in the same order.
// - As in flash attention, the sums of a query are relative to its greatest score so far, and are rescaled if
//   a later tile of the piece has a greater one. The pieces of a row are added in the same way.
//
// So a query's output has the same bits whether it is computed as a row of one token or in a chunk.
//
// Rounded keys and values (stored_kv.h) are multiplied as integers in number type N. The scores are then
// multiplied by the scales of the keys, and the weights by the scales of the values.
#pragma once

#include <type_traits>
#include <utility>

#include "elementwise.h"
#include "functions.h"
#include "multiply.h"

namespace {

constexpr int TILE_KEYS = 64;
constexpr int QUERIES_AT_ONCE = 4;

// How queries and keys of number type N are multiplied: WIDTH numbers of a key that is read in place, or
// By::COLUMNS numbers of each key of a vector of transposed ones. Pairs of bfloat16 are multiplied directly,
// with sums in float, if the hardware supports this. Otherwise they are converted to float. Keys that are
// read in place may be rounded.
template <class N> struct Dots {
    typedef ByFloats By;
    typedef float Query;
    static constexpr int WIDTH = SUMS;
    template <class S> static INLINE Sixteen key(const S *from) {
        Sixteen key;
        for (int p = 0; p < SPLIT; p++) key.of[p] = load(from + p * LANES);
        return key;
    }
    static INLINE void add(Sixteen &sums, const float *q, const Sixteen &key) {
        for (int p = 0; p < SPLIT; p++) sums.of[p] = fused(load(q + p * LANES), key.of[p], sums.of[p]);
    }
};
#if defined(__AVX512BF16__)
template <> struct Dots<bf16> {
    typedef ByPairs By;
    typedef bf16 Query;
    static constexpr int WIDTH = 2 * LANES;
    static INLINE __m512i key(const bf16 *from) { return load_as<__m512i>(from); }
    static INLINE __m512i key(const Rounded *from) {
        return (__m512i)_mm512_cvtne2ps_pbh((__m512)load(from + LANES), (__m512)load(from));
    }
    static INLINE void add(Sixteen &sums, const bf16 *q, __m512i key) {
        sums.of[0] = (Floats)_mm512_dpbf16_ps((__m512)sums.of[0], (__m512bh)load_as<__m512i>(q), (__m512bh)key);
    }
};
#endif

// ---- Transposing keys.

// Returns the lanes I of a and b, where b's lanes follow a's.
template <size_t... I> INLINE Words lanes_of(Words a, Words b) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, (int)I...);
#else
    return __builtin_shuffle(a, b, Words{(uint32_t)I...});
#endif
}

// Returns a's lanes whose index has bit H clear, in their places, and b's in the H lanes above them.
template <size_t H, size_t... I> INLINE Words low_of(Words a, Words b, std::index_sequence<I...>) {
    return lanes_of<(I & H ? LANES + I - H : I)...>(a, b);
}

// Returns b's lanes whose index has bit H set, in their places, and a's in the H lanes below them.
template <size_t H, size_t... I> INLINE Words high_of(Words a, Words b, std::index_sequence<I...>) {
    return lanes_of<(I & H ? LANES + I : I + H)...>(a, b);
}

// Transposes LANES vectors of LANES words, by exchanging halves, then quarters, and so on.
template <int H = LANES / 2> INLINE void transpose(Words (&rows)[LANES]) {
    constexpr auto LANE = std::make_index_sequence<LANES>{};
    for (int i = 0; i < LANES; i++) {
        if (i & H) continue;
        const Words a = rows[i], b = rows[i | H];
        rows[i] = low_of<H>(a, b, LANE);
        rows[i | H] = high_of<H>(a, b, LANE);
    }
    if constexpr (H > 1) transpose<H / 2>(rows);
}

// Writes LANES keys' words number `word`, of one pair of bfloat16 or one float each, to the transposed
// keys `to` [columns][TILE_KEYS].
INLINE void put_word(const float *, Words words, int64_t word, uint32_t *to) {
    store_as(to + word * TILE_KEYS, words);
}
INLINE void put_word(const bf16 *, Words words, int64_t word, uint32_t *to) {
    if (HAS_PAIRS) return store_as(to + word * TILE_KEYS, words);
    store_as(to + 2 * word * TILE_KEYS, words << 16);
    store_as(to + (2 * word + 1) * TILE_KEYS, words & 0xffff0000);
}

// Transposes the keys [first, count), `dim` numbers each, to `to` [columns][TILE_KEYS], and the keys that
// precede them in their vector, or follow, as zeros.
template <class N>
INLINE void transpose_keys(const N *const *keys, int64_t first, int64_t count, int64_t dim, uint32_t *to) {
    const int64_t words = dim * (int64_t)sizeof(N) / 4;
    for (int64_t j = first / LANES * LANES; j < count; j += LANES)
        for (int64_t w = 0; w < words; w += LANES) {
            Words rows[LANES];
            for (int i = 0; i < LANES; i++) {
                const bool is_read = j + i >= first && j + i < count;
                rows[i] = is_read ? load_as<Words>((const uint32_t *)keys[j + i] + w) : Words{};
            }
            transpose(rows);
            for (int i = 0; i < LANES; i++) put_word((const N *)nullptr, rows[i], w + i, to + j);
        }
}

// ---- Scores.

constexpr int KEYS_AHEAD = 48; // a key is prefetched this many keys before it is read

// Prefetches `size` items. The same head of the next token is far away in memory, so the processor
// does not prefetch it by itself.
template <class S> INLINE void prefetch(const S *row, int64_t size) {
    for (int64_t byte = 0; byte < size * (int64_t)sizeof(S); byte += 64)
        __builtin_prefetch((const char *)row + byte, 0, 2);
}

// Writes the scales of rounded keys or values [first, count) of a tile. Does nothing for other heads.
template <class S>
INLINE void load_scales(const S *const *heads, int64_t first, int64_t count, int64_t dim, float *scales) {
    if constexpr (IS_ROUNDED<S>)
        for (int64_t j = first; j < count; j++) scales[j] = scale_of(heads[j], dim);
}

// Multiplies scores [from, to), whole vectors, by the scales of rounded keys. Does nothing for other keys. The
// products of keys that are not seen are not read.
template <class S> INLINE void scale_scores(float *scores, int64_t from, int64_t to, const float *scales) {
    if constexpr (IS_ROUNDED<S>)
        for (int64_t j = from; j < to; j += LANES) store(scores + j, load(scores + j) * load(scales + j));
}

// The same for weights and the scales of rounded values. Weights of 0 stay 0: the scale of a key that is not seen
// may be left from another row, and not be finite.
template <class S> INLINE void scale_weights(float *weights, int64_t from, int64_t to, const float *scales) {
    if constexpr (IS_ROUNDED<S>)
        for (int64_t j = from; j < to; j += LANES) {
            const Floats weight = load(weights + j), product = weight * load(scales + j);
            store(weights + j, (Floats)(words(product) & (Words)(weight != Floats{})));
        }
}

// Writes the scores [Q][TILE_KEYS] of q [Q, D] and the keys [first, count) of a tile, without the keys' scales.
// The keys are read where they are, and the products of LANES keys are summed together. So scores before
// `first` and after `count` in the same vectors are overwritten.
//
// ahead: keys from which on there is nothing to prefetch. prefetch_size: items to prefetch of each key and
// value.
template <int Q, class N, class S>
INLINE void scores_in_place(const typename Dots<N>::Query *q, const S *const *keys, const S *const *values,
                            int64_t first, int64_t count, int64_t ahead, int64_t dim,
                            int64_t prefetch_size, float scale, float *scores) {
    for (int64_t j = first / LANES * LANES; j < count; j += LANES) {
        Sixteen dots[Q][LANES];
        for (int i = 0; i < LANES; i++) {
            Sixteen sums[Q] = {};
            if (j + i >= first && j + i < count) {
                if (j + i + KEYS_AHEAD < ahead) prefetch(keys[j + i + KEYS_AHEAD], prefetch_size);
                prefetch(values[j + i], prefetch_size);
                for (int64_t d = 0; d < dim; d += Dots<N>::WIDTH) {
                    const auto key = Dots<N>::key(keys[j + i] + d);
                    for (int m = 0; m < Q; m++) Dots<N>::add(sums[m], q + m * dim + d, key);
                }
            }
            for (int m = 0; m < Q; m++) dots[m][i] = sums[m];
        }
        for (int m = 0; m < Q; m++) store(scores + m * TILE_KEYS + j, sums_of(dots[m]) * scale);
    }
}

// Computes the sums of products [Q, ACROSS vectors] of q [Q, D] and transposed keys from `keys` on, over those
// lanes that equal LANE in the first LEVEL of SUM_BITS: in the order in which `scores_in_place` adds them.
template <int Q, int ACROSS, class N, int LEVEL = 0, int LANE = 0>
INLINE void sum_lanes(const typename Dots<N>::Query *q, const uint32_t *keys, int64_t dim,
                      Floats (&sums)[Q][ACROSS]) {
    using By = typename Dots<N>::By;
    if constexpr (LEVEL < NUM_SUM_BITS) {
        sum_lanes<Q, ACROSS, N, LEVEL + 1, LANE>(q, keys, dim, sums);
        Floats others[Q][ACROSS];
        sum_lanes<Q, ACROSS, N, LEVEL + 1, (LANE | SUM_BITS[LEVEL])>(q, keys, dim, others);
        for (int m = 0; m < Q; m++)
            for (int i = 0; i < ACROSS; i++) sums[m][i] += others[m][i];
    } else {
        for (int m = 0; m < Q; m++)
            for (int i = 0; i < ACROSS; i++) sums[m][i] = Floats{};
        for (int64_t w = LANE; w < dim / By::COLUMNS; w += SUMS) {
            typename By::Vector key[ACROSS];
            for (int i = 0; i < ACROSS; i++)
                key[i] = load_as<typename By::Vector>(keys + w * TILE_KEYS + i * LANES);
            for (int m = 0; m < Q; m++)
                for (int i = 0; i < ACROSS; i++)
                    sums[m][i] = By::multiply(sums[m][i], q + m * dim + w * By::COLUMNS, key[i]);
        }
    }
}

// Writes the scores [Q][TILE_KEYS] of q [Q, D] and the transposed keys [from, to), whole vectors, without the
// keys' scales. They have the bits of `scores_in_place`.
template <int Q, class N>
__attribute__((noinline)) void scores_of_transposed(const typename Dots<N>::Query *q, const uint32_t *keys,
                                                    int64_t dim, int64_t from, int64_t to, float scale,
                                                    float *scores) {
    auto some = [&](int64_t j, auto across) __attribute__((always_inline)) {
        constexpr int ACROSS = decltype(across)::value;
        Floats sums[Q][ACROSS];
        sum_lanes<Q, ACROSS, N>(q, keys + j, dim, sums);
        for (int m = 0; m < Q; m++)
            for (int i = 0; i < ACROSS; i++) store(scores + m * TILE_KEYS + j + i * LANES, sums[m][i] * scale);
    };
    int64_t j = from;
    for (; j + 2 * LANES <= to; j += 2 * LANES) some(j, std::integral_constant<int, 2>{});
    for (; j < to; j += LANES) some(j, std::integral_constant<int, 1>{});
}

// ---- Softmax.

// What a query has of some of its keys.
struct Sums {
    float *peak;   // the greatest score; -inf: no key yet
    float *total;  // the sum of the weights e^(score - peak)
    float *values; // [D]: the sum of the weighted values
};

// Applies a soft cap to `count` scores, whole vectors.
INLINE void cap_scores(float *scores, int64_t count, float cap) {
    for (int64_t j = 0; j < count; j += LANES) {
        const Floats power = exponential(load(scores + j) * (2.0f / cap));
        // tanh(x) = (e^2x - 1) / (e^2x + 1); first the quotient, because the power may be near infinity
        store(scores + j, cap * ((power - 1.0f) / (power + 1.0f)));
    }
}

// Multiplies the sums by e^(peak - higher), and makes `higher` the peak.
inline __attribute__((noinline)) void rescale(const Sums &sums, float higher, int64_t dim) {
    const float share = exponential(*sums.peak - higher);
    *sums.total *= share;
    *sums.peak = higher;
    for (int64_t d = 0; d < dim; d += LANES) store(sums.values + d, load(sums.values + d) * share);
}

// Replaces the scores of one query by weights e^(score - peak), and adds the weights to its total. If a score
// is higher than its peak, its sums are rescaled first. The query sees the keys [first, count). The scores of
// other keys from `from` to `to`, and those in the same SUMS scores, become weights of 0.
inline __attribute__((noinline)) void add_weights(
    float *scores, int64_t from, int64_t to, int64_t first, int64_t count, const Sums &sums, int64_t dim
) {
    from = from / SUMS * SUMS, to = in_sixteens(to);
    for (int64_t j = from; j < first; j++) scores[j] = -INFINITY;
    for (int64_t j = count; j < to; j++) scores[j] = -INFINITY;
    Floats high = load(scores + from);
    for (int64_t j = from + LANES; j < to; j += LANES) high = max_of(load(scores + j), high);
    const float here = max_in(high);
    if (here > *sums.peak) rescale(sums, here, dim);
    const float peak = *sums.peak;
    Sixteen total = {};
    for (int64_t j = from; j < to; j += SUMS)
        for (int p = 0; p < SPLIT; p++) {
            const Floats score = load(scores + j + p * LANES);
            Floats weight = exponential(score - peak);
            weight = (Floats)(words(weight) & (Words)(score != splat(-INFINITY)));
            store(scores + j + p * LANES, weight);
            total.of[p] += weight;
        }
    *sums.total += sum(total);
}

// Adds the sums of later keys to those of earlier ones. Total 0 means that there are no keys.
inline __attribute__((noinline)) void add_sums(const Sums &sums, const Sums &later, int64_t dim) {
    if (*later.total == 0) return;
    if (*sums.total == 0) {
        *sums.peak = *later.peak, *sums.total = *later.total;
        memcpy(sums.values, later.values, (size_t)dim * sizeof(float));
        return;
    }
    if (*later.peak > *sums.peak) rescale(sums, *later.peak, dim);
    const float share = exponential(*later.peak - *sums.peak);
    *sums.total = fused(*later.total, share, *sums.total);
    for (int64_t d = 0; d < dim; d += LANES)
        store(sums.values + d, fused(load(later.values + d), splat(share), load(sums.values + d)));
}

// ---- Values.

// Vectors that are computed together for Q queries; their sums fit into the registers.
template <int Q> constexpr int across() { return LANES == 16 ? 4 : Q == 1 ? 8 : Q == 2 ? 4 : 2; }

// Adds the values [first, count), from dimension d on, times their weights [Q][TILE_KEYS] to ACROSS vectors
// of the sums [Q, D].
template <int Q, int ACROSS, class V>
INLINE void values_across(const float *weights, const V *const *values, int64_t first, int64_t count,
                          int64_t dim, int64_t d, float *sums) {
    Floats own[Q][ACROSS];
    for (int m = 0; m < Q; m++)
        for (int i = 0; i < ACROSS; i++) own[m][i] = load(sums + m * dim + d + i * LANES);
    for (int64_t j = first; j < count; j++) {
        Floats value[ACROSS];
        for (int i = 0; i < ACROSS; i++) value[i] = load(values[j] + d + i * LANES);
        for (int m = 0; m < Q; m++)
            for (int i = 0; i < ACROSS; i++) own[m][i] = fused(splat(weights[m * TILE_KEYS + j]), value[i], own[m][i]);
    }
    for (int m = 0; m < Q; m++)
        for (int i = 0; i < ACROSS; i++) store(sums + m * dim + d + i * LANES, own[m][i]);
}

#if defined(__AVX512BF16__)
// The same for 2 * PAIRS vectors. The values of keys 2 i and 2 i + 1 are multiplied as a pair of bfloat16, by weights
// that are rounded to bfloat16. If only one key of a pair is in [first, count), its value is used twice, and the
// other weight is 0.
template <int Q, int PAIRS, class V>
INLINE void value_pairs_across(const uint32_t *weights, const V *const *values, int64_t first, int64_t count,
                               int64_t dim, int64_t d, float *sums) {
    // `unpacklo` and `unpackhi` work on lanes of eight numbers: half 0 has the first four dimensions of every eight,
    // half 1 the last four.
    const __m512i whole[2] = {_mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23),
                              _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31)};
    const __m512i halves[2] = {_mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
                               _mm512_setr_epi32(4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)};
    __m512 own[Q][PAIRS][2];
    for (int m = 0; m < Q; m++)
        for (int i = 0; i < PAIRS; i++) {
            float *at = sums + m * dim + d + i * 2 * LANES;
            const __m512 a = _mm512_loadu_ps(at), b = _mm512_loadu_ps(at + LANES);
            for (int h = 0; h < 2; h++) own[m][i][h] = _mm512_permutex2var_ps(a, halves[h], b);
        }
    for (int64_t j = first / 2 * 2; j < count; j += 2) {
        const V *even = values[j < first ? j + 1 : j], *odd = values[j + 1 < count ? j + 1 : j];
        __m512bh value[PAIRS][2];
        for (int i = 0; i < PAIRS; i++) {
            const __m512i a = Dots<bf16>::key(even + d + i * 2 * LANES), b = Dots<bf16>::key(odd + d + i * 2 * LANES);
            value[i][0] = (__m512bh)_mm512_unpacklo_epi16(a, b);
            value[i][1] = (__m512bh)_mm512_unpackhi_epi16(a, b);
        }
        for (int m = 0; m < Q; m++) {
            const __m512bh weight = (__m512bh)_mm512_set1_epi32((int)weights[(m * TILE_KEYS + j) / 2]);
            for (int i = 0; i < PAIRS; i++)
                for (int h = 0; h < 2; h++) own[m][i][h] = _mm512_dpbf16_ps(own[m][i][h], value[i][h], weight);
        }
    }
    for (int m = 0; m < Q; m++)
        for (int i = 0; i < PAIRS; i++)
            for (int h = 0; h < 2; h++)
                _mm512_storeu_ps(sums + m * dim + d + (2 * i + h) * LANES,
                                 _mm512_permutex2var_ps(own[m][i][0], whole[h], own[m][i][1]));
}

template <int Q, class V>
INLINE void add_value_pairs(const float *weights, const V *const *values, int64_t first, int64_t count,
                            int64_t dim, float *sums) {
    alignas(64) bf16 rounded[Q * TILE_KEYS];
    for (int m = 0; m < Q; m++)
        for (int64_t j = first / LANES * LANES; j < count; j += LANES)
            store(rounded + m * TILE_KEYS + j, load(weights + m * TILE_KEYS + j));
    const uint32_t *pairs = (const uint32_t *)rounded;
    int64_t d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES)
        value_pairs_across<Q, 2>(pairs, values, first, count, dim, d, sums);
    for (; d < dim; d += 2 * LANES) value_pairs_across<Q, 1>(pairs, values, first, count, dim, d, sums);
}
#endif

// Adds the values [first, count) times their weights [Q][TILE_KEYS] to the sums [Q, D]. The weights of other keys
// in the same vectors are 0. N: the number type of the queries.
template <int Q, class N, class V>
INLINE void add_values(const float *weights, const V *const *values, int64_t first, int64_t count,
                       int64_t dim, float *sums) {
#if defined(__AVX512BF16__)
    if constexpr (Dots<N>::By::COLUMNS == 2) return add_value_pairs<Q>(weights, values, first, count, dim, sums);
#endif
    constexpr int MOST = across<Q>();
    int64_t d = 0;
    for (; d + MOST * LANES <= dim; d += MOST * LANES)
        values_across<Q, MOST>(weights, values, first, count, dim, d, sums);
    for (; d < dim; d += 2 * LANES) values_across<Q, 2>(weights, values, first, count, dim, d, sums);
}

} // namespace
