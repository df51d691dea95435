// Codes become pairs of bfloat16, which holds them exactly, where they are multiplied, and a group's sums are
// scaled once: scale * (sum of x * code - zero * sum of x).
#include "avx512bf16.h"
#include "panel.h"

#include <vector>

namespace lamina::linear {
namespace {

constexpr int64_t kAhead = 4096;   // bytes of the codes prefetched before they are needed
constexpr int64_t kManyBlock = 10; // fastest for hundreds of rows
constexpr int64_t kMostRows = 12;  // registers hold their sums over a panel, and what becomes of codes

__m512i widen_signed(const uint8_t *bytes) {
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
void sum_groups(const uint16_t *x, int64_t groups, int64_t size, float *sums) {
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
const float *sum_all_groups(const Linear &task, int64_t first_row, int64_t rows) {
    thread_local std::vector<float> buffer;
    const int64_t groups = task.inputs / task.codes.group;
    buffer.resize(static_cast<size_t>(rows * groups));
    for (int64_t row = 0; row < rows; ++row)
        sum_groups(task.x + (first_row + row) * task.x_stride, groups, task.codes.group,
                   buffer.data() + row * groups);
    return buffer.data();
}

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
    store_totals<ROWS>(task, first_row, panel, totals);
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
