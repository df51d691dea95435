#include "decode_avx512bf16.h"
#include "fma_tile.h"

namespace lamina::attention {
namespace {

// Tiles of bfloat16 pairs, multiplied and summed into floats by one instruction.
template <class Element> struct PairTile {
    static constexpr int64_t kTokens = kTileTokens;
    using Stored = Element;
    using Kv = typename Stored::Kv;
    static constexpr int W = 16, kRows = 6, kColumns = 4;
    static constexpr int kWord = 2;
    using F = Floats<W>;

    static F multiply_add(F sum, const float *a, F b) {
        return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(_mm512_set1_ps(*a)),
                                reinterpret_cast<__m512bh>(b));
    }

    // Prefetch steps of one tile and head: those of packing keys and of both products.
    static int64_t steps(const Shape &shape) {
        return kTokens * shape.qk_dim / 256 + shape.qk_dim / 2 + kSoftmaxSteps +
               kTokens / 2 * std::max<int64_t>(1, shape.v_dim / 64);
    }

    static void pack_query(const Problem &problem, int64_t offset, float *packed) {
        round_pairs(problem, offset, problem.shape.qk_dim, reinterpret_cast<uint16_t *>(packed));
    }

    static void pack_keys(const TileRows<Kv> &rows, int64_t dim, float *packed, Ahead &ahead) {
        for (int64_t d = 0; d < dim; d += 2 * W) {
            const __mmask32 mask = low_bits(dim - d);
            const int64_t words = std::min<int64_t>(W, (dim - d + 1) / 2);
            for (int64_t t = 0; t < rows.columns; t += W) {
                F block[W];
                for (int i = 0; i < W / 8; ++i)
                    ahead.step();
                for (int i = 0; i < W; ++i)
                    block[i] = _mm512_castsi512_ps(load_pairs<Stored>(rows.keys[t + i] + d, mask));
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
            constexpr __mmask32 half = 0xffff;
            words[0] = pair_up(load_pairs<Stored>(even, half), interleave(0), load_pairs<Stored>(odd, half));
        } else {
            for (int n = 0; n < N; n += 2) {
                const __m512i a = load_pairs<Stored>(even + n * W), b = load_pairs<Stored>(odd + n * W);
                words[n] = pair_up(a, interleave(0), b);
                words[n + 1] = pair_up(a, interleave(W), b);
            }
        }
    }

    static F pair_up(__m512i even, __m512i indices, __m512i odd) {
        return _mm512_castsi512_ps(_mm512_permutex2var_epi16(even, indices, odd));
    }

    // Word (t, d) is the pair of element d of tokens 2t and 2t + 1.
    static void pack_values(const TileRows<Kv> &rows, int64_t dim, int64_t padded, float *packed,
                            Ahead &ahead) {
        const auto low = interleave(0), high = interleave(W);
        for (int64_t t = 0; t < rows.columns; t += 2, packed += padded) {
            ahead.step();
            for (int64_t d = 0; d < padded; d += 2 * W) {
                const __mmask32 mask = low_bits(dim - d);
                const __m512i even = load_pairs<Stored>(rows.values[t] + d, mask);
                const __m512i odd = load_pairs<Stored>(rows.values[t + 1] + d, mask);
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

template <class Stored, int QUERIES>
bool decode(int64_t queries, const Problem &problem, const Task &task, const Workspace &work) {
    if (queries == QUERIES)
        DecodeTask<Stored, QUERIES>(problem, task, work).run();
    return queries == QUERIES;
}

template <class Stored, int... LESS_ONE>
bool decode_any(int64_t queries, const Problem &problem, const Task &task, const Workspace &work,
                std::integer_sequence<int, LESS_ONE...>) {
    return (decode<Stored, LESS_ONE + 1>(queries, problem, task, work) || ...);
}

// Queries of codes are multiplied as pairs only if they are bfloat16: nothing is rounded but probabilities.
template <class Stored> void attend_pairs(const Problem &problem, const Task &task, const Workspace &work) {
    if (Stored::kScaled && problem.q_type != ElementType::BFloat16) {
        attend<FmaTile<Stored, 16, 6, 4>>(problem, task, work);
        return;
    }
    const int64_t group = problem.shape.query_heads / problem.shape.kv_heads;
    const bool one_row = task.row_end - task.row_begin == 1;
    if (!one_row || !decodable(problem.shape) ||
        !decode_any<Stored>(group, problem, task, work, std::make_integer_sequence<int, kDecodeQueries>{}))
        attend<PairTile<Stored>>(problem, task, work);
}

} // namespace

TaskKernel avx512bf16_kernel(ElementType kv_type) {
    switch (kv_type) {
    case ElementType::BFloat16:
        return attend_pairs<BFloat16>;
    case ElementType::Int8:
        return attend_pairs<Int8>;
    case ElementType::Fp8:
        return attend_pairs<Fp8>;
    case ElementType::Float32:
    case ElementType::Float16:
        return fma_kernel<16, 6, 4>(kv_type);
    }
    return nullptr;
}

} // namespace lamina::attention
