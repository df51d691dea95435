// What the AVX-512 kernels of linear layers share: pairs of bfloat16, and sums rounded to bfloat16.
#pragma once

#include "lamina/linear.h"

#include <algorithm>
#include <cstring>
#include <immintrin.h>

// Of one translation unit each: these are compiled for AVX-512 alone.
namespace lamina::linear {
namespace {

inline __m512bh pairs(__m512i words) {
    return reinterpret_cast<__m512bh>(words);
}

// Bias of 16 outputs from `first` on, in float32.
inline __m512 bias_of(const Linear &task, int64_t first) {
    if (!task.bias)
        return _mm512_setzero_ps();
    const auto count = std::clamp<int64_t>(task.outputs - first, 0, 16);
    const __m256i halves =
        _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << count) - 1), task.bias + first);
    return _mm512_castsi512_ps(
        _mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, halves), 16));
}

inline void store_sums(const Linear &task, int64_t row, int64_t first, __m512 sums) {
    const auto count = std::clamp<int64_t>(task.outputs - first, 0, 16);
    _mm256_mask_storeu_epi16(task.out + row * task.outputs + first, static_cast<__mmask16>((1u << count) - 1),
                             reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(sums)));
}

// Writes rows of a panel, from `first_row` on, to task.out: their totals plus the bias.
[[gnu::always_inline]] inline void store_totals(const Linear &task, int64_t first_row, int64_t rows,
                                                int64_t panel, const float (*totals)[kPanel]) {
    const int64_t stride = task.outputs, first = panel * kPanel;
    const auto count = static_cast<uint32_t>(std::min<int64_t>(stride - first, kPanel));
    const __mmask32 mask = ~0u >> (kPanel - count);
    const __m512 low = bias_of(task, first), high = bias_of(task, first + 16);
    uint16_t *out = task.out + first_row * stride + first;
#pragma GCC unroll 16
    for (int64_t row = 0; row < rows; ++row, out += stride)
        _mm512_mask_storeu_epi16(out, mask,
                                 reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(
                                     _mm512_add_ps(_mm512_load_ps(totals[row] + 16), high),
                                     _mm512_add_ps(_mm512_load_ps(totals[row]), low))));
}

// Two neighbouring inputs of a row, for all outputs.
inline __m512bh broadcast_pair(const uint16_t *x) {
    uint32_t word;
    std::memcpy(&word, x, sizeof word);
    return pairs(_mm512_set1_epi32(static_cast<int>(word)));
}

} // namespace
} // namespace lamina::linear
