// Codes are widened to float32 where they are multiplied, and a group's sums are scaled once:
// scale * (sum of x * code - zero * sum of x).
#include "avx2.h"
#include "panel.h"

#include <numeric>

namespace lamina::linear {
namespace {

constexpr int64_t kAhead = 2048; // bytes of the codes prefetched before they are needed
constexpr int64_t kMostRows = 6; // registers hold their sums over half a panel
constexpr int64_t kFewRows = 2;  // registers hold their sums over a whole panel

// The codes of VECTORS * 8 outputs for one input, from output `within` of the panel on.
template <int BITS, int VECTORS> void load_codes(const uint8_t *codes, int64_t within, __m256 *half) {
    if constexpr (BITS == 8) {
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v)
            half[v] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(
                _mm_loadl_epi64(reinterpret_cast<const __m128i *>(codes + within + v * kWidth))));
    } else {
        const __m128i both = _mm_load_si128(reinterpret_cast<const __m128i *>(codes));
        const __m128i low = _mm_set1_epi8(0x0f);
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v += 2) {
            const bool upper = within + v * kWidth >= kPanel / 2;
            const __m128i nibbles = _mm_and_si128(upper ? _mm_srli_epi16(both, 4) : both, low);
            half[v] = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(nibbles));
            half[v + 1] = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(nibbles, 8)));
        }
    }
}

// ROWS rows times VECTORS * 8 outputs of a panel, from its output `within` on. sums_of_x: [ROWS][groups].
template <int BITS, int ROWS, int VECTORS>
void multiply_part(const Linear &task, const float *x, const float *sums_of_x, int64_t first_row,
                   int64_t panel, int64_t within) {
    constexpr int64_t bytes = kPanel * BITS / 8; // of one input
    const Codes &codes = task.codes;
    const int64_t size = codes.group, groups = task.inputs / size;
    const uint8_t *weight = static_cast<const uint8_t *>(task.packed) + panel * task.inputs * bytes;
    __m256 totals[ROWS][VECTORS];
    for (auto &row : totals)
        for (__m256 &total : row)
            total = _mm256_setzero_ps();
    for (int64_t group = 0; group < groups; ++group) {
        __m256 sums[ROWS][VECTORS];
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v)
                sums[row][v] = _mm256_setzero_ps();
        for (int64_t i = 0; i < size; ++i, weight += bytes, ++x) {
            __m256 half[VECTORS];
            load_codes<BITS, VECTORS>(weight, within, half);
            if constexpr (ROWS <= kFewRows)
                _mm_prefetch(reinterpret_cast<const char *>(weight) + kAhead, _MM_HINT_T0);
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; ++v)
                    sums[row][v] =
                        _mm256_fmadd_ps(_mm256_broadcast_ss(x + row * task.inputs), half[v], sums[row][v]);
        }
        const int64_t at = (panel * groups + group) * kPanel + within;
        for (int v = 0; v < VECTORS; ++v) {
            const __m256 scale = _mm256_loadu_ps(codes.scales + at + v * kWidth);
            const __m256 zero = codes.zeros ? _mm256_loadu_ps(codes.zeros + at + v * kWidth)
                                            : _mm256_set1_ps(BITS == 8 ? 0.0f : 8.0f);
            for (int row = 0; row < ROWS; ++row) {
                const __m256 shift = _mm256_broadcast_ss(sums_of_x + row * groups + group);
                totals[row][v] =
                    _mm256_fmadd_ps(scale, _mm256_fnmadd_ps(zero, shift, sums[row][v]), totals[row][v]);
            }
        }
    }
    for (int v = 0; v < VECTORS; ++v) {
        const int64_t first = panel * kPanel + within + v * kWidth;
        const __m256 bias = bias_of(task, first);
        for (int row = 0; row < ROWS; ++row)
            store_sums(task, first_row + row, first, _mm256_add_ps(totals[row][v], bias));
    }
}

// float32 [rows, groups].
const float *sum_groups(const Linear &task, const float *x, int64_t rows) {
    thread_local std::vector<float> buffer;
    const int64_t size = task.codes.group, count = rows * (task.inputs / size);
    buffer.resize(static_cast<size_t>(count));
    for (int64_t group = 0; group < count; ++group, x += size) {
        float lanes[kWidth] = {};
        for (int64_t i = 0; i < size; ++i)
            lanes[i % kWidth] += x[i];
        buffer[static_cast<size_t>(group)] = std::reduce(lanes, lanes + kWidth);
    }
    return buffer.data();
}

template <int BITS, int ROWS> void multiply_rows(const Linear &task, int64_t first_row, int64_t panel) {
    constexpr int vectors = ROWS <= kFewRows ? 4 : 2;
    const float *x = widen(task, first_row, ROWS);
    const float *sums = sum_groups(task, x, ROWS);
    for (int64_t within = 0; within < kPanel; within += vectors * kWidth)
        multiply_part<BITS, ROWS, vectors>(task, x, sums, first_row, panel, within);
}

void multiply_panel(const Linear &task, int64_t first_row, int64_t rows, int64_t panel) {
    with_bits_and_rows<kMostRows>(
        task.codes, rows, [&]<int BITS, int ROWS>() { multiply_rows<BITS, ROWS>(task, first_row, panel); });
}

} // namespace

PanelKernel avx2_codes() {
    return {kMostRows, kMostRows, multiply_panel};
}

} // namespace lamina::linear
