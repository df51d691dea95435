// The register-blocked product of both attention matrices: C = rescale * C + A B, where B's rows are whole
// vectors and A's words are broadcast. `Tile` defines words and their product: see attend.h.
#pragma once

#include "ahead.h"
#include "vector_math.h"

namespace lamina::attention {
namespace {

struct Words {
    const float *data;
    int64_t stride; // from row to row

    // N vectors of row w, from a column on.
    template <class Tile, int N> void load_row(int64_t w, int64_t column, Floats<Tile::W> (&row)[N]) const {
        for (int n = 0; n < N; ++n)
            row[n] = load<Floats<Tile::W>>(data + w * stride + column + n * Tile::W);
    }
};

struct Sums {
    float *data;
    int64_t stride;
    const float *rescale; // a factor per row of the old C; null: C starts from 0
};

// C[MR x NV vectors], kept in registers.
template <class Tile, int MR, int NV, class Source>
inline void multiply_block(Words a, const Source &b, int64_t column, int64_t words, Sums c, Ahead &ahead) {
    using F = Floats<Tile::W>;
    F sums[MR][NV];
    for (int m = 0; m < MR; ++m)
        for (int n = 0; n < NV; ++n)
            sums[m][n] =
                c.rescale ? load<F>(c.data + m * c.stride + column + n * Tile::W) * c.rescale[m] : F{};
    for (int64_t w = 0; w < words; ++w) {
        ahead.step();
        F row[NV];
        b.template load_row<Tile, NV>(w, column, row);
        for (int m = 0; m < MR; ++m)
            for (int n = 0; n < NV; ++n)
                sums[m][n] = Tile::multiply_add(sums[m][n], a.data + m * a.stride + w, row[n]);
    }
    for (int m = 0; m < MR; ++m)
        for (int n = 0; n < NV; ++n)
            store(c.data + m * c.stride + column + n * Tile::W, sums[m][n]);
}

// C[rows x NV vectors]: blocks of MR rows, then of fewer.
template <class Tile, int NV, int MR = Tile::kRows, class Source>
void multiply_rows(int64_t rows, Words a, const Source &b, int64_t column, int64_t words, Sums c,
                   Ahead &ahead) {
    for (; rows >= MR; rows -= MR) {
        multiply_block<Tile, MR, NV>(a, b, column, words, c, ahead);
        a.data += MR * a.stride;
        c.data += MR * c.stride;
        c.rescale += c.rescale ? MR : 0;
    }
    if constexpr (MR > 1)
        if (rows > 0)
            multiply_rows<Tile, NV, MR - 1>(rows, a, b, column, words, c, ahead);
}

// C[rows x columns] in panels of NV vectors, then narrower ones; columns is a multiple of Tile::W.
template <class Tile, int MR = Tile::kRows, int NV = Tile::kColumns, class Source>
void multiply(int64_t rows, int64_t columns, Words a, const Source &b, int64_t words, Sums c, Ahead &ahead,
              int64_t column = 0) {
    constexpr int64_t panel = NV * Tile::W;
    for (; columns >= panel; columns -= panel, column += panel)
        multiply_rows<Tile, NV, MR>(rows, a, b, column, words, c, ahead);
    if constexpr (NV > 1)
        if (columns > 0)
            multiply<Tile, MR, NV / 2>(rows, columns, a, b, words, c, ahead, column);
}

} // namespace
} // namespace lamina::attention
