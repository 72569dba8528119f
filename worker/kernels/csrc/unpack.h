// Unpacks groups of packed weights (packed.h) into numbers that the multiplication uses.
//
// Integers become numbers of the multiplication's type, which represents them exactly. Scales and minima
// become floats, also exactly: a scale of a K-quant is the product of 11 and 8 bits.
#pragma once

#include <type_traits>

#include "packed.h"

namespace {

constexpr int RUN_GROUPS = 4; // groups unpacked at a time; they fit into the first-level cache
constexpr int MAX_BLOCKS = 2; // most scales of a row in a group
static_assert(SPAN % RUN_GROUPS == 0, "a run has one header");

// A run of unpacked groups.
struct Unpacked {
    alignas(64) uint32_t weights[RUN_GROUPS * GROUP * PANEL];
    alignas(64) float scales[RUN_GROUPS][MAX_BLOCKS][PANEL];
    alignas(64) float minima[RUN_GROUPS][PANEL];
};

// ---- Integers.

// Returns column `column` of fields of BITS bits (packed.h), from their words.
template <int BITS, bool IS_SIGNED> INLINE Ints field(const Words (&word)[BITS], int column) {
    constexpr int EACH = 32 / BITS;
    if (column < WHOLE_COLUMNS) {
        const Words w = word[column / EACH];
        const int first = column % EACH * BITS;
        if (IS_SIGNED) return (Ints)(w << (32 - BITS - first)) >> (32 - BITS);
        return (Ints)((w >> first) & ((1u << BITS) - 1));
    }
    // The lower bits are the two top bits of some words. The higher bits come from the word `top`, shifted
    // so that they are its highest.
    constexpr int LOW = (BITS - 1) / 2 * 2; // 2 or 4 lower bits, of 3, 5 or 6
    const int c = column - WHOLE_COLUMNS;
    const int first = BITS == 6 ? 3 * c : c * (BITS / 2);
    Words low = word[first] >> 30;
    if (LOW == 4) low |= (word[first + 1] >> 28) & 12;
    const Words top = BITS == 6 ? word[first + 2] : word[BITS - 1] << (1 - c);
    constexpr int SHIFT = 32 - BITS;
    if (IS_SIGNED) return (((Ints)top >> SHIFT) & ~((1 << LOW) - 1)) | (Ints)low;
    return (Ints)(((top >> SHIFT) & ~((1u << LOW) - 1)) | low);
}

template <int BITS> INLINE void load_words(const uint8_t *from, int o, Words (&word)[BITS]) {
    for (int j = 0; j < BITS; j++) word[j] = load_as<Words>(from + (j * PANEL + o) * 4);
}

template <int BITS, bool IS_SIGNED> INLINE void unpack_fields(const uint8_t *from, float *to) {
    for (int o = 0; o < PANEL; o += LANES) {
        Words word[BITS];
        load_words(from, o, word);
#pragma GCC unroll 32
        for (int k = 0; k < GROUP; k++)
            store(to + k * PANEL + o, __builtin_convertvector(field<BITS, IS_SIGNED>(word, k), Floats));
    }
}

INLINE void unpack_nibbles(const uint8_t *from, float *to) {
    for (int o = 0; o < PANEL; o += LANES)
        for (int j = 0; j < 4; j++) {
            Words word = load_as<Words>(from + (j * PANEL + o) * 4);
#pragma GCC unroll 8
            for (int s = 0; s < 8; s++) {
                Ints nibble = (Ints)((word >> (4 * s)) & 15);
                const int column = 2 * (4 * j + s % 4) + s / 4;
                store(to + column * PANEL + o, __builtin_convertvector(nibble, Floats));
            }
        }
}

INLINE void unpack_bytes(const uint8_t *from, float *to) {
    for (int o = 0; o < PANEL; o += LANES)
        for (int j = 0; j < 8; j++) {
            Words word = load_as<Words>(from + (j * PANEL + o) * 4);
#pragma GCC unroll 4
            for (int s = 0; s < 4; s++) {
                Ints byte = (Ints)(word << (24 - 8 * s)) >> 24;
                const int column = 2 * (2 * j + s % 2) + s / 2;
                store(to + column * PANEL + o, __builtin_convertvector(byte, Floats));
            }
        }
}

INLINE void unpack_bf16(const uint8_t *from, float *to) {
    for (int o = 0; o < PANEL; o += LANES)
        for (int p = 0; p < GROUP / 2; p++) {
            Words pair = load_as<Words>(from + (p * PANEL + o) * 4);
            store(to + 2 * p * PANEL + o, (Floats)(pair << 16));
            store(to + (2 * p + 1) * PANEL + o, (Floats)(pair & 0xffff0000u));
        }
}

#if defined(__AVX512BF16__)
// Returns two vectors of integers, of at most 8 bits, as pairs of bfloat16.
INLINE Words pair_of(Ints even, Ints odd) {
    return words(__builtin_convertvector(even, Floats)) >> 16 | words(__builtin_convertvector(odd, Floats));
}

template <int BITS, bool IS_SIGNED> INLINE void unpack_fields(const uint8_t *from, uint32_t *to) {
    for (int o = 0; o < PANEL; o += LANES) {
        Words word[BITS];
        load_words(from, o, word);
#pragma GCC unroll 16
        for (int p = 0; p < GROUP / 2; p++)
            store_as(to + p * PANEL + o, pair_of(field<BITS, IS_SIGNED>(word, 2 * p),
                                                 field<BITS, IS_SIGNED>(word, 2 * p + 1)));
    }
}

// Returns the integers 0 to 15 as bfloat16, twice.
INLINE __m512i nibble_table() {
    alignas(64) uint16_t table[32];
    for (int i = 0; i < 32; i++) {
        const float value = (float)(i % 16);
        memcpy(table + i, (const char *)&value + 2, 2);
    }
    return _mm512_load_si512(table);
}

INLINE void unpack_nibbles(const uint8_t *from, uint32_t *to) {
    const __m512i table = nibble_table(), low = _mm512_set1_epi16(15);
    for (int o = 0; o < PANEL; o += LANES)
        for (int j = 0; j < 4; j++) {
            const __m512i word = load_as<__m512i>(from + (j * PANEL + o) * 4);
            for (int s = 0; s < 4; s++) {
                const __m512i nibble = _mm512_and_si512(_mm512_srli_epi16(word, 4 * s), low);
                store_as(to + (4 * j + s) * PANEL + o, _mm512_permutexvar_epi16(nibble, table));
            }
        }
}

INLINE void unpack_bytes(const uint8_t *from, uint32_t *to) {
    for (int o = 0; o < PANEL; o += LANES)
        for (int j = 0; j < 8; j++) {
            const Words word = load_as<Words>(from + (j * PANEL + o) * 4);
            for (int s = 0; s < 2; s++)
                store_as(to + (2 * j + s) * PANEL + o,
                         pair_of((Ints)(word << (24 - 8 * s)) >> 24, (Ints)(word << (8 - 8 * s)) >> 24));
        }
}

// Pairs of bfloat16 are multiplied as they are stored.
INLINE void unpack_bf16(const uint8_t *from, uint32_t *to) {
    memcpy(to, from, PANEL * GROUP * 2);
}
#endif

// ---- Scales and minima.

// Loads LANES bytes as floats, signed if IS_SIGNED.
template <bool IS_SIGNED> INLINE Floats load_bytes(const uint8_t *from) {
#if defined(__AVX512F__)
    const __m128i bytes = load_as<__m128i>(from);
    return (Floats)_mm512_cvtepi32_ps(IS_SIGNED ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)from);
    return (Floats)_mm256_cvtepi32_ps(IS_SIGNED ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
    Floats x;
    for (int i = 0; i < LANES; i++) x[i] = IS_SIGNED ? (float)(int8_t)from[i] : (float)from[i];
    return x;
#endif
}

// Writes the scales of a group to scales [blocks][PANEL], and its minima to minima [PANEL].
template <int64_t FORMAT>
INLINE void unpack_scales(const uint8_t *header, const uint8_t *group, float (*scales)[PANEL],
                          float *minima) {
    constexpr Traits T = TRAITS[FORMAT];
    for (int o = 0; o < PANEL; o += LANES) {
        if (T.scale_bytes == 2) {
            store(scales[0] + o, load_f16((const uint16_t *)group + o));
            if (T.has_minima) store(minima + o, load_f16((const uint16_t *)group + PANEL + o));
            continue;
        }
        const Floats unit = load_f16((const uint16_t *)header + o);
        for (int b = 0; b < T.blocks; b++)
            store(scales[b] + o, unit * load_bytes<!T.has_minima>(group + b * PANEL + o));
        if (T.has_minima) {
            const Floats step = load_f16((const uint16_t *)header + PANEL + o);
            store(minima + o, step * -load_bytes<false>(group + PANEL + o));
        }
    }
}

// ---- Runs.

// Returns the words of an unpacked group: one for each float, or for each pair of bfloat16.
template <class W> constexpr int64_t group_words() {
    return std::is_same<W, float>::value ? PANEL * GROUP : PANEL * GROUP / 2;
}

template <int64_t FORMAT, class W>
INLINE void unpack_as(const uint8_t *header, const uint8_t *from, int64_t groups, Unpacked &to) {
    constexpr Traits T = TRAITS[FORMAT];
    for (int64_t g = 0; g < groups; g++, from += group_bytes(FORMAT)) {
        const uint8_t *integers = from + scales_bytes(FORMAT);
        W *weights = (W *)to.weights + g * group_words<W>();
        if constexpr (T.blocks > 0) unpack_scales<FORMAT>(header, from, to.scales[g], to.minima[g]);
        if constexpr (T.bits == 4) unpack_nibbles(integers, weights);
        else if constexpr (T.bits == 8) unpack_bytes(integers, weights);
        else if constexpr (T.bits == 16) unpack_bf16(integers, weights);
        else unpack_fields<T.bits, T.is_signed>(integers, weights);
    }
}

// Unpacks `groups` groups, which start at `from` and have one header. Not for F32, which needs no unpacking.
template <class W>
__attribute__((noinline)) void unpack_run(int64_t format, const uint8_t *header, const uint8_t *from,
                                          int64_t groups, Unpacked &to) {
    switch (format) {
    case Q4: return unpack_as<Q4, W>(header, from, groups, to);
    case Q8: return unpack_as<Q8, W>(header, from, groups, to);
    case BF16: return unpack_as<BF16, W>(header, from, groups, to);
    case Q5: return unpack_as<Q5, W>(header, from, groups, to);
    case Q5M: return unpack_as<Q5M, W>(header, from, groups, to);
    case Q3K: return unpack_as<Q3K, W>(header, from, groups, to);
    case Q4K: return unpack_as<Q4K, W>(header, from, groups, to);
    case Q5K: return unpack_as<Q5K, W>(header, from, groups, to);
    case Q6K: return unpack_as<Q6K, W>(header, from, groups, to);
    }
}

} // namespace
