// Matrix tiles (AMX): eight registers of up to 16 rows of 64 bytes.
#pragma once

#include <cstdint>

namespace lamina::attention {
namespace {

constexpr int64_t kTileHeight = 16;

// Gives tile n `rows[n]` rows of 64 bytes.
inline void configure_tiles(const uint8_t (&rows)[8]) {
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    } shapes;
    for (int tile = 0; tile < 8; ++tile) {
        shapes.rows[tile] = rows[tile];
        shapes.row_bytes[tile] = rows[tile] > 0 ? 64 : 0; // the processor rejects bytes of no rows
    }
    asm volatile("ldtilecfg %0" ::"m"(shapes));
}

// The compiler must know that these read memory, which GCC 12 does not know of its intrinsics.
template <int TILE> void load_tile(const void *from, int64_t stride_words) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride_words * 4), "i"(TILE) : "memory");
}

template <int TILE> void store_tile(void *to, int64_t stride_words) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride_words * 4), "i"(TILE) : "memory");
}

// Adds to tile SUMS the products of pairs of bfloat16: rows of tile A times columns of tile B.
template <int SUMS, int A, int B> void add_products() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(A), "i"(B));
}

} // namespace
} // namespace lamina::attention
