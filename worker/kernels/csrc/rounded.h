// Rounds rows of x to eight bits: the GROUP numbers of a group become integers from -127 to 127, which share
// a scale. llama.cpp rounds in the same way (its type Q8_1).
//
// Few numbers of a row are much larger than the others, and the error of a group grows with its largest number.
// So the groups with the greatest scales, 1 in REFINED_OF of a row's groups (rounded up), are refined: their
// rounding errors are rounded to eight bits as well. That removes half of the error, or more.
//
// The rounding of a row depends only on that row, so a row has the same integers alone and in any batch.
//
// The integers are stored as bytes in QUAD_ORDER (packed.h), as weights are.
#pragma once

#include <algorithm>
#include <vector>

#include "rounding.h"
#include "unpack.h"

namespace {

constexpr int64_t REFINED_OF = 12;

// Rounded groups, one after the other.
struct RoundedGroups {
    const uint8_t *bytes;              // [groups][GROUP]
    const float *scales;               // [groups]
    const int32_t *totals[MAX_BLOCKS]; // [b - 1]: the sums of integers, b for each group
    const float *sums[MAX_BLOCKS];     // the same, times the scale

    // Returns the groups from group g on.
    INLINE RoundedGroups from_group(int64_t g) const {
        return {bytes + g * GROUP, scales + g, {totals[0] + g, totals[1] + 2 * g}, {sums[0] + g, sums[1] + 2 * g}};
    }
};

// Memory of rounded groups.
struct RoundedMemory {
    std::vector<uint8_t> bytes;
    std::vector<float> scales, sums[MAX_BLOCKS];
    std::vector<int32_t> totals[MAX_BLOCKS];

    // Makes room for some groups. Memory that is there is kept.
    void fit(size_t groups) {
        if (groups <= scales.size()) return;
        bytes.resize(groups * GROUP);
        scales.resize(groups);
        for (size_t b = 0; b < MAX_BLOCKS; b++) {
            totals[b].resize(groups * (b + 1));
            sums[b].resize(groups * (b + 1));
        }
    }
    RoundedGroups groups() const {
        return {bytes.data(), scales.data(), {totals[0].data(), totals[1].data()}, {sums[0].data(), sums[1].data()}};
    }
};

// Returns how many groups of a row are refined.
INLINE int64_t num_refined(int64_t groups) { return (groups + REFINED_OF - 1) / REFINED_OF; }

// Rounded rows, and the remainders of their refined groups.
struct RoundedRows {
    RoundedMemory whole;          // [rows][groups]
    RoundedMemory remainders;     // [rows][refined]
    std::vector<int32_t> refined; // [rows][refined]: the groups that the remainders belong to, ascending

    // Makes room for rows of `inputs` numbers. Memory that is there is kept.
    void fit(int64_t rows, int64_t inputs) {
        const int64_t groups = inputs / GROUP, count = rows * num_refined(groups);
        whole.fit((size_t)(rows * groups));
        remainders.fit((size_t)count);
        if ((size_t)count > refined.size()) refined.resize((size_t)count);
    }
};

// ---- round_to_bytes writes x [GROUP], times `inverse` and rounded, as bytes in QUAD_ORDER, and the sum of each half
// to `totals`.

#if defined(__AVX512BW__) && defined(__AVX512VL__)
INLINE void store_integers(uint8_t *bytes, Words low, Words high, int32_t (&totals)[MAX_BLOCKS]) {
    const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15));
    const __m128i halves[2] = {_mm512_cvtepi32_epi8((__m512i)low), _mm512_cvtepi32_epi8((__m512i)high)};
    const __m256i all = _mm256_inserti128_si256(_mm256_castsi128_si256(halves[0]), halves[1], 1);
    _mm256_storeu_si256((__m256i *)bytes, _mm256_shuffle_epi8(all, order));
    // Sums of 8 bytes without their sign, which adds 128 to each.
    const __m256i sums = _mm256_sad_epu8(_mm256_xor_si256(all, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
    const __m256i both = _mm256_add_epi64(sums, _mm256_unpackhi_epi64(sums, sums));
    totals[0] = _mm256_extract_epi32(both, 0) - 128 * GROUP / 2;
    totals[1] = _mm256_extract_epi32(both, 4) - 128 * GROUP / 2;
}
template <class X> INLINE void round_to_bytes(const X *x, float inverse, uint8_t *bytes, int32_t (&totals)[MAX_BLOCKS]) {
    store_integers(bytes, rounded_bits(load(x), inverse), rounded_bits(load(x + LANES), inverse), totals);
}
#else
template <class X> INLINE void round_to_bytes(const X *x, float inverse, uint8_t *bytes, int32_t (&totals)[MAX_BLOCKS]) {
    constexpr int HALF = GROUP / MAX_BLOCKS;
    for (int b = 0; b < MAX_BLOCKS; b++) {
        alignas(64) uint32_t bits[HALF];
        Ints total = {};
        for (int i = 0; i < HALF; i += LANES) {
            const Words each = rounded_bits(load(x + b * HALF + i), inverse);
            store_as(bits + i, each);
            total += integers_in(each);
        }
        for (int i = 0; i < HALF; i += 8) store_quads(bytes + b * HALF + i, bits + i);
        totals[b] = sum(total);
    }
}
#endif

// Rounds x [GROUP], of which `largest` is the largest magnitude, as group g of `to`.
template <class X> INLINE void round_group(const X *x, float largest, size_t g, RoundedMemory &to) {
    const float inverse = MOST_ROUNDED / largest, scale = largest / MOST_ROUNDED;
    int32_t totals[MAX_BLOCKS];
    round_to_bytes(x, inverse, to.bytes.data() + g * GROUP, totals);
    to.scales[g] = scale;
    for (size_t b = 0; b < MAX_BLOCKS; b++) {
        to.totals[1][g * MAX_BLOCKS + b] = totals[b];
        to.sums[1][g * MAX_BLOCKS + b] = (float)totals[b] * scale;
    }
    to.totals[0][g] = totals[0] + totals[1];
    to.sums[0][g] = (float)(totals[0] + totals[1]) * scale;
}

// Writes what rounding removed from the numbers of a group to `to` [GROUP].
template <class X> INLINE void remainder_of(const X *x, float largest, float scale, float *to) {
    const float inverse = MOST_ROUNDED / largest; // as in round_group
    for (int i = 0; i < GROUP; i += LANES) {
        const Floats value = load(x + i);
        const Ints integers = integers_in(rounded_bits(value, inverse));
        store(to + i, fused(__builtin_convertvector(integers, Floats), splat(-scale), value));
    }
}

// Writes the `count` groups with the greatest scales to `chosen`, ascending. Of equal ones, the first are chosen.
INLINE void greatest_scales(const float *scales, int64_t groups, int64_t count, int32_t *chosen) {
    static thread_local std::vector<int32_t> order;
    order.resize((size_t)groups);
    memcpy(order.data(), scales, (size_t)groups * sizeof(float)); // bits order positive floats, NaN last
    if (count == 1) {
        *chosen = (int32_t)(std::max_element(order.begin(), order.end()) - order.begin());
        return;
    }
    const auto least = order.begin() + (groups - count);
    std::nth_element(order.begin(), least, order.end());
    const int32_t bound = *least;
    int64_t equal = count, found = 0; // how many groups with scale `bound` are chosen
    for (auto at = least; at < order.end(); at++) equal -= *at > bound;
    for (int64_t g = 0; g < groups; g++) {
        int32_t bits;
        memcpy(&bits, scales + g, sizeof bits);
        if (bits > bound || (bits == bound && equal-- > 0)) chosen[found++] = (int32_t)g;
    }
}

// Rounds x [inputs] as row `row` of `to`, which has room for it.
template <class X> inline void round_row(const X *x, int64_t row, int64_t inputs, RoundedRows &to) {
    const int64_t groups = inputs / GROUP, refined = num_refined(groups);
    for (int64_t g = 0; g < groups; g++)
        round_group(x + g * GROUP, largest_magnitude(x + g * GROUP, GROUP), (size_t)(row * groups + g), to.whole);
    const float *scales = to.whole.scales.data() + row * groups;
    int32_t *chosen = to.refined.data() + row * refined;
    greatest_scales(scales, groups, refined, chosen);
    for (int64_t i = 0; i < refined; i++) {
        const X *from = x + chosen[i] * GROUP;
        alignas(64) float remainder[GROUP];
        remainder_of(from, largest_magnitude(from, GROUP), scales[chosen[i]], remainder);
        round_group(remainder, largest_magnitude(remainder, GROUP), (size_t)(row * refined + i), to.remainders);
    }
}

// The remainders of some rows, ordered by the groups that they belong to.
struct RefinedOrder {
    struct Group {
        int32_t group, first, end; // items [first, end) belong to the group
    };
    std::vector<int32_t> items; // of the remainders
    std::vector<Group> groups;  // those that any row refines, ascending

    // Orders the remainders of rows [first, first + count), which have `num_groups` groups each.
    void sort(const RoundedRows &x, int64_t first, int64_t count, int64_t num_groups) {
        const int64_t from = first * num_refined(num_groups), to = from + count * num_refined(num_groups);
        const int32_t *group = x.refined.data();
        ends.assign((size_t)num_groups, 0);
        for (int64_t i = from; i < to; i++) ends[(size_t)group[i]]++;
        groups.clear();
        int32_t begin = 0;
        for (int32_t g = 0; g < (int32_t)num_groups; g++) {
            const int32_t end = begin + ends[(size_t)g];
            if (end > begin) groups.push_back({g, begin, end});
            ends[(size_t)g] = begin;
            begin = end;
        }
        items.resize((size_t)(to - from));
        for (int64_t i = from; i < to; i++) items[(size_t)ends[(size_t)group[i]]++] = (int32_t)i;
    }

private:
    std::vector<int32_t> ends; // of each group: the end of its items so far
};

} // namespace
