// Rows of x as codes of 8 bits, and products of these with weights whose codes lie in quads.
#pragma once

#include "panel.h"

#include <memory>

namespace lamina::linear {

// x as (code * scale), with a scale for each row and `group` inputs: its largest magnitude over 127. A group
// that is not finite has NaN for its scale.
struct ByteRows {
    int64_t stride;       // bytes from one row to the next
    const int8_t *values; // [rows, stride]
    const float *scales;  // [rows, inputs / group]
    const int32_t *sums;  // [rows, inputs / group], of the codes
};

// Writes codes, scales and sums of one row; `group` is a multiple of 4.
using QuantizeRow = void (*)(const uint16_t *x, int64_t inputs, int64_t group, int8_t *values, float *scales,
                             int32_t *sums);

void quantize_row_avx512vnni(const uint16_t *x, int64_t inputs, int64_t group, int8_t *values, float *scales,
                             int32_t *sums);

PanelKernel avx512vnni_quads();

} // namespace lamina::linear
