// Elements of a slab as pairs of bfloat16, which holds codes exactly.
#pragma once

#include "stored.h"

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

} // namespace
} // namespace lamina::attention
