// Codes become pairs of bfloat16, which holds them exactly, where they are multiplied, and a group's sums are
// scaled once: scale * (sum of x * code - zero * sum of x).
#include "codes_avx512.h"
#include "panel.h"

namespace lamina::linear {
namespace {

constexpr int64_t kAhead = 4096;   // bytes of the codes prefetched before they are needed
constexpr int64_t kManyBlock = 10; // fastest for hundreds of rows
constexpr int64_t kMostRows = 12;  // registers hold their sums over a panel, and what becomes of codes

// Adds the sums [ROWS][2] of one group of inputs, scaled, to totals.
template <int BITS, int ROWS>
void add_group(const Codes &codes, int64_t at, const float *sums_of_x, int64_t groups,
               const __m512 (&sums)[ROWS][2], float (&totals)[ROWS][kPanel]) {
    for (int half = 0; half < 2; ++half) {
        const int64_t first = at + 16 * half;
        const __m512 scale = _mm512_loadu_ps(codes.scales + first);
        const __m512 zero =
            codes.zeros ? _mm512_loadu_ps(codes.zeros + first) : _mm512_set1_ps(Pairs<BITS>::kDefaultZero);
        const __m512 shift = _mm512_add_ps(zero, _mm512_set1_ps(Pairs<BITS>::kOffset));
        for (int row = 0; row < ROWS; ++row) {
            __m512 sum = sums[row][half];
            if (sums_of_x)
                sum = _mm512_fnmadd_ps(shift, _mm512_set1_ps(sums_of_x[row * groups]), sum);
            float *total = totals[row] + 16 * half;
            _mm512_store_ps(total, _mm512_fmadd_ps(scale, sum, _mm512_load_ps(total)));
        }
    }
}

template <int BITS, int ROWS> void multiply_rows(const Linear &task, int64_t first_row, int64_t panel) {
    constexpr int64_t bytes = 2 * kPanel * BITS / 8; // of two inputs
    const Codes &codes = task.codes;
    const int64_t groups = task.inputs / codes.group;
    const uint8_t *weight = static_cast<const uint8_t *>(task.packed) + panel * task.inputs * bytes / 2;
    const uint16_t *x = task.x + first_row * task.x_stride;
    const bool shifts = codes.zeros || BITS == 4;
    const float *sums_of_x = shifts ? sum_all_groups(task, first_row, ROWS) : nullptr;
    alignas(64) float totals[ROWS][kPanel] = {};
    for (int64_t group = 0; group < groups; ++group) {
        __m512 sums[ROWS][2];
        for (auto &row : sums)
            row[0] = row[1] = _mm512_setzero_ps();
        for (int64_t i = 0; i < codes.group; i += 2, weight += bytes, x += 2) {
            __m512bh low, high;
            Pairs<BITS>::load(weight, low, high);
            _mm_prefetch(reinterpret_cast<const char *>(weight) + kAhead, _MM_HINT_T0);
            for (int row = 0; row < ROWS; ++row) {
                const __m512bh pair = broadcast_pair(x + row * task.x_stride);
                sums[row][0] = _mm512_dpbf16_ps(sums[row][0], pair, low);
                sums[row][1] = _mm512_dpbf16_ps(sums[row][1], pair, high);
            }
        }
        add_group<BITS, ROWS>(codes, (panel * groups + group) * kPanel,
                              sums_of_x ? sums_of_x + group : nullptr, groups, sums, totals);
    }
    store_totals(task, first_row, ROWS, panel, totals);
}

void multiply_panel(const Linear &task, int64_t first_row, int64_t rows, int64_t panel) {
    with_bits_and_rows<kMostRows>(
        task.codes, rows, [&]<int BITS, int ROWS>() { multiply_rows<BITS, ROWS>(task, first_row, panel); });
}

} // namespace

PanelKernel avx512bf16_codes() {
    return {kMostRows, kManyBlock, multiply_panel};
}

} // namespace lamina::linear
