// What the AVX2 kernels of linear layers share: rows widened to float32, and sums rounded to bfloat16.
#pragma once

#include "lamina/linear.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <immintrin.h>
#include <vector>

// Of one translation unit each: these are compiled for AVX2 alone.
namespace lamina::linear {
namespace {

constexpr int64_t kWidth = 8; // floats of a register

inline __m256 widened(__m128i halves) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

// float32 [rows, inputs]: widened once for all outputs of a panel.
inline const float *widen(const Linear &task, int64_t first_row, int64_t rows) {
    thread_local std::vector<float> buffer;
    buffer.resize(static_cast<size_t>(task.inputs * rows));
    float *to = buffer.data();
    for (int64_t row = 0; row < rows; ++row, to += task.inputs) {
        const uint16_t *x = task.x + (first_row + row) * task.x_stride;
        int64_t i = 0;
        for (; i + kWidth <= task.inputs; i += kWidth)
            _mm256_storeu_ps(to + i, widened(_mm_loadu_si128(reinterpret_cast<const __m128i *>(x + i))));
        for (; i < task.inputs; ++i)
            to[i] = std::bit_cast<float>(static_cast<uint32_t>(x[i]) << 16);
    }
    return buffer.data();
}

// Bias of 8 outputs from `first` on.
inline __m256 bias_of(const Linear &task, int64_t first) {
    alignas(16) uint16_t halves[kWidth] = {};
    const auto count = std::clamp<int64_t>(task.outputs - first, 0, kWidth);
    if (task.bias)
        std::memcpy(halves, task.bias + first, static_cast<size_t>(count) * sizeof *halves);
    return widened(_mm_load_si128(reinterpret_cast<const __m128i *>(halves)));
}

// Rounded to the nearest bfloat16, ties to even; a NaN stays one.
inline void store_sums(const Linear &task, int64_t row, int64_t first, __m256 sums) {
    const __m256i bits = _mm256_castps_si256(sums), one = _mm256_set1_epi32(1);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
    const __m256i bias = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), odd);
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    const __m256i broken = _mm256_castps_si256(_mm256_cmp_ps(sums, sums, _CMP_UNORD_Q));
    const __m256i words = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), broken);
    const __m128i halves =
        _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    const auto count = std::clamp<int64_t>(task.outputs - first, 0, kWidth);
    std::memcpy(task.out + row * task.outputs + first, &halves,
                static_cast<size_t>(count) * sizeof(uint16_t));
}

} // namespace
} // namespace lamina::linear
