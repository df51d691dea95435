#include "fma_tile.h"

namespace lamina::attention {
namespace {

constexpr int64_t kMaxDirectDim = 256;

// Tiles of bfloat16 pairs, multiplied and summed into floats by one instruction.
template <int64_t TOKENS> struct PairTile {
    static constexpr int64_t kTokens = TOKENS;
    using Kv = uint16_t;
    static constexpr int W = 16, kRows = 6, kColumns = 4;
    static constexpr int kTallRows = 8, kTallColumns = 2; // for 7 or 8 queries in one block
    static constexpr int kWord = 2;
    using F = Floats<W>;

    static F multiply_add(F sum, const float *a, F b) { return dot_pairs(sum, _mm512_set1_ps(*a), b); }

    // Reading-ahead steps of one tile and head: those of direct_scores and of the product with its values.
    static int64_t steps(const Shape &shape) {
        return kTokens / 4 * (shape.qk_dim / 32) + kSoftmaxSteps +
               kTokens / 2 * std::max<int64_t>(1, shape.v_dim / 64);
    }

    static void scores(const TileRows<Kv> &rows, int64_t dim, int64_t queries, const Workspace &work,
                       const float *query, Ahead &ahead) {
        if (!direct(dim, queries))
            packed_scores<PairTile>(rows, dim, queries, work, query, ahead);
        else if (queries > 4)
            direct_scores<2>(rows.keys, dim, work, query, ahead);
        else
            direct_scores<1>(rows.keys, dim, work, query, ahead);
    }

    // Whether scores are taken from the keys as they lie in the slab.
    static bool direct(int64_t dim, int64_t queries) {
        return queries <= 8 && dim % 8 == 0 && dim <= kMaxDirectDim;
    }

    // Lays a KV head's packed queries out as direct_scores reads them: [parts][groups of 4 queries][vector].
    static void arrange_queries(int64_t dim, int64_t queries, float *packed, int64_t stride) {
        if (!direct(dim, queries))
            return;
        const int64_t groups = (queries + 3) / 4;
        F arranged[kMaxDirectDim / 8 * 2];
        for (int64_t part = 0; part < dim / 8; ++part)
            for (int64_t g = 0; g < groups; ++g)
                arranged[part * groups + g] = gather_quarters(packed + 4 * g * stride + 4 * part, stride);
        std::memcpy(packed, arranged, sizeof(F) * (dim / 8 * groups));
    }

    template <int G>
    static void direct_scores(const Kv *const *keys, int64_t dim, const Workspace &work, const float *query,
                              Ahead &ahead) {
        if (dim == 64)
            direct_scores<G, 64>(keys, dim, work, query, ahead);
        else if (dim == 128)
            direct_scores<G, 128>(keys, dim, work, query, ahead);
        else
            direct_scores<G, 0>(keys, dim, work, query, ahead);
    }

    // Scores of up to 4 * G queries without packing the keys: a vector holds 8 elements of each of 4 queries,
    // and meets the same 8 elements of a key in all its quarters. DIM is `dim` where the compiler may unroll
    // for it, or 0.
    template <int G, int DIM>
    static void direct_scores(const Kv *const *keys, int64_t dim, const Workspace &work, const float *query,
                              Ahead &ahead) {
        const int64_t parts = (DIM ? DIM : dim) / 8;
        F packed[(DIM ? DIM : kMaxDirectDim) / 8][G];
        for (int64_t part = 0; part < parts; ++part)
            for (int g = 0; g < G; ++g)
                packed[part][g] = load<F>(query + (part * G + g) * W);
        for (int64_t t = 0; t < kTokens; t += 4) {
            for (int64_t d = 0; d < dim; d += 32)
                ahead.step();
            F sums[G][4] = {};
            for (int64_t part = 0; part < parts; ++part)
                for (int i = 0; i < 4; ++i) {
                    const F key = broadcast_quarter(keys[t + i] + 8 * part);
                    for (int g = 0; g < G; ++g)
                        sums[g][i] = dot_pairs(sums[g][i], packed[part][g], key);
                }
            for (int g = 0; g < G; ++g)
                scatter_quarters(sum_quarters(sums[g]), work.scores + 4 * g * kTokens + t, kTokens);
        }
    }

    static F dot_pairs(F sum, F a, F b) {
        return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
    }

    static F broadcast_quarter(const Kv *source) {
        return _mm512_castsi512_ps(_mm512_maskz_broadcast_i32x4(0xffff, load<__m128i>(source)));
    }

    static F gather_quarters(const float *source, int64_t stride) {
        F quarters;
        for (int i = 0; i < 4; ++i)
            std::memcpy(reinterpret_cast<float *>(&quarters) + 4 * i, source + i * stride, 16);
        return quarters;
    }

    static void scatter_quarters(F quarters, float *target, int64_t stride) {
        for (int i = 0; i < 4; ++i)
            std::memcpy(target + i * stride, reinterpret_cast<const float *>(&quarters) + 4 * i, 16);
    }

    // Quarter q of the result holds the sums of quarter q of each of the 4 vectors.
    static F sum_quarters(const F (&v)[4]) { return add_pairs(add_pairs(v[0], v[1]), add_pairs(v[2], v[3])); }

    // In each quarter: a0 + a1, a2 + a3, b0 + b1, b2 + b3.
    static F add_pairs(F a, F b) {
        return __builtin_shufflevector(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
               __builtin_shufflevector(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
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

    static void pack_keys(const Kv *const *rows, int64_t dim, float *packed, Ahead &ahead) {
        for (int64_t d = 0; d < dim; d += 2 * W) {
            const __mmask32 mask = low_bits(dim - d);
            const int64_t words = std::min<int64_t>(W, (dim - d + 1) / 2);
            for (int64_t t = 0; t < kTokens; t += W) {
                F block[W];
                for (int i = 0; i < W / 8; ++i)
                    ahead.step();
                for (int i = 0; i < W; ++i)
                    block[i] = _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(mask, rows[t + i] + d));
                transpose<W>(block);
                for (int64_t i = 0; i < words; ++i)
                    store(packed + (d / 2 + i) * kTokens + t, block[i]);
            }
        }
    }

    // Words of N x 16 columns from the rows of two tokens.
    template <int N> static void value_words(const Kv *const *rows, int64_t column, F (&words)[N]) {
        const Kv *even = rows[0] + column, *odd = rows[1] + column;
        if constexpr (N == 1) {
            words[0] = pair_up(_mm512_castsi256_si512(load<__m256i>(even)), interleave(0),
                               _mm512_castsi256_si512(load<__m256i>(odd)));
        } else {
            for (int n = 0; n < N; n += 2) {
                const auto a = load<__m512i>(even + n * W), b = load<__m512i>(odd + n * W);
                words[n] = pair_up(a, interleave(0), b);
                words[n + 1] = pair_up(a, interleave(W), b);
            }
        }
    }

    static F pair_up(__m512i even, __m512i indices, __m512i odd) {
        return _mm512_castsi512_ps(_mm512_permutex2var_epi16(even, indices, odd));
    }

    // Word (t, d) is the pair of element d of tokens 2t and 2t + 1.
    static void pack_values(const Kv *const *rows, int64_t dim, int64_t padded, float *packed, Ahead &ahead) {
        const auto low = interleave(0), high = interleave(W);
        for (int64_t t = 0; t < kTokens; t += 2, packed += padded) {
            ahead.step();
            for (int64_t d = 0; d < padded; d += 2 * W) {
                const __mmask32 mask = low_bits(dim - d);
                const __m512i even = _mm512_maskz_loadu_epi16(mask, rows[t] + d);
                const __m512i odd = _mm512_maskz_loadu_epi16(mask, rows[t + 1] + d);
                store(packed + d, _mm512_permutex2var_epi16(even, low, odd));
                if (d + W < padded)
                    store(packed + d + W, _mm512_permutex2var_epi16(even, high, odd));
            }
        }
    }

    // Indices that pair elements first, first + 1, ... of two vectors.
    static __m512i interleave(int first) {
        Vectors<2 * W>::Halves indices;
        for (int i = 0; i < W; ++i) {
            indices[2 * i] = static_cast<uint16_t>(first + i);
            indices[2 * i + 1] = static_cast<uint16_t>(2 * W + first + i);
        }
        return reinterpret_cast<__m512i>(indices);
    }

    static __mmask32 low_bits(int64_t count) {
        return count >= 32 ? ~0u : (1u << std::max<int64_t>(count, 0)) - 1;
    }

    static void store_probabilities(float *target, int64_t token, F p) {
        store(reinterpret_cast<uint16_t *>(target) + token, _mm512_cvtneps_pbh(p));
    }
};

// A single query computes so little that reading is all: a short tile stays in the first-level cache from
// when it is asked for. More queries gain from the longer one, which takes less work a token.
void attend_pairs(const Problem &problem, const Task &task, const Workspace &work) {
    const int64_t group = problem.shape.query_heads / problem.shape.kv_heads;
    if ((task.row_end - task.row_begin) * group == 1)
        attend<PairTile<kTileTokens / 2>>(problem, task, work);
    else
        attend<PairTile<kTileTokens>>(problem, task, work);
}

} // namespace

TaskKernel avx512bf16_kernel(ElementType kv_type) {
    switch (kv_type) {
    case ElementType::BFloat16:
        return attend_pairs;
    case ElementType::Float32:
    case ElementType::Float16:
        return fma_kernel<16, 6, 4>(kv_type);
    }
    return nullptr;
}

} // namespace lamina::attention
