// Products by matrix tiles (AMX), which the kernel must permit to each process.
#pragma once

#include "panel.h"

namespace lamina::linear {

constexpr int64_t kTileRows = 16;             // of x in a tile
constexpr int64_t kTiledRows = 2 * kTileRows; // of x that are multiplied together
constexpr int64_t kTileWords = 16;            // of a panel in a tile: pairs or quads of inputs

// Words that are multiplied at a time: the most that a tile holds and that divide `words`.
constexpr int64_t tile_step(int64_t words) {
    int64_t step = kTileWords;
    while (words % step != 0)
        --step;
    return step;
}

// Rows [first_row, first_row + rows) of task.x times panels [first, last), into their rows of task.out. The
// weight is in bfloat16 or codes, and x in bfloat16 or, with an x_group, rounded to 8 bits.
void multiply_amx_tiles(const Linear &task, int64_t first_row, int64_t rows, int64_t first, int64_t last);

} // namespace lamina::linear
