// The register-blocked product of both attention matrices: C = rescale * C + A B, where B's rows are whole
// vectors and A's words are broadcast. `Tile` says what a word is and how words multiply: see attend.h.
#pragma once

#include "ahead.h"
#include "vector_math.h"

namespace lamina::attention {
namespace {

struct Words {
    const float *data;
    int64_t stride; // from row to row
};

struct Sums {
    float *data;
    int64_t stride;
    const float *rescale; // a factor per row for what C holds; null: C starts from 0
};

// C[MR x NV vectors], kept in registers.
template <class Tile, int MR, int NV>
inline void multiply_block(Words a, Words b, int64_t words, Sums c, Ahead &ahead) {
    using F = Floats<Tile::W>;
    F sums[MR][NV];
    for (int m = 0; m < MR; ++m)
        for (int n = 0; n < NV; ++n)
            sums[m][n] = c.rescale ? load<F>(c.data + m * c.stride + n * Tile::W) * c.rescale[m] : F{};
    for (int64_t w = 0; w < words; ++w) {
        ahead.step();
        F row[NV];
        for (int n = 0; n < NV; ++n)
            row[n] = load<F>(b.data + w * b.stride + n * Tile::W);
        for (int m = 0; m < MR; ++m)
            for (int n = 0; n < NV; ++n)
                sums[m][n] = Tile::multiply_add(sums[m][n], a.data + m * a.stride + w, row[n]);
    }
    for (int m = 0; m < MR; ++m)
        for (int n = 0; n < NV; ++n)
            store(c.data + m * c.stride + n * Tile::W, sums[m][n]);
}

// C[rows x NV vectors]: blocks of MR rows, then of fewer.
template <class Tile, int NV, int MR = Tile::kRows>
void multiply_rows(int64_t rows, Words a, Words b, int64_t words, Sums c, Ahead &ahead) {
    for (; rows >= MR; rows -= MR) {
        multiply_block<Tile, MR, NV>(a, b, words, c, ahead);
        a.data += MR * a.stride;
        c.data += MR * c.stride;
        c.rescale += c.rescale ? MR : 0;
    }
    if constexpr (MR > 1)
        if (rows > 0)
            multiply_rows<Tile, NV, MR - 1>(rows, a, b, words, c, ahead);
}

// C[rows x columns]; columns is a multiple of Tile::W.
template <class Tile>
void multiply(int64_t rows, int64_t columns, Words a, Words b, int64_t words, Sums c, Ahead &ahead) {
    constexpr int64_t panel = Tile::kColumns * Tile::W;
    for (; columns >= panel; columns -= panel, b.data += panel, c.data += panel)
        multiply_rows<Tile, Tile::kColumns>(rows, a, b, words, c, ahead);
    for (; columns > 0; columns -= Tile::W, b.data += Tile::W, c.data += Tile::W)
        multiply_rows<Tile, 1>(rows, a, b, words, c, ahead);
}

} // namespace
} // namespace lamina::attention
