// The types of elements in a slab, and how they widen to floats.
#pragma once

#include "lamina/attention.h"
#include "vector_math.h"

#if defined(__F16C__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace lamina::attention {
namespace {

struct Float32 {
    using Kv = float;
    static constexpr bool kScaled = false;
    static float widen(Kv value) { return value; }
    template <int W> static Floats<W> load_wide(const Kv *source) { return load<Floats<W>>(source); }
};

struct Float16 {
    using Kv = _Float16;
    static constexpr bool kScaled = false;
    static float widen(Kv value) { return static_cast<float>(value); }
    template <int W> static Floats<W> load_wide(const Kv *source) {
#ifdef __F16C__
        if constexpr (W == 8)
            return reinterpret_cast<Floats<W>>(_mm256_cvtph_ps(load<__m128i>(source)));
#endif
#ifdef __AVX512F__
        if constexpr (W == 16)
            return reinterpret_cast<Floats<W>>(_mm512_maskz_cvtph_ps(0xffff, load<__m256i>(source)));
#endif
        // Shift into a float's fields, then correct the exponent by a multiplication, of subnormals too.
        const auto bits = __builtin_convertvector(load<typename Vectors<W>::Halves>(source), Ints<W>);
        const auto scaled = reinterpret_cast<Floats<W>>((bits & 0x7fff) << 13) * 0x1p112f;
        const Ints<W> special =
            (bits & 0x7c00) == 0x7c00 ? Ints<W>{} + 0x7f800000 : Ints<W>{}; // infinity or NaN
        return reinterpret_cast<Floats<W>>(reinterpret_cast<Ints<W>>(scaled) | special |
                                           (bits & 0x8000) << 16);
    }
};

struct BFloat16 {
    using Kv = uint16_t;
    static constexpr bool kScaled = false;
    static float widen(Kv value) { return __builtin_bit_cast(float, static_cast<uint32_t>(value) << 16); }
    template <int W> static Floats<W> load_wide(const Kv *source) {
        using Halves = typename Vectors<W>::Halves;
        return reinterpret_cast<Floats<W>>(__builtin_convertvector(load<Halves>(source), Ints<W>) << 16);
    }
};

// Sign-extended bytes.
template <int W> Ints<W> load_bytes(const int8_t *source) {
#ifdef __AVX2__
    if constexpr (W == 8)
        return reinterpret_cast<Ints<W>>(
            _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(source))));
#endif
#ifdef __AVX512F__
    if constexpr (W == 16)
        return reinterpret_cast<Ints<W>>(_mm512_maskz_cvtepi8_epi32(0xffff, load<__m128i>(source)));
#endif
    return __builtin_convertvector(load<typename Vectors<W>::Bytes>(source), Ints<W>);
}

// Codes: wide values are the codes' over kUnit, which their scales make up for.
struct Int8 {
    using Kv = int8_t;
    static constexpr bool kScaled = true;
    static constexpr float kUnit = 1;
    static constexpr float widen(Kv code) { return code; }
    template <int W> static Floats<W> load_wide(const Kv *source) {
        return __builtin_convertvector(load_bytes<W>(source), Floats<W>);
    }
};

// e4m3: shifted into place, its exponent counts from 8 less than that of a float16, from 120 less than that
// of a float.
struct Fp8 {
    using Kv = int8_t;
    static constexpr bool kScaled = true;
    static constexpr float kUnit = 256;
    static constexpr float widen(Kv code) {
        const auto bits = static_cast<uint32_t>(int32_t{code}) << 20 & 0x87f00000;
        return __builtin_bit_cast(float, bits) * 0x1p112f;
    }
    template <int W> static Floats<W> load_wide(const Kv *source) {
#ifdef __F16C__
        if constexpr (W == 8) {
            const __m128i bytes =
                _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(source)));
            return reinterpret_cast<Floats<W>>(
                _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(bytes, 7), _mm_set1_epi16(int16_t(0xbf80)))));
        }
#endif
#ifdef __AVX512F__
        if constexpr (W == 16) {
            const __m256i bytes = _mm256_cvtepi8_epi16(load<__m128i>(source));
            const __m256i halves =
                _mm256_and_si256(_mm256_slli_epi16(bytes, 7), _mm256_set1_epi16(int16_t(0xbf80)));
            return reinterpret_cast<Floats<W>>(_mm512_maskz_cvtph_ps(0xffff, halves));
        }
#endif
        return reinterpret_cast<Floats<W>>(load_bytes<W>(source) << 20 & int32_t(0x87f00000)) * 0x1p112f;
    }
};

// An element of an array of any type that is not a code.
inline float widen_any(const void *source, ElementType type, int64_t i) {
    if (type == ElementType::Float32)
        return static_cast<const float *>(source)[i];
    if (type == ElementType::Float16)
        return Float16::widen(static_cast<const _Float16 *>(source)[i]);
    return BFloat16::widen(static_cast<const uint16_t *>(source)[i]);
}

} // namespace
} // namespace lamina::attention
