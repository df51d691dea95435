#include "lamina/attention.h"
#include "lamina/thread_pool.h"
#include "widest.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lamina::attention {
namespace {

constexpr int64_t kRowsPerTask = 64;

uint16_t to_bfloat16(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    if (value != value)
        return static_cast<uint16_t>(bits >> 16 | 0x40); // keep NaN a NaN
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#if defined(__x86_64__)
// Converts eights of elements where the processor has an instruction for it; returns how many.
__attribute__((target("avx,f16c"))) int64_t to_float16_by_eights(const float *source, int64_t count,
                                                                 _Float16 *target) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i *>(target + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(source + i), _MM_FROUND_TO_NEAREST_INT));
    return i;
}
#endif

void to_float16(const float *source, int64_t count, _Float16 *target) {
    int64_t i = 0;
#if defined(__x86_64__)
    static const bool has_instruction = __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c");
    if (has_instruction)
        i = to_float16_by_eights(source, count, target);
#endif
    for (; i < count; ++i)
        target[i] = static_cast<_Float16>(source[i]);
}

void convert(const float *source, int64_t count, void *target, ElementType type) {
    switch (type) {
    case ElementType::Float32:
        std::memcpy(target, source, count * sizeof(float));
        break;
    case ElementType::Float16:
        to_float16(source, count, static_cast<_Float16 *>(target));
        break;
    case ElementType::BFloat16:
        for (int64_t i = 0; i < count; ++i)
            static_cast<uint16_t *>(target)[i] = to_bfloat16(source[i]);
        break;
    case ElementType::Int8:
    case ElementType::Fp8:
        break; // append_codes
    }
}

void widen(const void *source, ElementType type, int64_t count, float *target) {
    if (type == ElementType::Float32)
        std::memcpy(target, source, count * sizeof(float));
    else if (type == ElementType::Float16)
        std::copy_n(static_cast<const _Float16 *>(source), count, target);
    else
        std::transform(static_cast<const uint16_t *>(source), static_cast<const uint16_t *>(source) + count,
                       target, [](uint32_t bits) { return std::bit_cast<float>(bits << 16); });
}

constexpr float kMagic =
    12582912.0f; // 1.5 * 2^23: adding it rounds to an integer, in the low bits of the sum

[[gnu::always_inline]] inline uint8_t to_int8(float value) {
    return static_cast<uint8_t>(std::bit_cast<uint32_t>(value + kMagic));
}

// Of a magnitude below 464, from which on rounding exceeds the largest code.
[[gnu::always_inline]] inline uint8_t to_fp8(float value) {
    const auto bits = std::bit_cast<uint32_t>(value), magnitude = bits & 0x7fffffff;
    const uint32_t normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
    const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 512 + kMagic);
    constexpr uint32_t smallest = 0x3c800000; // 2^-6, the smallest normal one; others are multiples of 2^-9
    return static_cast<uint8_t>((magnitude < smallest ? subnormal : normal) | (bits >> 24 & 0x80));
}

// Writes a row's codes and returns its scale; leaves the row multiplied. Codes are made in a loop of their
// own so that no compiler fuses the multiplication with the rounding.
LAMINA_WIDEST float to_codes(float *row, int64_t size, ElementType type, uint8_t *codes) {
    constexpr int32_t infinity = 0x7f800000;
    int32_t peak_bits = 0; // magnitudes are ordered like their bits, NaN above infinity
    for (int64_t i = 0; i < size; ++i)
        peak_bits = std::max(peak_bits, std::bit_cast<int32_t>(row[i]) & 0x7fffffff);
    const auto peak = std::bit_cast<float>(peak_bits);
    const float largest = type == ElementType::Int8 ? 127.0f : 448.0f;
    if (peak_bits == 0 || peak_bits >= infinity) {
        std::fill_n(codes, size, uint8_t{0});
        return peak_bits ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
    }
    // What is so small that the inverse of its scale would overflow becomes 0.
    const float inverse = std::min(largest / peak, std::numeric_limits<float>::max());
    for (int64_t i = 0; i < size; ++i)
        row[i] *= inverse;
    if (type == ElementType::Int8)
        for (int64_t i = 0; i < size; ++i)
            codes[i] = to_int8(row[i]);
    else
        for (int64_t i = 0; i < size; ++i)
            codes[i] = to_fp8(row[i]);
    return peak / largest;
}

} // namespace

void append(void *slab, ElementType slab_type, const void *source, ElementType source_type,
            const int32_t *slots, int64_t count, int64_t row_elements, int threads) {
    const int64_t slab_bytes = row_elements * element_size(slab_type);
    const int64_t source_bytes = row_elements * element_size(source_type);
    parallel_for(threads, (count + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t block) {
        for (int64_t i = block * kRowsPerTask; i < std::min(count, (block + 1) * kRowsPerTask); ++i) {
            std::byte *target = static_cast<std::byte *>(slab) + slots[i] * slab_bytes;
            const std::byte *row = static_cast<const std::byte *>(source) + i * source_bytes;
            if (source_type == slab_type)
                std::memcpy(target, row, slab_bytes);
            else
                convert(reinterpret_cast<const float *>(row), row_elements, target, slab_type);
        }
    });
}

void append_codes(void *slab, ElementType slab_type, float *scales, const void *source,
                  ElementType source_type, const int32_t *slots, int64_t count, int64_t heads, int64_t dim,
                  int threads) {
    const int64_t source_bytes = heads * dim * element_size(source_type);
    parallel_for(threads, (count + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t block) {
        std::vector<float> row(heads * dim);
        for (int64_t i = block * kRowsPerTask; i < std::min(count, (block + 1) * kRowsPerTask); ++i) {
            widen(static_cast<const std::byte *>(source) + i * source_bytes, source_type, heads * dim,
                  row.data());
            for (int64_t head = 0; head < heads; ++head) {
                const int64_t at = slots[i] * heads + head;
                scales[at] = to_codes(row.data() + head * dim, dim, slab_type,
                                      static_cast<uint8_t *>(slab) + at * dim);
            }
        }
    });
}

} // namespace lamina::attention
