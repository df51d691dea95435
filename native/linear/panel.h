// One instruction set's product of some rows with one panel of a packed weight.
#pragma once

#include "lamina/linear.h"

#include <utility>

namespace lamina::linear {

// Of one translation unit each, like all that is compiled for an instruction set.
namespace {

// Calls call.operator()<rows>() for rows from 1 to MOST, whose sums then stay in registers.
template <int MOST, class Call> void with_rows(int64_t rows, Call call) {
    [&]<int... LESS_ONE>(std::integer_sequence<int, LESS_ONE...>) {
        ((rows == LESS_ONE + 1 ? call.template operator()<LESS_ONE + 1>() : void()), ...);
    }(std::make_integer_sequence<int, MOST>{});
}

// Calls call.operator()<BITS, rows>() for codes of 4 or 8 bits and rows from 1 to MOST.
template <int MOST, class Call> void with_bits_and_rows(const Codes &codes, int64_t rows, Call call) {
    with_rows<MOST>(rows, [&]<int ROWS>() {
        if (codes.bits == 8)
            call.template operator()<8, ROWS>();
        else
            call.template operator()<4, ROWS>();
    });
}

} // namespace

struct PanelKernel {
    int64_t most_rows;  // in one call
    int64_t many_block; // in one call if there are many rows: fewer, so that less of x competes for the cache
    // Rows [first_row, first_row + rows) of task.x times panel number `panel`, into their rows of task.out.
    void (*multiply)(const Linear &task, int64_t first_row, int64_t rows, int64_t panel);
};

// Of a weight in bfloat16.
PanelKernel avx2_panels();
PanelKernel avx512bf16_panels();

// Of a weight as codes. With pairs, groups have an even number of inputs.
PanelKernel avx2_codes();
PanelKernel avx512bf16_codes();

} // namespace lamina::linear
