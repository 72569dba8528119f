// Unpacks groups of packed weights (packed.h) into numbers that the multiplication uses.
//
// Integers become numbers of the multiplication's type, which represents them exactly. Scales and minima
// become floats, also exactly: a scale of a K-quant is the product of 11 and 8 bits.
#pragma once

#include <type_traits>

#include "multiply.h"
#include "packed.h"

namespace {

constexpr int RUN_GROUPS = 4; // groups unpacked at a time; they fit into the first-level cache
constexpr int MAX_BLOCKS = 2; // most scales, and most minima, of a row in a group
static_assert(SPAN % RUN_GROUPS == 0, "a run has one header");

// The scales of LANES outputs, and their minima if the format has any.
struct Scaling {
    Floats scale, minimum;
};

// A run of unpacked groups.
struct Unpacked {
    alignas(64) uint32_t weights[RUN_GROUPS * GROUP * PANEL];
    alignas(64) float scales[RUN_GROUPS][MAX_BLOCKS][PANEL];
    alignas(64) float minima[RUN_GROUPS][MAX_BLOCKS][PANEL];

    // Returns the scales and, if MINIMA, the minima of outputs o, ... and block `b` of group g.
    template <bool MINIMA> INLINE Scaling scaling(int64_t g, int b, int o) const {
        return {load(scales[g][b] + o), MINIMA ? load(minima[g][b] + o) : Floats{}};
    }
};

// ---- Integers.

// Returns the bits of quad `quad` in a plane of BITS bits, whose words are given, in bits `to`, ... of each byte.
template <int BITS> INLINE Words in_plane(const Words *words, int quad, int to) {
    const Words word = words[quad * BITS / 8];
    const int from = quad * BITS % 8;
    const uint32_t mask = 0x01010101u * (((1 << BITS) - 1) << to);
    return (from >= to ? word >> (from - to) : word << (to - from)) & mask;
}

// Returns quad `quad` of the words of a group with BITS bits, as unsigned bytes: signed integers of less than 8 bits with
// their offset.
template <int BITS> INLINE Words quad_of(const Words (&word)[BITS], int quad) {
    if constexpr (BITS == 8) return word[quad];
    Words bytes{};
    if constexpr (BITS & 4) bytes = in_plane<4>(word, quad, 0);
    if constexpr (BITS & 2) bytes |= in_plane<2>(word + (BITS & 4), quad, BITS & 4);
    if constexpr (BITS & 1) bytes |= in_plane<1>(word + (BITS & 6), quad, BITS & 6);
    return bytes;
}

// Returns column `column` of a group with BITS bits, from its words.
template <int BITS, bool IS_SIGNED> INLINE Ints field(const Words (&word)[BITS], int column) {
    const Words quad = quad_of(word, quad_index(column) / 4);
    const int first = quad_index(column) % 4 * 8;
    if (BITS == 8 && IS_SIGNED) return (Ints)(quad << (24 - first)) >> 24;
    return (Ints)(quad >> first & 0xff) - (IS_SIGNED ? 1 << (BITS - 1) : 0);
}

// Stores outputs o, ... of columns 2 p and 2 p + 1, integers of at most 8 bits, in the type of `to`.
INLINE void store_pair(float *to, int p, int o, Ints even, Ints odd) {
    store(to + 2 * p * PANEL + o, __builtin_convertvector(even, Floats));
    store(to + (2 * p + 1) * PANEL + o, __builtin_convertvector(odd, Floats));
}
#if defined(__AVX512BF16__)
// Returns two columns as a pair of bfloat16.
INLINE Words joined(Ints even, Ints odd) {
    return words(__builtin_convertvector(even, Floats)) >> 16 | words(__builtin_convertvector(odd, Floats));
}
INLINE void store_pair(uint32_t *to, int p, int o, Ints even, Ints odd) {
    store_as(to + p * PANEL + o, joined(even, odd));
}
#endif

template <int BITS, bool IS_SIGNED, class W> INLINE void unpack_fields(const uint8_t *from, W *to) {
    for (int o = 0; o < PANEL; o += LANES) {
        Words word[BITS];
        for (int j = 0; j < BITS; j++) word[j] = load_as<Words>(from + (j * PANEL + o) * 4);
#pragma GCC unroll 16
        for (int p = 0; p < GROUP / 2; p++)
            store_pair(to, p, o, field<BITS, IS_SIGNED>(word, 2 * p), field<BITS, IS_SIGNED>(word, 2 * p + 1));
    }
}

template <Nibbles N> INLINE void unpack_nibbles(const uint8_t *from, float *to) {
    for (int o = 0; o < PANEL; o += LANES)
        for (int j = 0; j < 4; j++) {
            const Words word = load_as<Words>(from + (j * PANEL + o) * 4);
            if constexpr (N == THEMSELVES) {
#pragma GCC unroll 4
                for (int s = 0; s < 4; s++)
                    store_pair(to, 4 * j + s, o, (Ints)(word >> 4 * s & 15), (Ints)(word >> (4 * s + 16) & 15));
            } else {
                const Words bytes[2] = {looked_up(INTEGERS[N], word & 0x0f0f0f0f),
                                        looked_up(INTEGERS[N], word >> 4 & 0x0f0f0f0f)};
#pragma GCC unroll 4
                for (int s = 0; s < 4; s++) { // byte s / 2 of each half
                    const Words w = bytes[s % 2];
                    store_pair(to, 4 * j + s, o, (Ints)(w << (24 - 8 * (s / 2))) >> 24,
                               (Ints)(w << (8 - 8 * (s / 2))) >> 24);
                }
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
// Returns the integers of nibbles in bfloat16, twice: a lookup reads five bits, of which the highest belongs
// to the next nibble.
template <Nibbles N> INLINE __m512i pairs_table() {
    alignas(64) uint16_t numbers[32];
    for (int i = 0; i < 32; i++) {
        const float value = INTEGERS[N][i % 16];
        memcpy(numbers + i, (const char *)&value + 2, 2);
    }
    return _mm512_load_si512(numbers);
}

// Looks up both columns of a pair at once: nibble s of each half of the words.
INLINE Words nibble_pair(__m512i table, Words word, int s) {
    return (Words)_mm512_permutexvar_epi16(_mm512_srli_epi16((__m512i)word, 4 * s), table);
}

// Reads pairs of columns from the words of a quantised group.
template <int64_t FORMAT> struct PairReader {
    static constexpr Traits T = TRAITS[FORMAT];
    const __m512i table = pairs_table<T.nibbles>();

    // Returns columns 2 p and 2 p + 1 as bfloat16.
    INLINE Words pair(const Words (&word)[T.bits], int p) const {
        if constexpr (T.bits == 4) return nibble_pair(table, word[p / 4], p % 4);
        else return joined(field<T.bits, T.is_signed>(word, 2 * p), field<T.bits, T.is_signed>(word, 2 * p + 1));
    }
};

// Pairs of bfloat16 are multiplied as they are stored.
INLINE void unpack_bf16(const uint8_t *from, uint32_t *to) {
    memcpy(to, from, PANEL * GROUP * 2);
}
#endif

// ---- Integers as quads, for the multiplication of integers.

// Four columns of an output, as unsigned bytes.
struct Quad {
    uint32_t bytes;
};

// Stores the bytes of 8 columns, which are the lowest bytes of `bits`, in QUAD_ORDER.
INLINE void store_quads(uint8_t *to, const uint32_t *bits) {
    typedef uint32_t Four __attribute__((vector_size(16)));
    typedef uint16_t FourHalves __attribute__((vector_size(8)));
    const Four first = load_as<Four>(bits), second = load_as<Four>(bits + 4);
    store_as(to, __builtin_convertvector((first & 0xff) | (second & 0xff) << 8, FourHalves));
}

// Returns the lower nibble of each byte, or the higher.
INLINE Words nibbles_of(Words bytes, bool higher) {
#if defined(__aarch64__)
    return higher ? (Words)((uint8x16_t)bytes >> 4) : bytes & 0x0f0f0f0f; // shifts bytes, so the mask is not needed
#else
    return bytes >> higher * 4 & 0x0f0f0f0f;
#endif
}

// Returns the planes in which integers up to `greatest` are unpacked. If their products are added in 16 bits,
// large integers are cut into nibbles: the plane of the lower ones, then of the higher ones.
constexpr int planes_of(int greatest) {
    return ADDS_IN_SHORTS && 2 * 127 * greatest > MOST_SHORT ? 2 : 1;
}

// Stores word `word` of a group, for outputs o, ...
template <int PLANES> INLINE void store_quad(Quad *to, int word, int o, Words bytes) {
    if (PLANES == 1) return store_as(to + word * PANEL + o, bytes);
    store_as(to + word * PANEL + o, bytes & 0x0f0f0f0f);
    store_as(to + (GROUP / 4 + word) * PANEL + o, bytes >> 4 & 0x0f0f0f0f);
}

// Returns what is added to the integers of a format in quads.
constexpr int quad_offset(const Traits &t) { return SIGNED_QUADS ? 0 : offset_of(t); }

// The integers that the nibbles of a format stand for, with the offset of quads.
template <int64_t FORMAT> struct OffsetIntegers {
    int8_t of[16] = {}; // bytes; of unsigned integers if there is an offset

    constexpr OffsetIntegers() {
        for (int i = 0; i < 16; i++)
            of[i] = (int8_t)(INTEGERS[TRAITS[FORMAT].nibbles][i] + quad_offset(TRAITS[FORMAT]));
    }
};

template <int64_t FORMAT> constexpr OffsetIntegers<FORMAT> OFFSET_INTEGERS{};

template <int64_t FORMAT> INLINE void unpack_quads(const uint8_t *from, Quad *to) {
    constexpr Traits T = TRAITS[FORMAT];
    constexpr int PLANES = planes_of(greatest_of(T));
    constexpr uint32_t ONES = 0x01010101u, SIGNS = 0x80808080u;
    for (int o = 0; o < PANEL; o += LANES) {
        Words word[T.bits];
        for (int j = 0; j < T.bits; j++) word[j] = load_as<Words>(from + (j * PANEL + o) * 4);
#pragma GCC unroll 8
        for (int w = 0; w < GROUP / 4; w++) {
            Words bytes;
            if constexpr (T.bits == 4) bytes = nibbles_of(word[w / 2], w % 2);
            else bytes = quad_of(word, w);
            if constexpr (T.nibbles != THEMSELVES) bytes = looked_up(OFFSET_INTEGERS<FORMAT>.of, bytes);
            else if constexpr (T.bits == 8) bytes ^= quad_offset(T) * ONES;
            else if constexpr (SIGNED_QUADS && T.is_signed) // no byte borrows from the next one
                bytes = ((bytes | SIGNS) - offset_of(T) * ONES) ^ SIGNS;
            store_quad<PLANES>(to, w, o, bytes);
        }
    }
}

// ---- Scales and minima.

// Loads LANES bytes as integers, signed if IS_SIGNED. May read 16 bytes: a group's integers follow its scales.
template <bool IS_SIGNED> INLINE Ints load_bytes(const uint8_t *from) {
#if defined(__AVX512F__)
    const __m128i bytes = load_as<__m128i>(from);
    return (Ints)(IS_SIGNED ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)from);
    return (Ints)(IS_SIGNED ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#elif defined(__aarch64__)
    constexpr uint8_t LOWEST[] = {0, 255, 255, 255, 1, 255, 255, 255, 2, 255, 255, 255, 3, 255, 255, 255};
    const Ints x = (Ints)vqtbl1q_u8(load_as<uint8x16_t>(from), load_as<uint8x16_t>(LOWEST)); // 255: zero
    return IS_SIGNED ? x << 24 >> 24 : x;
#else
    Ints x;
    for (int i = 0; i < LANES; i++) x[i] = IS_SIGNED ? (int8_t)from[i] : from[i];
    return x;
#endif
}

// Returns 2^(exponent - 128), exactly: the least two are subnormal numbers.
INLINE Floats power_of_two(Ints exponent) {
    const Ints subnormal = (Ints{} + 0x00200000) << exponent; // clang mixes no scalar with the vectors of a choice
    return (Floats)(exponent < 2 ? subnormal : (exponent - 1) << 23);
}

// Returns the scales and minima of outputs o, ... and block `b` of a group.
template <int64_t FORMAT> INLINE Scaling scaling_of(const uint8_t *header, const uint8_t *group, int b, int o) {
    constexpr Traits T = TRAITS[FORMAT];
    const uint16_t *halves = (const uint16_t *)group;
    if constexpr (T.scales == EXPONENTS) return {power_of_two(load_bytes<false>(group + o)), Floats{}};
    else if constexpr (T.scales == HALVES)
        return {load_f16(halves + o), T.has_minima ? load_f16(halves + PANEL + o) : Floats{}};
    else {
        const Floats unit = load_f16((const uint16_t *)header + o);
        Ints scale = load_bytes<!T.has_minima>(group + b * PANEL + o), minimum{};
        if constexpr (T.scales == NIBBLES) minimum = scale >> 4, scale &= 15;
        else if (T.has_minima) minimum = load_bytes<false>(group + PANEL + o);
        Scaling both{unit * __builtin_convertvector(scale, Floats), Floats{}};
        if (T.has_minima)
            both.minimum = -(load_f16((const uint16_t *)header + PANEL + o) * __builtin_convertvector(minimum, Floats));
        return both;
    }
}

// ---- Runs.

// Returns the words of an unpacked group of numbers: one for each float, or for each pair of bfloat16.
template <class W> constexpr int64_t group_words() {
    return std::is_same<W, float>::value ? PANEL * GROUP : PANEL * GROUP / 2;
}
// Returns the words of an unpacked group of quads.
template <int64_t FORMAT> constexpr int64_t quad_words() {
    return PANEL * GROUP / 4 * planes_of(greatest_of(TRAITS[FORMAT]));
}

template <int64_t FORMAT, class W>
INLINE void unpack_as(const uint8_t *header, const uint8_t *from, int64_t groups, Unpacked &to) {
    constexpr Traits T = TRAITS[FORMAT];
    for (int64_t g = 0; g < groups; g++, from += group_bytes(FORMAT)) {
        const uint8_t *integers = from + scales_bytes(FORMAT);
        if constexpr (T.blocks > 0)
            for (int o = 0; o < PANEL; o += LANES)
                for (int b = 0; b < T.blocks; b++) {
                    const Scaling scaling = scaling_of<FORMAT>(header, from, b, o);
                    store(to.scales[g][b] + o, scaling.scale);
                    if (T.has_minima) store(to.minima[g][b] + o, scaling.minimum);
                }
        if constexpr (std::is_same<W, Quad>::value) {
            if constexpr (T.blocks > 0)
                unpack_quads<FORMAT>(integers, (Quad *)to.weights + g * quad_words<FORMAT>());
        } else if constexpr (!std::is_same<W, uint32_t>::value || T.blocks != 1) { // else: pair_rows.h
            W *weights = (W *)to.weights + g * group_words<W>();
            if constexpr (T.bits == 4) unpack_nibbles<T.nibbles>(integers, weights);
            else if constexpr (T.bits == 16) unpack_bf16(integers, weights);
            else unpack_fields<T.bits, T.is_signed>(integers, weights);
        }
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
    case Q2K: return unpack_as<Q2K, W>(header, from, groups, to);
    case I4: return unpack_as<I4, W>(header, from, groups, to);
    case I4K: return unpack_as<I4K, W>(header, from, groups, to);
    case F4: return unpack_as<F4, W>(header, from, groups, to);
    }
}

} // namespace
