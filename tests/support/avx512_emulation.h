// The AVX-512 intrinsics that the kernels use (worker/kernels/csrc), computed lane by lane. With this header
// included first, code for AVX-512 is compiled for AVX2, so that tests of it run on processors without
// AVX-512. An intrinsic that is missing here is an error of the compiler. Semantics: Intel's Intrinsics Guide.
#pragma once

#include <cstdint>
#include <cstring>
#include <immintrin.h>

typedef float Lanes512 __attribute__((vector_size(64)));
typedef double Doubles512 __attribute__((vector_size(64)));
typedef long long Bits512 __attribute__((vector_size(64)));
typedef short Pairs512 __attribute__((vector_size(64)));
#define __m512 Lanes512
#define __m512d Doubles512
#define __m512i Bits512
#define __m512bh Pairs512

namespace emulated {

#define FUNCTION static inline __attribute__((unused))

// Returns lane i of v, of type T.
template <class T, class V> FUNCTION T lane(const V &v, int i) {
    T t;
    memcpy(&t, (const char *)&v + i * sizeof t, sizeof t);
    return t;
}

// Returns a vector V whose lane i, of type T, is f(i).
template <class V, class T, class F> FUNCTION V made(F &&f) {
    V v;
    for (size_t i = 0; i < sizeof v / sizeof(T); i++) {
        const T t = (T)f((int)i);
        memcpy((char *)&v + i * sizeof t, &t, sizeof t);
    }
    return v;
}

FUNCTION float from_bf16(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    return lane<float>(bits, 0);
}

FUNCTION uint16_t to_bf16(float x) {
    const uint32_t bits = lane<uint32_t>(x, 0);
    return x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

FUNCTION __m512 add_ps(__m512 a, __m512 b) { return a + b; }
FUNCTION __m512 fmadd_ps(__m512 a, __m512 b, __m512 c) {
    return made<__m512, float>([&](int i) { return __builtin_fmaf(a[i], b[i], c[i]); });
}
FUNCTION __m512i and_si512(__m512i a, __m512i b) { return a & b; }
FUNCTION __m512i load_si512(const void *from) { return lane<__m512i>(*(const __m512i *)from, 0); }
FUNCTION __m512i set1_epi16(short x) {
    return made<__m512i, short>([&](int) { return x; });
}
FUNCTION __m512i set1_epi32(int x) {
    return made<__m512i, int>([&](int) { return x; });
}
FUNCTION __m512i srli_epi16(__m512i a, unsigned count) {
    return made<__m512i, uint16_t>([&](int i) { return count > 15 ? 0 : lane<uint16_t>(a, i) >> count; });
}
FUNCTION __m512i permutexvar_epi16(__m512i index, __m512i a) {
    return made<__m512i, uint16_t>([&](int i) { return lane<uint16_t>(a, lane<uint16_t>(index, i) & 31); });
}
FUNCTION __m512i maddubs_epi16(__m512i a, __m512i b) {
    return made<__m512i, int16_t>([&](int i) {
        int sum = 0;
        for (int j = 2 * i; j < 2 * i + 2; j++) sum += lane<uint8_t>(a, j) * lane<int8_t>(b, j);
        return sum > 32767 ? 32767 : sum < -32768 ? -32768 : sum;
    });
}
FUNCTION __m512i madd_epi16(__m512i a, __m512i b) {
    return made<__m512i, int>([&](int i) {
        return lane<int16_t>(a, 2 * i) * lane<int16_t>(b, 2 * i) +
               lane<int16_t>(a, 2 * i + 1) * lane<int16_t>(b, 2 * i + 1);
    });
}
FUNCTION __m512i dpbusd_epi32(__m512i sums, __m512i a, __m512i b) {
    return made<__m512i, int>([&](int i) {
        int sum = lane<int>(sums, i);
        for (int j = 4 * i; j < 4 * i + 4; j++) sum += lane<uint8_t>(a, j) * lane<int8_t>(b, j);
        return sum;
    });
}
FUNCTION __m512i broadcast_i32x4(__m128i a) {
    return made<__m512i, int>([&](int i) { return lane<int>(a, i % 4); });
}
FUNCTION __m512i shuffle_epi8(__m512i a, __m512i index) {
    return made<__m512i, uint8_t>([&](int i) {
        const uint8_t from = lane<uint8_t>(index, i);
        return from & 128 ? 0 : lane<uint8_t>(a, i / 16 * 16 + from % 16);
    });
}
template <int HALF> FUNCTION __m512i unpack_epi16(__m512i a, __m512i b) {
    return made<__m512i, uint16_t>([&](int i) {
        return lane<uint16_t>(i % 2 ? b : a, i / 8 * 8 + HALF * 4 + i % 8 / 2);
    });
}
FUNCTION __m512 permutex2var_ps(__m512 a, __m512i index, __m512 b) {
    return made<__m512, float>([&](int i) {
        const int from = lane<int>(index, i) & 31;
        return from < 16 ? a[from] : b[from - 16];
    });
}
FUNCTION __m512i of_ints(const int (&x)[16]) {
    return made<__m512i, int>([&](int i) { return x[i]; });
}
FUNCTION __m512 loadu_ps(const float *from) {
    return made<__m512, float>([&](int i) { return from[i]; });
}
FUNCTION void storeu_ps(float *to, __m512 x) {
    for (int i = 0; i < 16; i++) to[i] = x[i];
}
FUNCTION __m128i cvtepi32_epi8(__m512i a) {
    return made<__m128i, uint8_t>([&](int i) { return (uint8_t)lane<int>(a, i); });
}
FUNCTION __m512 cvtepi32_ps(__m512i a) {
    return made<__m512, float>([&](int i) { return lane<int>(a, i); });
}
FUNCTION __m512i cvtepi8_epi32(__m128i a) {
    return made<__m512i, int>([&](int i) { return lane<int8_t>(a, i); });
}
FUNCTION __m512i cvtepu8_epi32(__m128i a) {
    return made<__m512i, int>([&](int i) { return lane<uint8_t>(a, i); });
}
FUNCTION __m512i cvtepu16_epi32(__m256i a) {
    return made<__m512i, int>([&](int i) { return lane<uint16_t>(a, i); });
}
FUNCTION __m512 cvtph_ps(__m256i a) {
    return made<__m512, float>([&](int i) { return _cvtsh_ss(lane<uint16_t>(a, i)); });
}
FUNCTION __m256i cvtneps_pbh(__m512 a) {
    return made<__m256i, uint16_t>([&](int i) { return to_bf16(a[i]); });
}
FUNCTION __m512bh cvtne2ps_pbh(__m512 high, __m512 low) {
    return made<__m512bh, uint16_t>([&](int i) { return to_bf16(i < 16 ? low[i] : high[i - 16]); });
}
// Adds the products of the odd lanes first, each with a rounding of its own.
FUNCTION __m512 dpbf16_ps(__m512 sums, __m512bh a, __m512bh b) {
    auto product = [&](int i) { return from_bf16(lane<uint16_t>(a, i)) * from_bf16(lane<uint16_t>(b, i)); };
    return made<__m512, float>([&](int i) { return sums[i] + product(2 * i + 1) + product(2 * i); });
}
FUNCTION float reduce_add_ps(__m512 a) {
    for (int n = 8; n; n /= 2)
        for (int i = 0; i < n; i++) a[i] += a[i + n];
    return a[0];
}
FUNCTION int reduce_add_epi32(__m512i a) {
    int total = 0;
    for (int i = 0; i < 16; i++) total += lane<int>(a, i);
    return total;
}
FUNCTION int reduce_max_epi32(__m512i a) {
    int most = lane<int>(a, 0);
    for (int i = 1; i < 16; i++) most = lane<int>(a, i) > most ? lane<int>(a, i) : most;
    return most;
}
FUNCTION float reduce_max_ps(__m512 a) {
    float most = a[0];
    for (int i = 1; i < 16; i++) most = a[i] > most ? a[i] : most;
    return most;
}
FUNCTION __m512 shuffle_f32x4(__m512 a, __m512 b, int control) {
    return made<__m512, float>([&](int i) {
        const int quarter = i / 4, from = (control >> (2 * quarter)) & 3;
        return (quarter < 2 ? a : b)[4 * from + i % 4];
    });
}
// Interleave the lower (FIRST 0) or upper (FIRST 2) two lanes of each quarter.
template <int FIRST> FUNCTION __m512 unpack_ps(__m512 a, __m512 b) {
    return made<__m512, float>([&](int i) { return (i % 2 ? b : a)[i / 4 * 4 + FIRST + i % 4 / 2]; });
}
// Interleave the lower (FIRST 0) or upper (FIRST 1) lane of each quarter.
template <int FIRST> FUNCTION __m512d unpack_pd(__m512d a, __m512d b) {
    return made<__m512d, double>([&](int i) { return (i % 2 ? b : a)[i / 2 * 2 + FIRST]; });
}

} // namespace emulated

#define _mm512_add_ps emulated::add_ps
#define _mm512_and_si512 emulated::and_si512
#define _mm512_broadcast_i32x4 emulated::broadcast_i32x4
#define _mm512_castpd_ps(x) ((__m512)(x))
#define _mm512_castps_pd(x) ((__m512d)(x))
#define _mm512_cvtepi32_epi8 emulated::cvtepi32_epi8
#define _mm512_cvtepi32_ps emulated::cvtepi32_ps
#define _mm512_cvtepi8_epi32 emulated::cvtepi8_epi32
#define _mm512_cvtepu16_epi32 emulated::cvtepu16_epi32
#define _mm512_cvtepu8_epi32 emulated::cvtepu8_epi32
#define _mm512_cvtne2ps_pbh emulated::cvtne2ps_pbh
#define _mm512_cvtneps_pbh emulated::cvtneps_pbh
#define _mm512_cvtph_ps emulated::cvtph_ps
#define _mm512_dpbf16_ps emulated::dpbf16_ps
#define _mm512_dpbusd_epi32 emulated::dpbusd_epi32
#define _mm512_fmadd_ps emulated::fmadd_ps
#define _mm512_load_si512 emulated::load_si512
#define _mm512_loadu_ps emulated::loadu_ps
#define _mm512_madd_epi16 emulated::madd_epi16
#define _mm512_maddubs_epi16 emulated::maddubs_epi16
#define _mm512_permutex2var_ps emulated::permutex2var_ps
#define _mm512_permutexvar_epi16 emulated::permutexvar_epi16
#define _mm512_reduce_add_epi32 emulated::reduce_add_epi32
#define _mm512_reduce_max_epi32 emulated::reduce_max_epi32
#define _mm512_reduce_add_ps emulated::reduce_add_ps
#define _mm512_reduce_max_ps emulated::reduce_max_ps
#define _mm512_set1_epi16 emulated::set1_epi16
#define _mm512_set1_epi32 emulated::set1_epi32
#define _mm512_setr_epi32(...) emulated::of_ints({__VA_ARGS__})
#define _mm512_shuffle_epi8 emulated::shuffle_epi8
#define _mm512_shuffle_f32x4 emulated::shuffle_f32x4
#define _mm512_srli_epi16 emulated::srli_epi16
#define _mm512_storeu_ps emulated::storeu_ps
#define _mm512_unpackhi_epi16 emulated::unpack_epi16<1>
#define _mm512_unpackhi_pd emulated::unpack_pd<1>
#define _mm512_unpackhi_ps emulated::unpack_ps<2>
#define _mm512_unpacklo_epi16 emulated::unpack_epi16<0>
#define _mm512_unpacklo_pd emulated::unpack_pd<0>
#define _mm512_unpacklo_ps emulated::unpack_ps<0>
#define KEEP_ORDER(vector) // a register that the processor lacks
