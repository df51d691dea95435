// Tiles of float words for any vector width: KV of every type is widened to float while it is packed.
#pragma once

#include "attend.h"

namespace lamina::attention {
namespace {

// W floats a vector; blocks of ROWS x COLUMNS vectors stay in registers.
template <class Element, int WIDTH, int ROWS, int COLUMNS> struct FmaTile {
    using Kv = typename Element::Kv;
    using Stored = Element;
    static constexpr int W = WIDTH, kRows = ROWS, kColumns = COLUMNS;
    using F = Floats<W>;

    static F multiply_add(F sum, const float *a, F b) { return sum + *a * b; }

    // Prefetch steps of one tile and head: each word row of both products makes one.
    static int64_t steps(const Shape &shape) {
        return kSoftmaxSteps + kTileTokens * ((shape.qk_dim + shape.v_dim) / 64);
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
                    store(packed + (d + i) * kTileTokens + t, block[i]);
            }
        for (; d < dim; ++d)
            for (int64_t t = 0; t < rows.columns; ++t)
                packed[d * kTileTokens + t] = Element::widen(rows.keys[t][d]);
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
