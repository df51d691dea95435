// Tiles of float words for any vector width: KV of every type is widened to float while it is packed.
#pragma once

#include "attend.h"

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
    static float widen(Kv code) { return code; }
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
    static float widen(Kv code) {
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

// W floats a vector; blocks of ROWS x COLUMNS vectors stay in registers.
template <class Element, int WIDTH, int ROWS, int COLUMNS> struct FmaTile {
    using Kv = typename Element::Kv;
    using Stored = Element;
    static constexpr int W = WIDTH, kRows = ROWS, kColumns = COLUMNS;
    static constexpr int64_t kTokens = kTileTokens;
    static constexpr int kWord = 1;
    using F = Floats<W>;

    static F multiply_add(F sum, const float *a, F b) { return sum + *a * b; }

    // Prefetch steps of one tile and head: each word row of both products makes one.
    static int64_t steps(const Shape &shape) {
        return kSoftmaxSteps + kTokens * ((shape.qk_dim + shape.v_dim) / 64);
    }

    static void pack_query(const Problem &problem, int64_t offset, float *packed) {
        for (int64_t d = 0; d < problem.shape.qk_dim; ++d)
            packed[d] = widen_any(problem.q, problem.q_type, offset + d);
    }

    static void pack_keys(const TileRows<Kv> &rows, int64_t dim, float *packed, Ahead &ahead) {
        int64_t d = 0;
        for (; d + W <= dim; d += W)
            for (int64_t t = 0; t < rows.columns; t += W) {
                F block[W];
                for (int i = 0; i < W / 8; ++i)
                    ahead.step();
                for (int i = 0; i < W; ++i)
                    block[i] = Element::template load_wide<W>(rows.keys[t + i] + d);
                transpose<W>(block);
                for (int i = 0; i < W; ++i)
                    store(packed + (d + i) * kTokens + t, block[i]);
            }
        for (; d < dim; ++d)
            for (int64_t t = 0; t < rows.columns; ++t)
                packed[d * kTokens + t] = Element::widen(rows.keys[t][d]);
    }

    template <int N> static void value_words(const Kv *const *rows, int64_t column, F (&words)[N]) {
        for (int n = 0; n < N; ++n)
            words[n] = Element::template load_wide<W>(rows[0] + column + n * W);
    }

    static void pack_values(const TileRows<Kv> &rows, int64_t dim, int64_t padded, float *packed,
                            Ahead &ahead) {
        for (int64_t t = 0; t < rows.columns; ++t, packed += padded) {
            if (t % 2)
                ahead.step();
            int64_t d = 0;
            for (; d + W <= dim; d += W)
                store(packed + d, Element::template load_wide<W>(rows.values[t] + d));
            for (; d < dim; ++d)
                packed[d] = Element::widen(rows.values[t][d]);
            for (; d < padded; ++d)
                packed[d] = 0;
        }
    }

    static void store_probabilities(float *target, int64_t token, F p) { store(target + token, p); }
};

template <int WIDTH, int ROWS, int COLUMNS> TaskKernel fma_kernel(ElementType kv_type) {
    switch (kv_type) {
    case ElementType::Float32:
        return attend<FmaTile<Float32, WIDTH, ROWS, COLUMNS>>;
    case ElementType::Float16:
        return attend<FmaTile<Float16, WIDTH, ROWS, COLUMNS>>;
    case ElementType::BFloat16:
        return attend<FmaTile<BFloat16, WIDTH, ROWS, COLUMNS>>;
    case ElementType::Int8:
        return attend<FmaTile<Int8, WIDTH, ROWS, COLUMNS>>;
    case ElementType::Fp8:
        return attend<FmaTile<Fp8, WIDTH, ROWS, COLUMNS>>;
    }
    return nullptr;
}

} // namespace
} // namespace lamina::attention
