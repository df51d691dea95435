#include "avx512bf16.h"
#include "panel.h"

namespace lamina::linear {
namespace {

constexpr int64_t kAhead = 4096;   // bytes of the weight prefetched before they are needed
constexpr int64_t kManyBlock = 10; // fastest for hundreds of rows
constexpr int64_t kMostRows = 14;  // registers hold their sums over a panel

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
            const __m512bh pair = broadcast_pair(x + row * task.x_stride + 2 * w);
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

void multiply_panel(const Linear &task, int64_t first_row, int64_t rows, int64_t panel) {
    with_rows<kMostRows>(rows, [&]<int ROWS>() { multiply_rows<ROWS>(task, first_row, panel); });
}

} // namespace

PanelKernel avx512bf16_panels() {
    return {kMostRows, kManyBlock, multiply_panel};
}

} // namespace lamina::linear
