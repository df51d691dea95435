#include "lamina/attention.h"
#include "lamina/thread_pool.h"

#include <algorithm>
#include <bit>
#include <cstring>

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
    }
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

} // namespace lamina::attention
