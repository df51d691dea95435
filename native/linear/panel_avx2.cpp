// Without an instruction for pairs, both halves of a pair are widened to float32: a shift or a mask.
#include "panel.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <immintrin.h>
#include <utility>
#include <vector>

namespace lamina::linear {
namespace {

constexpr int64_t kAhead = 4096; // bytes of the weight prefetched before they are needed
constexpr int64_t kWidth = 8;    // floats of a register
constexpr int64_t kMostRows = 6; // registers hold their sums over half a panel
constexpr int64_t kFewRows = 3;  // registers hold their sums over a whole panel

__m256 widened(__m128i halves) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

// float32 [rows, inputs]: widened once for all outputs of a panel.
const float *widen(const Linear &task, int64_t first_row, int64_t rows) {
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
__m256 bias_of(const Linear &task, int64_t first) {
    alignas(16) uint16_t halves[kWidth] = {};
    const auto count = std::clamp<int64_t>(task.outputs - first, 0, kWidth);
    if (task.bias)
        std::memcpy(halves, task.bias + first, static_cast<size_t>(count) * sizeof *halves);
    return widened(_mm_load_si128(reinterpret_cast<const __m128i *>(halves)));
}

// Rounded to the nearest bfloat16, ties to even; a NaN stays one.
void store_sums(const Linear &task, int64_t row, int64_t first, __m256 sums) {
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

// Loops are unrolled so that sums stay in registers: ROWS rows times VECTORS * 8 outputs of a panel, from its
// output `within` on.
template <int ROWS, int VECTORS>
void multiply_part(const Linear &task, const float *x, int64_t first_row, int64_t panel, int64_t within) {
    const int64_t words = task.inputs / 2;
    const uint32_t *weight = task.packed + panel * kPanel * words + within;
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
    __m256 sums[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v)
            sums[row][v] = _mm256_setzero_ps();
    for (int64_t w = 0; w < words; ++w, weight += kPanel, x += 2) {
        __m256i pairs[VECTORS];
        __m256 half[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) {
            pairs[v] = _mm256_load_si256(reinterpret_cast<const __m256i *>(weight + v * kWidth));
            half[v] = _mm256_castsi256_ps(_mm256_slli_epi32(pairs[v], 16));
        }
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v += 2)
            _mm_prefetch(reinterpret_cast<const char *>(weight + v * kWidth) + kAhead, _MM_HINT_T0);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v)
                sums[row][v] =
                    _mm256_fmadd_ps(_mm256_broadcast_ss(x + row * task.inputs), half[v], sums[row][v]);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v)
            half[v] = _mm256_castsi256_ps(_mm256_and_si256(pairs[v], upper));
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v)
                sums[row][v] =
                    _mm256_fmadd_ps(_mm256_broadcast_ss(x + row * task.inputs + 1), half[v], sums[row][v]);
    }
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) {
        const int64_t first = panel * kPanel + within + v * kWidth;
        const __m256 bias = bias_of(task, first);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row)
            store_sums(task, first_row + row, first, _mm256_add_ps(sums[row][v], bias));
    }
}

template <int ROWS> void multiply_rows(const Linear &task, int64_t first_row, int64_t panel) {
    constexpr int vectors = ROWS <= kFewRows ? 4 : 2;
    const float *x = widen(task, first_row, ROWS);
    for (int64_t within = 0; within < kPanel; within += vectors * kWidth)
        multiply_part<ROWS, vectors>(task, x, first_row, panel, within);
}

using Multiply = void (*)(const Linear &, int64_t, int64_t);

template <size_t... I> constexpr Multiply choose(int64_t rows, std::index_sequence<I...>) {
    constexpr Multiply table[] = {multiply_rows<static_cast<int>(I) + 1>...};
    return table[rows - 1];
}

void multiply_panel(const Linear &task, int64_t first_row, int64_t rows, int64_t panel) {
    choose(rows, std::make_index_sequence<kMostRows>{})(task, first_row, panel);
}

} // namespace

PanelKernel avx2_panels() {
    return {kMostRows, multiply_panel};
}

} // namespace lamina::linear
