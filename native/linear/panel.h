// One instruction set's product of some rows with one panel of a packed weight.
#pragma once

#include "lamina/linear.h"

namespace lamina::linear {

constexpr int64_t kMostRows = 14; // registers hold their sums over a panel

// Rows [0, rows) of task.x times panel number `panel`, into their rows of task.out; rows is at most
// kMostRows.
void multiply_panel(const Linear &task, int64_t first_row, int64_t rows, int64_t panel);

} // namespace lamina::linear
