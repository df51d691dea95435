// lamina._native: rms_norm, rotate, gate, largest, mask, draw. They take addresses and sizes as integers,
// because checking arrays would cost more than the work on few rows: lamina.lowering.native_operators, their
// one caller, guarantees them.
#include "lamina/elementwise.h"

#include <nanobind/nanobind.h>

namespace nb = nanobind;
using namespace lamina::elementwise;

namespace {

template <class T> T *pointer(uintptr_t address) {
    return reinterpret_cast<T *>(address);
}

void rms_norm_binding(ElementType type, uintptr_t x, uintptr_t residual, uintptr_t weight, uintptr_t sum,
                      uintptr_t out, int64_t rows, int64_t width, float epsilon, float offset,
                      bool round_before_weight, int threads, Path path) {
    const RmsNorm task{type,
                       pointer<const void>(x),
                       pointer<const void>(residual),
                       pointer<const void>(weight),
                       pointer<void>(sum),
                       pointer<void>(out),
                       rows,
                       width,
                       epsilon,
                       offset,
                       round_before_weight};
    nb::gil_scoped_release release;
    rms_norm(task, threads, path);
}

void rotate_binding(ElementType type, uintptr_t x, int64_t row_stride, int64_t head_stride, uintptr_t cosines,
                    uintptr_t sines, uintptr_t out, int64_t rows, int64_t heads, int64_t dim,
                    int64_t rotary_dim, int threads, Path path) {
    const Rotation task{type,
                        pointer<const void>(x),
                        row_stride,
                        head_stride,
                        pointer<const void>(cosines),
                        pointer<const void>(sines),
                        pointer<void>(out),
                        rows,
                        heads,
                        dim,
                        rotary_dim};
    nb::gil_scoped_release release;
    rotate(task, threads, path);
}

void gate_binding(ElementType type, Activation activation, uintptr_t gate_address, int64_t gate_stride,
                  uintptr_t up, int64_t up_stride, uintptr_t out, int64_t rows, int64_t width, int threads,
                  Path path) {
    const Gate task{type,
                    activation,
                    pointer<const void>(gate_address),
                    pointer<const void>(up),
                    gate_stride,
                    up_stride,
                    pointer<void>(out),
                    rows,
                    width};
    nb::gil_scoped_release release;
    gate(task, threads, path);
}

void largest_binding(ElementType type, uintptr_t x, int64_t stride, uintptr_t values, uintptr_t indices,
                     int64_t rows, int64_t width, int threads, Path path) {
    const Largest task{
        type, pointer<const void>(x), stride, pointer<float>(values), pointer<int64_t>(indices), rows, width};
    nb::gil_scoped_release release;
    largest(task, threads, path);
}

void mask_binding(ElementType type, uintptr_t x, int64_t stride, uintptr_t bits, uintptr_t out, int64_t rows,
                  int64_t width, int threads, Path path) {
    const Masking task{
        type, pointer<const void>(x), stride, pointer<const uint32_t>(bits), pointer<void>(out), rows, width};
    nb::gil_scoped_release release;
    mask(task, threads, path);
}

void draw_binding(ElementType type, uintptr_t logits, int64_t stride, uintptr_t places, uintptr_t highest,
                  uintptr_t least, uintptr_t temperature, uintptr_t keys, uintptr_t tokens, int64_t rows,
                  int64_t width, int threads, Path path) {
    const Draw task{type,
                    pointer<const void>(logits),
                    stride,
                    pointer<const int64_t>(places),
                    pointer<const float>(highest),
                    pointer<const float>(least),
                    pointer<const float>(temperature),
                    pointer<const uint64_t>(keys),
                    pointer<int64_t>(tokens),
                    rows,
                    width};
    nb::gil_scoped_release release;
    draw(task, threads, path);
}

} // namespace

void register_elementwise(nb::module_ &module) {
    using namespace nb::literals;
    nb::enum_<ElementType>(module, "ElementType", "Element types of tensors given by address.")
        .value("FLOAT32", ElementType::Float32)
        .value("FLOAT16", ElementType::Float16)
        .value("BFLOAT16", ElementType::BFloat16);
    nb::enum_<Activation>(module, "Activation", "Activations of gated layers.")
        .value("SILU", Activation::Silu)
        .value("GELU_TANH", Activation::GeluTanh);
    module.def("rms_norm", &rms_norm_binding, "type"_a, "x"_a, "residual"_a, "weight"_a, "sum"_a, "out"_a,
               "rows"_a, "width"_a, "epsilon"_a, "offset"_a, "round_before_weight"_a, "threads"_a, "path"_a,
               R"(
Write out = x / sqrt(mean(x^2) + epsilon) * (weight + offset) for each row, x being x + residual if there is one.

Tensors are given by address and not checked: x, residual, sum, out [rows, width], weight [width], contiguous.
sum receives x + residual; residual and sum are 0 without a residual. round_before_weight: to the element type,
as well as at the end. Releases the GIL.)");
    module.def("rotate", &rotate_binding, "type"_a, "x"_a, "row_stride"_a, "head_stride"_a, "cosines"_a,
               "sines"_a, "out"_a, "rows"_a, "heads"_a, "dim"_a, "rotary_dim"_a, "threads"_a, "path"_a,
               R"(
Rotate pairs (i, i + rotary_dim / 2) of the first rotary_dim elements of each head into ``out``; copy the others.

Tensors are given by address and not checked: x [rows, heads, dim] with strides in elements, cosines and sines
[rows, rotary_dim], out [rows, heads, dim] contiguous. Releases the GIL.)");
    module.def("gate", &gate_binding, "type"_a, "activation"_a, "gate"_a, "gate_stride"_a, "up"_a,
               "up_stride"_a, "out"_a, "rows"_a, "width"_a, "threads"_a, "path"_a,
               R"(
Write out = activation(gate) * up.

Tensors are given by address and not checked: gate and up [rows, width] with row strides in elements, out
[rows, width] contiguous. Releases the GIL.)");
    module.def("largest", &largest_binding, "type"_a, "x"_a, "stride"_a, "values"_a, "indices"_a, "rows"_a,
               "width"_a, "threads"_a, "path"_a,
               R"(
Write the largest value of each row, NaN if the row holds one, and the first index where it is.

Tensors are given by address and not checked: x [rows, width] with a row stride in elements, values [rows] float32,
indices [rows] int64. Releases the GIL.)");
    module.def("mask", &mask_binding, "type"_a, "x"_a, "stride"_a, "bits"_a, "out"_a, "rows"_a, "width"_a,
               "threads"_a, "path"_a,
               R"(
Copy each row, with -inf in place of the elements whose bit is 0: bit i % 32 of word i / 32.

Tensors are given by address and not checked: x [rows, width] with a row stride in elements, bits uint32
[rows, ceil(width / 32)] and out [rows, width] contiguous. Releases the GIL.)");
    module.def("draw", &draw_binding, "type"_a, "logits"_a, "stride"_a, "places"_a, "highest"_a, "least"_a,
               "temperature"_a, "keys"_a, "tokens"_a, "rows"_a, "width"_a, "threads"_a, "path"_a,
               R"(
Replace each of ``tokens``, the most likely of its row, by a token drawn with the noise of the row's key.

Tensors are given by address and not checked: logits [*, width] with a row stride in elements; and, of length rows,
places int64 (which row of logits), highest and least float32 (tokens with a lower logit are not drawn),
temperature float32, keys and tokens int64. Releases the GIL.)");
}
