// Without an instruction for pairs, both halves of a pair are widened to float32: a shift or a mask.
#include "avx2.h"
#include "panel.h"

namespace lamina::linear {
namespace {

constexpr int64_t kAhead = 4096; // bytes of the weight prefetched before they are needed
constexpr int64_t kMostRows = 6; // registers hold their sums over half a panel
constexpr int64_t kFewRows = 3;  // registers hold their sums over a whole panel

// Loops are unrolled so that sums stay in registers: ROWS rows times VECTORS * 8 outputs of a panel, from its
// output `within` on.
template <int ROWS, int VECTORS>
void multiply_part(const Linear &task, const float *x, int64_t first_row, int64_t panel, int64_t within) {
    const int64_t words = task.inputs / 2;
    const uint32_t *weight = static_cast<const uint32_t *>(task.packed) + panel * kPanel * words + within;
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

void multiply_panel(const Linear &task, int64_t first_row, int64_t rows, int64_t panel) {
    with_rows<kMostRows>(rows, [&]<int ROWS>() { multiply_rows<ROWS>(task, first_row, panel); });
}

} // namespace

PanelKernel avx2_panels() {
    return {kMostRows, kMostRows, multiply_panel};
}

} // namespace lamina::linear
