// Elements of a slab as pairs of bfloat16, which holds codes exactly.
#pragma once

#include "stored.h"
#include "task.h"

#include <immintrin.h>

namespace lamina::attention {
namespace {

// bfloat16 of 0 to 63.
struct SmallCodes {
    alignas(64) uint16_t pairs[64];
    constexpr SmallCodes() : pairs{} {
        for (int i = 0; i < 64; ++i)
            pairs[i] = static_cast<uint16_t>(__builtin_bit_cast(uint32_t, static_cast<float>(i)) >> 16);
    }
};
constexpr SmallCodes kSmallCodes;
constexpr int16_t kLargeCodes = 0x4280 - 2 * 64; // added to twice a code from 64 on

// Magnitudes with the highest bits of other elements.
[[gnu::always_inline]] inline __m512i with_sign(__m512i magnitudes, __m512i others) {
    constexpr int kMerge = 0xea; // of bits a, b, c: (a & b) | c
    return _mm512_ternarylogic_epi32(others, _mm512_set1_epi16(int16_t(0x8000)), magnitudes, kMerge);
}

inline __mmask32 low_bits(int64_t count) {
    return count >= 32 ? ~0u : (1u << std::max<int64_t>(count, 0)) - 1;
}

// 32 elements, over the unit of their type; those beyond the mask are 0.
template <class Stored>
[[gnu::always_inline]] inline __m512i load_pairs(const typename Stored::Kv *source, __mmask32 mask = ~0u);

template <>
[[gnu::always_inline]] inline __m512i load_pairs<BFloat16>(const uint16_t *source, __mmask32 mask) {
    return _mm512_maskz_loadu_epi16(mask, source);
}

// Codes are from -127 to 127. Magnitudes below 64 come from a table; above, every bit of the fraction is one
// of the code's.
template <> [[gnu::always_inline]] inline __m512i load_pairs<Int8>(const int8_t *source, __mmask32 mask) {
    const __m512i codes = _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(mask, source)),
                  magnitude = _mm512_abs_epi16(codes);
    const __m512i large =
        _mm512_add_epi16(_mm512_add_epi16(magnitude, magnitude), _mm512_set1_epi16(kLargeCodes));
    const __mmask32 small = _mm512_testn_epi16_mask(magnitude, _mm512_set1_epi16(0x40));
    const __m512i table[2] = {_mm512_load_si512(kSmallCodes.pairs),
                              _mm512_load_si512(kSmallCodes.pairs + 32)};
    const __m512i looked_up = _mm512_permutex2var_epi16(table[0], magnitude, table[1]);
    return with_sign(_mm512_mask_mov_epi16(large, small, looked_up), codes);
}

// e4m3 shifted into place has an exponent that counts from 112 less, for values over 256. Its subnormals are
// normal numbers of bfloat16, which come from a table.
template <> [[gnu::always_inline]] inline __m512i load_pairs<Fp8>(const int8_t *source, __mmask32 mask) {
    constexpr short kExponents = 112 << 7,
                    kSubnormals[8] = {0, 0x3700, 0x3780, 0x37c0, 0x3800, 0x3820, 0x3840, 0x3860};
    const __m512i table = _mm512_castsi128_si512(load<__m128i>(kSubnormals));
    const __m512i codes = _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(mask, source));
    const __m512i shifted = _mm512_slli_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(0x7f)), 4),
                  normal = _mm512_add_epi16(shifted, _mm512_set1_epi16(kExponents));
    const __mmask32 subnormal = _mm512_testn_epi16_mask(codes, _mm512_set1_epi16(0x78));
    const __m512i magnitude = _mm512_mask_permutexvar_epi16(normal, subnormal, codes, table);
    return with_sign(magnitude, codes);
}

// The first `count` of 32 elements, rounded.
inline __m512i round_some(const float *source, int64_t count) {
    const __mmask32 mask = low_bits(count);
    const __m512 low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), source),
                 high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), source + 16);
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

// Elements of q as bfloat16, rounded to nearest even if necessary; zeros fill the last 32.
inline void round_pairs(const Problem &problem, int64_t offset, int64_t count, uint16_t *target) {
    if (problem.q_type == ElementType::Float32) {
        const float *source = static_cast<const float *>(problem.q) + offset;
        for (int64_t i = 0; i < count; i += 32)
            store(target + i, round_some(source + i, count - i));
        return;
    }
    const uint16_t *source = static_cast<const uint16_t *>(problem.q) + offset;
    int64_t i = 0;
    for (; i + 32 <= count; i += 32)
        store(target + i, load<__m512i>(source + i));
    if (i < count)
        store(target + i, _mm512_maskz_loadu_epi16(low_bits(count - i), source + i));
}

[[gnu::always_inline]] inline Floats<16> dot_pairs(Floats<16> sum, Floats<16> a, Floats<16> b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

} // namespace
} // namespace lamina::attention
