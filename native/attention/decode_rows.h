// The products of a task of one query row for tiles of float words: few queries meet every token, so K and V
// are widened in registers on the way to the product instead of being packed first.
#pragma once

#include "multiply.h"

namespace lamina::attention {
namespace {

constexpr int64_t kDecodeRowQueries = 8; // that share a KV head, at most

// Lane i of the result is the sum of rows[i]; rows are used up.
template <int W, int S = 1, int N> inline Floats<W> sum_lanes(Floats<W> (&rows)[N]) {
    Floats<W> sums[N / 2];
    for (int i = 0; i < N / 2; ++i) {
        exchange<W, S>(rows[2 * i], rows[2 * i + 1], std::make_integer_sequence<int, W>{});
        sums[i] = rows[2 * i] + rows[2 * i + 1];
    }
    if constexpr (N > 2)
        return sum_lanes<W, 2 * S>(sums);
    else
        return sums[0];
}

// Scores of QUERIES queries with all tokens of a tile, W scores at a time.
template <class Tile, int QUERIES>
void score_some(const float *query, int64_t stride, int64_t dim, const TileRows<typename Tile::Kv> &rows,
                float *scores, Ahead &ahead) {
    constexpr int W = Tile::W, T = W / QUERIES; // tokens at a time
    using F = Floats<W>;
    for (int64_t token = 0; token < rows.columns; token += T) {
        F sums[W] = {};
        for (int64_t d = 0; d < dim; d += W) {
            if (QUERIES == 1 || d == 0) // more queries have more steps in the other product
                for (int i = 0; i < std::max(1, W * T / 64); ++i)
                    ahead.step();
            F part[QUERIES];
            for (int q = 0; q < QUERIES; ++q)
                part[q] = load<F>(query + q * stride + d);
            for (int t = 0; t < T; ++t) {
                const F key = Tile::Stored::template load_wide<W>(rows.keys[token + t] + d);
                for (int q = 0; q < QUERIES; ++q)
                    sums[q * T + t] += part[q] * key;
            }
        }
        const F all = sum_lanes<W>(sums);
        for (int q = 0; q < QUERIES; ++q)
            std::memcpy(scores + q * kTileTokens + token, reinterpret_cast<const float *>(&all) + q * T,
                        T * sizeof(float));
    }
}

// Scores [queries][tile] of queries [queries][dim] with the tokens of a tile; dim is a multiple of a vector.
template <class Tile, int QUERIES = 4>
void score_rows(int64_t queries, Words query, int64_t dim, const TileRows<typename Tile::Kv> &rows,
                float *scores, Ahead &ahead) {
    for (; queries >= QUERIES; queries -= QUERIES) {
        score_some<Tile, QUERIES>(query.data, query.stride, dim, rows, scores, ahead);
        query.data += QUERIES * query.stride;
        scores += QUERIES * kTileTokens;
    }
    if constexpr (QUERIES > 1)
        score_rows<Tile, QUERIES / 2>(queries, query, dim, rows, scores, ahead);
}

// C += A B for few rows: with enough sums in registers to hide the latency of adding.
template <class Tile, class Source>
void multiply_few(int64_t rows, int64_t columns, Words a, const Source &b, int64_t words, Sums c,
                  Ahead &ahead) {
    if (rows == 1)
        multiply<Tile, 1, 8>(rows, columns, a, b, words, c, ahead);
    else if (rows == 2)
        multiply<Tile, 2, 4>(rows, columns, a, b, words, c, ahead);
    else
        multiply<Tile, 4, 2>(rows, columns, a, b, words, c, ahead);
}

} // namespace
} // namespace lamina::attention
