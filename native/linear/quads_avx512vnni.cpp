// Products of codes by codes, four inputs at a time: VNNI multiplies unsigned codes of the weight by signed
// ones of x and adds up whole numbers, which a group's scales turn into float32.
#include "codes_avx512.h"
#include "quads.h"

#include <bit>
#include <limits>

namespace lamina::linear {
namespace {

constexpr int64_t kAhead = 4096;  // bytes of the codes prefetched before they are needed
constexpr int64_t kManyBlock = 6; // fastest for hundreds of rows
constexpr int64_t kMostRows = 12; // registers hold their sums over a panel, and four inputs of it
constexpr float kLargest = 127;
constexpr float kLeast = 0x1p-100f; // of a group's magnitudes: 127 over a smaller one may overflow
constexpr uint32_t kInfinity = 0x7f80;

__mmask32 first_of(int64_t count) {
    return count < 32 ? (1u << count) - 1 : ~0u;
}

__m512 widen(__m256i halves) {
    return _mm512_castsi512_ps(
        _mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, halves), 16));
}

// Magnitudes of bfloat16 are ordered as their bits are.
uint32_t largest_magnitude(const uint16_t *x, int64_t count) {
    __m512i most = _mm512_setzero_si512();
    for (int64_t i = 0; i < count; i += 32) {
        const __m512i bits = _mm512_maskz_loadu_epi16(first_of(count - i), x + i);
        most = _mm512_max_epu16(most, _mm512_and_si512(bits, _mm512_set1_epi16(0x7fff)));
    }
    alignas(64) uint16_t lanes[32];
    _mm512_store_si512(lanes, most);
    const auto *parts = reinterpret_cast<const __m128i *>(lanes);
    const __m128i largest =
        _mm_max_epu16(_mm_max_epu16(_mm_load_si128(parts), _mm_load_si128(parts + 1)),
                      _mm_max_epu16(_mm_load_si128(parts + 2), _mm_load_si128(parts + 3)));
    const __m128i inverted =
        _mm_xor_si128(largest, _mm_set1_epi16(-1)); // of which the least is found at once
    return static_cast<uint16_t>(~_mm_extract_epi16(_mm_minpos_epu16(inverted), 0));
}

int32_t add_lanes(__m512i numbers) {
    alignas(64) int32_t lanes[16];
    _mm512_store_si512(lanes, numbers);
    const auto *parts = reinterpret_cast<const __m128i *>(lanes);
    __m128i four = _mm_add_epi32(_mm_add_epi32(_mm_load_si128(parts), _mm_load_si128(parts + 1)),
                                 _mm_add_epi32(_mm_load_si128(parts + 2), _mm_load_si128(parts + 3)));
    four = _mm_hadd_epi32(four, four);
    return _mm_cvtsi128_si32(_mm_hadd_epi32(four, four));
}

__m512i broadcast_quad(const int8_t *x) {
    int32_t word;
    std::memcpy(&word, x, sizeof word);
    return _mm512_set1_epi32(word);
}

// Adds the products of four unsigned codes with four signed ones to each sum. As _mm512_dpbusd_epi32, for
// which GCC 12 copies sums between registers and memory.
void add_products(__m512i &sums, __m512i unsigned_codes, __m512i signed_codes) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(unsigned_codes), "v"(signed_codes));
}

template <int BITS, int ROWS> void multiply_rows(const Linear &task, int64_t first_row, int64_t panel) {
    constexpr int64_t bytes = 4 * kPanel * BITS / 8; // of four inputs
    const Codes &codes = task.codes;
    const ByteRows &rows = *task.byte_rows;
    const int64_t size = codes.x_group, groups = task.inputs / size, per_scale = codes.group / size;
    const uint8_t *weight = static_cast<const uint8_t *>(task.packed) + panel * task.inputs * bytes / 4;
    const int8_t *x = rows.values + first_row * rows.stride;
    const float *x_scales = rows.scales + first_row * groups;
    const int32_t *x_sums = rows.sums + first_row * groups;
    const int32_t offset = offset_of(codes);
    alignas(64) float totals[ROWS][kPanel] = {};
    for (int64_t group = 0; group < groups; ++group) {
        __m512i sums[ROWS][2];
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; ++row)
            sums[row][0] = sums[row][1] = _mm512_set1_epi32(-offset * x_sums[row * groups + group]);
        for (int64_t i = 0; i < size; i += 4, weight += bytes, x += 4) {
            __m512i low, high;
            load_quads<BITS>(weight, low, high);
            _mm_prefetch(reinterpret_cast<const char *>(weight) + kAhead, _MM_HINT_T0);
            if constexpr (BITS == 8)
                _mm_prefetch(reinterpret_cast<const char *>(weight) + kAhead + 64, _MM_HINT_T0);
#pragma GCC unroll 16
            for (int row = 0; row < ROWS; ++row) {
                const __m512i quad = broadcast_quad(x + row * rows.stride);
                add_products(sums[row][0], low, quad);
                add_products(sums[row][1], high, quad);
            }
        }
        const int64_t at = (panel * (groups / per_scale) + group / per_scale) * kPanel;
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const __m512 scale = _mm512_loadu_ps(codes.scales + at + 16 * half);
#pragma GCC unroll 16
            for (int row = 0; row < ROWS; ++row) {
                __m512 sum = _mm512_maskz_cvtepi32_ps(0xffff, sums[row][half]);
                if (codes.zeros)
                    sum = _mm512_fnmadd_ps(_mm512_loadu_ps(codes.zeros + at + 16 * half),
                                           _mm512_set1_ps(static_cast<float>(x_sums[row * groups + group])),
                                           sum);
                const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(x_scales[row * groups + group]));
                float *total = totals[row] + 16 * half;
                _mm512_store_ps(total, _mm512_fmadd_ps(both, sum, _mm512_load_ps(total)));
            }
        }
    }
    store_totals(task, first_row, ROWS, panel, totals);
}

void multiply_panel(const Linear &task, int64_t first_row, int64_t rows, int64_t panel) {
    with_bits_and_rows<kMostRows>(
        task.codes, rows, [&]<int BITS, int ROWS>() { multiply_rows<BITS, ROWS>(task, first_row, panel); });
}

} // namespace

void quantize_row_avx512vnni(const uint16_t *x, int64_t inputs, int64_t group, int8_t *values, float *scales,
                             int32_t *sums) {
    const __m512i ones = _mm512_set1_epi8(1);
    for (int64_t first = 0; first < inputs; first += group, x += group, values += group) {
        const uint32_t bits = largest_magnitude(x, group);
        const auto most = std::bit_cast<float>(bits << 16);
        const bool none = most < kLeast || bits >= kInfinity;
        const __m512 inverse = _mm512_set1_ps(none ? 0.0f : kLargest / most);
        const __mmask16 kept = none ? 0 : 0xffff;
        __m512i total = _mm512_setzero_si512();
        for (int64_t i = 0; i < group; i += 16) {
            const auto mask = static_cast<__mmask16>(first_of(std::min<int64_t>(group - i, 16)));
            const __m512 scaled = _mm512_mul_ps(widen(_mm256_maskz_loadu_epi16(mask, x + i)), inverse);
            const __m128i codes = _mm512_maskz_cvtsepi32_epi8(kept, _mm512_maskz_cvtps_epi32(kept, scaled));
            _mm_mask_storeu_epi8(values + i, mask, codes);
            total = _mm512_dpbusd_epi32(total, ones, _mm512_zextsi128_si512(codes));
        }
        *scales++ = bits >= kInfinity ? std::numeric_limits<float>::quiet_NaN()
                    : none            ? 0.0f
                                      : most / kLargest;
        *sums++ = add_lanes(total);
    }
}

PanelKernel avx512vnni_quads() {
    return {kMostRows, kManyBlock, multiply_panel};
}

} // namespace lamina::linear
