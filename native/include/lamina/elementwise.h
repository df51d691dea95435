// The operations of a dense layer between its matrix products, each in one pass: root-mean-square norm,
// rotary embedding and gated activation. Values are computed in float and rounded to the element type
// wherever the separate operators would have stored them. Plain pointers; nothing here knows Python or a
// framework.
#pragma once

#include "lamina/attention.h"

#include <cstdint>

namespace lamina::elementwise {

using attention::ElementType;
using attention::Path;

// out = x / sqrt(mean(x^2) + epsilon) * (weight + offset) for each row, x being x + residual if there is one.
struct RmsNorm {
    ElementType type;
    const void *x;        // [rows, width]
    const void *residual; // [rows, width], or null
    const void *weight;   // [width]
    void *sum;            // [rows, width], x + residual; null without a residual
    void *out;            // [rows, width]
    int64_t rows, width;
    float epsilon;
    float offset;
    bool round_before_weight; // to the element type, as well as at the end
};

// Rotates pairs (i, i + rotary_dim / 2) of the first rotary_dim elements of each head and copies the others.
struct Rotation {
    ElementType type;
    const void *x; // [rows, heads, dim], elements of a head next to each other
    int64_t row_stride, head_stride;
    const void *cosines, *sines; // [rows, rotary_dim]
    void *out;                   // [rows, heads, dim], contiguous
    int64_t rows, heads, dim, rotary_dim;
};

enum class Activation { Silu, GeluTanh };

// out = activation(gate) * up
struct Gate {
    ElementType type;
    Activation activation;
    const void *gate, *up; // [rows, width], elements of a row next to each other
    int64_t gate_stride, up_stride;
    void *out; // [rows, width], contiguous
    int64_t rows, width;
};

// The largest value of each row, NaN if it holds one, and the first index of it.
struct Largest {
    ElementType type;
    const void *x; // [rows, width], elements of a row next to each other
    int64_t stride;
    float *values;    // [rows]
    int64_t *indices; // [rows]; anything in range where the value is NaN
    int64_t rows, width;
};

// On up to `threads` threads, fewer where there is little to do. `path` must be one of available_paths().
void rms_norm(const RmsNorm &task, int threads, Path path);
void rotate(const Rotation &task, int threads, Path path);
void gate(const Gate &task, int threads, Path path);
void largest(const Largest &task, int threads, Path path);

} // namespace lamina::elementwise
