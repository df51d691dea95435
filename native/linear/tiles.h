// Products by matrix tiles (AMX), which the kernel must permit to each process.
#pragma once

#include "panel.h"

namespace lamina::linear {

constexpr int64_t kTileRows = 16;  // of x in a tile
constexpr int64_t kFewestRows = 5; // of x in bfloat16 that tiles multiply faster than other kernels
constexpr int64_t kTileWords = 16; // of a panel in a tile: pairs or quads of inputs

// Words that are multiplied at a time: the most that a tile holds and that divide `words`.
constexpr int64_t tile_step(int64_t words) {
    int64_t step = kTileWords;
    while (words % step != 0)
        --step;
    return step;
}

// A weight in bfloat16 (`dense`) or as codes, and x in bfloat16 or, with an x_group, rounded to 8 bits.
PanelKernel amx_tiles(bool dense);

// Rows [first_row, first_row + rows) of task.x times panels [first, last) of a weight as codes: faster than a
// panel at a time, because sums of x are found once.
void multiply_amx_codes(const Linear &task, int64_t first_row, int64_t rows, int64_t first, int64_t last);

} // namespace lamina::linear
