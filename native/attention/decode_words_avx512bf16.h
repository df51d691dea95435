// What a decode step multiplies: words, which are pairs of bfloat16, from vectors that hold 64 bytes of a
// row.
//
// Keys of 4 tokens are transposed within quarters of vectors, so that every word vector holds one word of
// each token in each quarter. Values of 2 tokens are interleaved within quarters, which leaves columns in an
// order that restore_columns() undoes. Codes are rearranged as bytes, and become bfloat16 by looking up both
// bytes of their magnitude.
#pragma once

#include "stored_avx512bf16.h"

namespace lamina::attention {
namespace {

// In every quarter (16 bytes) of a vector: elements I, of 4 bytes, of the same quarter of a followed by b.
// The intrinsics of these instructions do not compile without warnings of GCC 12.
template <int... I> inline __m512i in_quarters(const __m512i &a, const __m512i &b) {
    constexpr auto place = [](int quarter, int i) { return 4 * quarter + (i < 4 ? i : 12 + i); };
    return reinterpret_cast<__m512i>(__builtin_shufflevector(reinterpret_cast<Floats<16>>(a),
                                                             reinterpret_cast<Floats<16>>(b), place(0, I)...,
                                                             place(1, I)..., place(2, I)..., place(3, I)...));
}

// Quarters A, B, C and D of a followed by b.
template <int A, int B, int C, int D>
inline Floats<16> of_quarters(const Floats<16> &a, const Floats<16> &b) {
    return __builtin_shufflevector(a, b, 4 * A, 4 * A + 1, 4 * A + 2, 4 * A + 3, 4 * B, 4 * B + 1, 4 * B + 2,
                                   4 * B + 3, 4 * C, 4 * C + 1, 4 * C + 2, 4 * C + 3, 4 * D, 4 * D + 1,
                                   4 * D + 2, 4 * D + 3);
}

// Elements of a row in a vector, and vectors of words that 4 rows (of keys) or 2 (of values) make of it.
template <class Stored> constexpr int kRowElements = 64 / int{sizeof(typename Stored::Kv)};
template <class Stored> constexpr int kKeyVectors = kRowElements<Stored> / 8;
template <class Stored> constexpr int kValueVectors = kRowElements<Stored> / 16;

// The bfloat16 of magnitudes of codes, over their unit: lower and upper bytes.
template <class Stored> struct CodeBytes {
    alignas(64) uint8_t low[128], high[128];
    constexpr CodeBytes() : low{}, high{} {
        for (int code = 0; code < 128; ++code) {
            const auto bits = __builtin_bit_cast(uint32_t, Stored::widen(static_cast<int8_t>(code)));
            low[code] = static_cast<uint8_t>(bits >> 16);
            high[code] = static_cast<uint8_t>(bits >> 24);
        }
    }
};
template <class Stored> constexpr CodeBytes<Stored> kCodeBytes;

// Bytes of a table by the lower 7 bits of those of `index`. An instruction of AVX-512-VBMI, which this file
// is not compiled for: has_code_words() says whether the processor has it.
[[gnu::always_inline]] inline __m512i look_up(const uint8_t (&table)[128], __m512i index) {
    asm("vpermi2b %2, %1, %0" : "+v"(index) : "v"(_mm512_load_si512(table)), "vm"(load<__m512i>(table + 64)));
    return index;
}

inline bool has_code_words() {
    static const bool has_instruction = __builtin_cpu_supports("avx512vbmi");
    return has_instruction;
}

// The words of 64 codes, or of 32 elements that are words already.
template <class Stored> [[gnu::always_inline]] inline void to_words(__m512i elements, Floats<16> *words) {
    if constexpr (Stored::kScaled) {
        const __m512i index =
            std::is_same_v<Stored, Int8> ? _mm512_abs_epi8(elements) : elements; // 7 bits of it are used
        constexpr int kMerge = 0xea; // of bits a, b, c: (a & b) | c
        const __m512i low = look_up(kCodeBytes<Stored>.low, index),
                      high = _mm512_ternarylogic_epi32(elements, _mm512_set1_epi8(int8_t(0x80)),
                                                       look_up(kCodeBytes<Stored>.high, index), kMerge);
        words[0] = reinterpret_cast<Floats<16>>(_mm512_unpacklo_epi8(low, high));
        words[1] = reinterpret_cast<Floats<16>>(_mm512_unpackhi_epi8(low, high));
    } else {
        words[0] = reinterpret_cast<Floats<16>>(elements);
    }
}

// 64 bytes of a row; `half`: its last 32, and zeros.
[[gnu::always_inline]] inline __m512i row_bytes(const void *row, bool half) {
    return half ? _mm512_maskz_loadu_epi64(0xf, row) : _mm512_loadu_si512(row);
}

// Transposes words of 4 tokens within quarters. to_words() of the results in order are all key vectors.
template <class Stored>
[[gnu::always_inline]] inline void transpose_keys(__m512i a, __m512i b, __m512i c, __m512i d,
                                                  __m512i (&keys)[4]) {
    if constexpr (Stored::kScaled) { // words of 2 bytes
        const __m512i ab_low = _mm512_unpacklo_epi16(a, b), ab_high = _mm512_unpackhi_epi16(a, b),
                      cd_low = _mm512_unpacklo_epi16(c, d), cd_high = _mm512_unpackhi_epi16(c, d);
        keys[0] = in_quarters<0, 4, 1, 5>(ab_low, cd_low);
        keys[1] = in_quarters<2, 6, 3, 7>(ab_low, cd_low);
        keys[2] = in_quarters<0, 4, 1, 5>(ab_high, cd_high);
        keys[3] = in_quarters<2, 6, 3, 7>(ab_high, cd_high);
    } else { // of 4
        const __m512i ab_low = in_quarters<0, 4, 1, 5>(a, b), ab_high = in_quarters<2, 6, 3, 7>(a, b),
                      cd_low = in_quarters<0, 4, 1, 5>(c, d), cd_high = in_quarters<2, 6, 3, 7>(c, d);
        keys[0] = in_quarters<0, 1, 4, 5>(ab_low, cd_low);
        keys[1] = in_quarters<2, 3, 6, 7>(ab_low, cd_low);
        keys[2] = in_quarters<0, 1, 4, 5>(ab_high, cd_high);
        keys[3] = in_quarters<2, 3, 6, 7>(ab_high, cd_high);
    }
}

// Spreads a query's elements [kRowElements] over vectors that meet those of keys, `stride` floats apart: all
// words of a quarter are the one that this quarter's tokens have.
template <class Stored> inline void spread_query(const uint16_t *elements, float *target, int64_t stride) {
    constexpr int kWords = kKeyVectors<Stored>; // of a quarter
    const __m512i low = load<__m512i>(elements), high = kWords > 4 ? load<__m512i>(elements + 32) : low;
    const __m512i first =
        _mm512_setr_epi32(0, 0, 0, 0, kWords, kWords, kWords, kWords, 2 * kWords, 2 * kWords, 2 * kWords,
                          2 * kWords, 3 * kWords, 3 * kWords, 3 * kWords, 3 * kWords);
    for (int i = 0; i < kWords; ++i)
        store(target + i * stride,
              _mm512_permutex2var_epi32(low, _mm512_add_epi32(first, _mm512_set1_epi32(i)), high));
}

// Interleaves the rows of 2 tokens: vectors `from` and `from` + 1 of words.
template <class Stored, int VECTORS>
[[gnu::always_inline]] inline void interleave_values(const typename Stored::Kv *even,
                                                     const typename Stored::Kv *odd, int from, bool half,
                                                     Floats<16> (&words)[VECTORS], int to) {
    const int64_t offset = to / kValueVectors<Stored> * kRowElements<Stored>;
    const __m512i a = row_bytes(even + offset, half), b = row_bytes(odd + offset, half);
    if constexpr (Stored::kScaled) {
        to_words<Stored>(from == 0 ? _mm512_unpacklo_epi8(a, b) : _mm512_unpackhi_epi8(a, b), words + to);
    } else {
        words[to] = reinterpret_cast<Floats<16>>(_mm512_unpacklo_epi16(a, b));
        words[to + 1] = reinterpret_cast<Floats<16>>(_mm512_unpackhi_epi16(a, b));
    }
}

// Puts sums [kRowElements] in the order of columns.
template <class Stored>
inline void restore_columns(const Floats<16> (&sums)[kValueVectors<Stored>],
                            Floats<16> (&columns)[kValueVectors<Stored>]) {
    using F = Floats<16>;
    const F a = sums[0], b = sums[1];
    if constexpr (Stored::kScaled) {
        const F c = sums[2], d = sums[3];
        const F ab_low = of_quarters<0, 1, 4, 5>(a, b), ab_high = of_quarters<2, 3, 6, 7>(a, b),
                cd_low = of_quarters<0, 1, 4, 5>(c, d), cd_high = of_quarters<2, 3, 6, 7>(c, d);
        columns[0] = of_quarters<0, 2, 4, 6>(ab_low, cd_low);
        columns[1] = of_quarters<1, 3, 5, 7>(ab_low, cd_low);
        columns[2] = of_quarters<0, 2, 4, 6>(ab_high, cd_high);
        columns[3] = of_quarters<1, 3, 5, 7>(ab_high, cd_high);
    } else {
        columns[0] = of_quarters<0, 4, 1, 5>(a, b);
        columns[1] = of_quarters<2, 6, 3, 7>(a, b);
    }
}

} // namespace
} // namespace lamina::attention
