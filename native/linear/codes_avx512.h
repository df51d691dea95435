// What the kernels of codes for AVX-512 and for AMX share: codes widened, and a group's sums scaled.
#pragma once

#include "avx512bf16.h"

#include <vector>

// Of one translation unit each, like all that is compiled for an instruction set.
namespace lamina::linear {
namespace {

inline __m512i widen_signed(const uint8_t *bytes) {
    const __m512i numbers =
        _mm512_maskz_cvtepi8_epi32(0xffff, _mm_load_si128(reinterpret_cast<const __m128i *>(bytes)));
    return _mm512_castps_si512(_mm512_maskz_cvtepi32_ps(0xffff, numbers));
}

// The codes of a panel for two inputs, plus kOffset. kDefaultZero: the zero point of weights that have none.
template <int BITS> struct Pairs;

// A float of 8 significant bits is a bfloat16 and zeros.
template <> struct Pairs<8> {
    static constexpr float kOffset = 0, kDefaultZero = 0;
    static __m512bh half(const uint8_t *first, const uint8_t *second) {
        return pairs(
            _mm512_or_si512(_mm512_maskz_srli_epi32(0xffff, widen_signed(first), 16), widen_signed(second)));
    }
    static void load(const uint8_t *codes, __m512bh &low, __m512bh &high) {
        low = half(codes, codes + kPanel);
        high = half(codes + kPanel / 2, codes + kPanel * 3 / 2);
    }
};

// As the upper four bits of the fraction of a number from 16 on, a code becomes 16 plus itself.
template <> struct Pairs<4> {
    static constexpr float kOffset = 16, kDefaultZero = 8;
    static __m512bh with_offset(__m512i fractions) {
        constexpr int kMerge = 0xea; // of bits a, b, c: (a & b) | c
        return pairs(_mm512_ternarylogic_epi32(fractions, _mm512_set1_epi32(0x00780078),
                                               _mm512_set1_epi32(0x41804180), kMerge));
    }
    static void load(const uint8_t *codes, __m512bh &low, __m512bh &high) {
        const auto *bytes = reinterpret_cast<const __m128i *>(codes);
        const __m512i first = _mm512_maskz_cvtepu8_epi32(0xffff, _mm_load_si128(bytes)),
                      second = _mm512_maskz_cvtepu8_epi32(0xffff, _mm_load_si128(bytes + 1)),
                      both = _mm512_or_si512(first, _mm512_maskz_slli_epi32(0xffff, second, 16));
        low = with_offset(_mm512_maskz_slli_epi32(0xffff, both, 3));
        high = with_offset(_mm512_maskz_srli_epi32(0xffff, both, 1));
    }
};

// The sums of a row's groups of inputs.
inline void sum_groups(const uint16_t *x, int64_t groups, int64_t size, float *sums) {
    const __m512bh ones = pairs(_mm512_set1_epi32(0x3f803f80));
    for (int64_t group = 0; group < groups; ++group, x += size) {
        __m512 sum = _mm512_setzero_ps();
        for (int64_t i = 0; i < size; i += 32) {
            const auto mask = static_cast<__mmask32>(size - i < 32 ? (1u << (size - i)) - 1 : ~0u);
            sum = _mm512_dpbf16_ps(sum, ones, pairs(_mm512_maskz_loadu_epi16(mask, x + i)));
        }
        alignas(64) float lanes[16];
        _mm512_store_ps(lanes, sum);
        const __m256 eight = _mm256_add_ps(_mm256_load_ps(lanes), _mm256_load_ps(lanes + 8));
        __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
        four = _mm_hadd_ps(four, four);
        sums[group] = _mm_cvtss_f32(_mm_hadd_ps(four, four));
    }
}

// float32 [rows, groups].
inline const float *sum_all_groups(const Linear &task, int64_t first_row, int64_t rows) {
    thread_local std::vector<float> buffer;
    const int64_t groups = task.inputs / task.codes.group;
    buffer.resize(static_cast<size_t>(rows * groups));
    for (int64_t row = 0; row < rows; ++row)
        sum_groups(task.x + (first_row + row) * task.x_stride, groups, task.codes.group,
                   buffer.data() + row * groups);
    return buffer.data();
}

// The offset of unsigned codes against those of the weight: with zero points, of 4 bits, none.
inline int32_t offset_of(const Codes &codes) {
    return codes.bits == 8 ? 128 : codes.zeros ? 0 : 8;
}

template <int BITS> inline void load_quads(const uint8_t *codes, __m512i &low, __m512i &high) {
    low = _mm512_load_si512(codes);
    if constexpr (BITS == 8) {
        high = _mm512_load_si512(codes + 64);
    } else {
        const __m512i nibble = _mm512_set1_epi8(0x0f);
        high = _mm512_and_si512(_mm512_maskz_srli_epi16(~0u, low, 4), nibble);
        low = _mm512_and_si512(low, nibble);
    }
}

} // namespace
} // namespace lamina::linear
