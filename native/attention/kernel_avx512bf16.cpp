#include "fma_tile.h"

namespace lamina::attention {
namespace {

// Tiles of bfloat16 pairs, multiplied and summed into floats by one instruction.
struct PairTile {
    using Kv = uint16_t;
    static constexpr int W = 16, kRows = 6, kColumns = 4;
    static constexpr int kWord = 2;
    using F = Floats<W>;

    static F multiply_add(F sum, const float *a, F b) {
        const auto pair = _mm512_castps_si512(_mm512_set1_ps(*a));
        return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(pair), reinterpret_cast<__m512bh>(b));
    }

    static void pack_query(const Problem &problem, int64_t offset, float *packed) {
        const int64_t dim = problem.shape.qk_dim;
        auto *target = reinterpret_cast<uint16_t *>(packed);
        for (int64_t d = 0; d < dim; d += 16) {
            const auto mask = static_cast<__mmask16>(dim - d < 16 ? (1u << (dim - d)) - 1 : 0xffffu);
            __m256i words;
            if (problem.q_type == ElementType::Float32) {
                const float *source = static_cast<const float *>(problem.q) + offset + d;
                words = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, source)));
            } else {
                const uint16_t *source = static_cast<const uint16_t *>(problem.q) + offset + d;
                words = _mm256_maskz_loadu_epi16(mask, source);
            }
            store(target + d, words);
        }
    }

    static void pack_keys(const Kv *const *rows, int64_t dim, float *packed) {
        for (int64_t d = 0; d < dim; d += 2 * W) {
            const int64_t left = dim - d;
            const __mmask32 mask = left < 2 * W ? (1u << left) - 1 : ~0u;
            const int64_t words = std::min<int64_t>(W, (left + 1) / 2);
            for (int64_t t = 0; t < kTileTokens; t += W) {
                F block[W];
                for (int i = 0; i < W; ++i)
                    block[i] = _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(mask, rows[t + i] + d));
                transpose<W>(block);
                for (int64_t i = 0; i < words; ++i)
                    store(packed + (d / 2 + i) * kTileTokens + t, block[i]);
            }
        }
    }

    static Ints<W> load_wide(__mmask16 mask, const Kv *source) {
        const auto halves = reinterpret_cast<Vectors<W>::Halves>(_mm256_maskz_loadu_epi16(mask, source));
        return __builtin_convertvector(halves, Ints<W>);
    }

    // Word (t, d) is the pair of element d of tokens 2t and 2t + 1.
    static void pack_values(const Kv *const *rows, int64_t dim, int64_t padded, float *packed) {
        for (int64_t t = 0; t < kTileTokens; t += 2, packed += padded)
            for (int64_t d = 0; d < padded; d += W) {
                const auto mask =
                    static_cast<__mmask16>(dim - d < W ? (1u << std::max<int64_t>(dim - d, 0)) - 1 : 0xffffu);
                store(packed + d, load_wide(mask, rows[t] + d) | load_wide(mask, rows[t + 1] + d) << 16);
            }
    }

    static void store_probabilities(float *target, int64_t token, F p) {
        store(reinterpret_cast<uint16_t *>(target) + token, _mm512_cvtneps_pbh(p));
    }
};

} // namespace

TaskKernel avx512bf16_kernel(ElementType kv_type) {
    switch (kv_type) {
    case ElementType::BFloat16:
        return attend<PairTile>;
    case ElementType::Float32:
    case ElementType::Float16:
        return fma_kernel<16, 6, 4>(kv_type);
    }
    return nullptr;
}

} // namespace lamina::attention
