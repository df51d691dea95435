#include "panel.h"

#include <algorithm>
#include <cstring>
#include <immintrin.h>
#include <utility>

namespace lamina::linear {
namespace {

constexpr int64_t kAhead = 4096;  // bytes of the weight prefetched before they are needed
constexpr int64_t kMostRows = 14; // registers hold their sums over a panel

__m512bh pairs(__m512i words) {
    return reinterpret_cast<__m512bh>(words);
}

// Bias of 16 outputs from `first` on, in float32.
__m512 bias_of(const Linear &task, int64_t first) {
    if (!task.bias)
        return _mm512_setzero_ps();
    const auto count = std::clamp<int64_t>(task.outputs - first, 0, 16);
    const __m256i halves =
        _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << count) - 1), task.bias + first);
    return _mm512_castsi512_ps(
        _mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, halves), 16));
}

void store_sums(const Linear &task, int64_t row, int64_t first, __m512 sums) {
    const auto count = std::clamp<int64_t>(task.outputs - first, 0, 16);
    _mm256_mask_storeu_epi16(task.out + row * task.outputs + first, static_cast<__mmask16>((1u << count) - 1),
                             reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(sums)));
}

template <int ROWS> void multiply_rows(const Linear &task, int64_t first_row, int64_t panel) {
    const int64_t words = task.inputs / 2;
    const uint32_t *weight = static_cast<const uint32_t *>(task.packed) + panel * kPanel * words;
    const uint16_t *x = task.x + first_row * task.x_stride;
    __m512 sums[ROWS][2];
    for (auto &row : sums)
        row[0] = row[1] = _mm512_setzero_ps();
    for (int64_t w = 0; w < words; ++w, weight += kPanel) {
        const __m512bh low = pairs(_mm512_load_si512(weight)), high = pairs(_mm512_load_si512(weight + 16));
        _mm_prefetch(reinterpret_cast<const char *>(weight) + kAhead, _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char *>(weight + 16) + kAhead, _MM_HINT_T0);
        for (int row = 0; row < ROWS; ++row) {
            uint32_t word;
            std::memcpy(&word, x + row * task.x_stride + 2 * w, sizeof word);
            const __m512bh pair = pairs(_mm512_set1_epi32(static_cast<int>(word)));
            sums[row][0] = _mm512_dpbf16_ps(sums[row][0], pair, low);
            sums[row][1] = _mm512_dpbf16_ps(sums[row][1], pair, high);
        }
    }
    const int64_t first = panel * kPanel;
    const __m512 bias[2] = {bias_of(task, first), bias_of(task, first + 16)};
    for (int row = 0; row < ROWS; ++row)
        for (int half = 0; half < 2; ++half)
            store_sums(task, first_row + row, first + 16 * half, _mm512_add_ps(sums[row][half], bias[half]));
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

PanelKernel avx512bf16_panels() {
    return {kMostRows, multiply_panel};
}

} // namespace lamina::linear
