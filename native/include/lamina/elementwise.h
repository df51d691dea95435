// The operations of a dense layer between its matrix products, each in one pass: root-mean-square norm,
// rotary embedding and gated activation; and what draws tokens from logits. Values are computed in float and
// rounded to the element type wherever the separate operators would have stored them. Plain pointers; nothing
// here knows Python or a framework.
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

// Copies each row, with -infinity in place of the elements whose bit is 0: bit i % 32 of word i / 32.
struct Masking {
    ElementType type;
    const void *x; // [rows, width], elements of a row next to each other
    int64_t stride;
    const uint32_t *bits; // [rows, ceil(width / 32)]
    void *out;            // [rows, width], contiguous
    int64_t rows, width;
};

// Draws a token from each row by the Gumbel-max trick: of the tokens whose logit is at least `least`, the one
// with the largest (logit - highest) / temperature + g, where g = -log(-log(1 - u)) is Gumbel noise and
// u = (h + 1/2) / 2^32 comes from 32 bits h of a hash of the row's key and the token. Of equals, the first.
// Noise belongs to a token: an error in the logits changes the draw only if the two best are that close.
struct Draw {
    ElementType type;
    const void *logits; // elements of a row next to each other
    int64_t stride;
    const int64_t *places;    // [rows], which row of `logits`
    const float *highest;     // [rows], the row's largest logit, finite
    const float *least;       // [rows], at most `highest`
    const float *temperature; // [rows], positive
    const uint64_t *keys;     // [rows]
    int64_t *tokens;          // [rows]: the first token with the largest logit; then the token drawn
    int64_t rows, width;
};

// On up to `threads` threads, fewer where there is little to do. `path` must be one of available_paths().
void rms_norm(const RmsNorm &task, int threads, Path path);
void rotate(const Rotation &task, int threads, Path path);
void gate(const Gate &task, int threads, Path path);
void largest(const Largest &task, int threads, Path path);
void mask(const Masking &task, int threads, Path path);
void draw(const Draw &task, int threads, Path path);

} // namespace lamina::elementwise
