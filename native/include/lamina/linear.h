// Linear layers on bfloat16: rows times a weight that was packed once, in bfloat16 or as codes of 8 or 4
// bits. At the few rows of a decode step the time goes into reading the weight. Plain pointers; nothing here
// knows Python or a framework.
#pragma once

#include "lamina/attention.h"

#include <cstdint>
#include <span>

namespace lamina::linear {

// Whether there are kernels for this processor's instructions: AVX-512 with bfloat16 pairs, or AVX2.
bool available();

// Whether there are kernels for codes with an x_group: AVX-512 with VNNI.
bool takes_byte_rows();

// A weight [outputs, inputs] cut into panels of kPanel outputs: [outputs / kPanel][inputs / 2][kPanel] pairs
// of neighbouring inputs, the last panel filled up with zeros. inputs is even.
constexpr int64_t kPanel = 32;

constexpr int64_t packed_pairs(int64_t outputs, int64_t inputs) {
    return (outputs + kPanel - 1) / kPanel * kPanel * (inputs / 2);
}

// packed: packed_pairs(outputs, inputs) pairs, 64-byte aligned. weight: bfloat16 [outputs, inputs].
void pack(const uint16_t *weight, int64_t outputs, int64_t inputs, uint32_t *packed, int threads);

// A weight as codes: (code - zero) * scale, with a scale and a zero for each output and `group` inputs.
struct Codes {
    int bits;            // 8: signed; 4: 0 to 15
    int64_t group;       // divides the inputs
    const float *scales; // [outputs / kPanel][inputs / group][kPanel], the last panel filled up
    const float *zeros;  // the same; null: 0 for codes of 8 bits, 8 for those of 4
    int64_t x_group = 0; // inputs of x that share a scale, if x is rounded to 8 bits too; 0: x stays bfloat16

    // Codes lie in panels as pairs do: [outputs / kPanel][inputs][kPanel], of 4 bits those of outputs i and
    // i + 16 of a panel in one byte, the first in the lower half. With an x_group, which is a multiple of 4
    // and divides `group`, in quads of neighbouring inputs: [outputs / kPanel][inputs / 4][kPanel][4], and
    // codes of 8 bits plus 128.
    static constexpr int64_t bytes(int bits, int64_t outputs, int64_t inputs) {
        return (outputs + kPanel - 1) / kPanel * kPanel * inputs * bits / 8;
    }
};

struct ByteRows;

// out = x * weight^T + bias, summed in float32 and rounded once to bfloat16.
struct Linear {
    const uint16_t *x; // [rows, inputs], elements of a row next to each other
    int64_t x_stride;
    const void *packed;   // pairs, or codes; 64-byte aligned
    const uint16_t *bias; // [outputs], or null
    uint16_t *out;        // [rows, outputs], contiguous
    int64_t rows, inputs, outputs;
    Codes codes{};                       // of 0 bits: `packed` holds pairs
    const ByteRows *byte_rows = nullptr; // x rounded to 8 bits; multiply() sets it for codes with an x_group
};

// Several of one x, rows and inputs: threads share out the panels of all of them together. The instruction
// set is the processor's widest, unless a test chooses another.
void multiply(std::span<const Linear> group, int threads);
void multiply(std::span<const Linear> group, int threads, attention::Path path);

} // namespace lamina::linear
