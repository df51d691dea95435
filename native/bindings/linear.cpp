// lamina._native: linear layers on packed weights. They take addresses and sizes as integers, because
// checking arrays would cost more than the work on few rows: lamina.lowering.native_operators, their one
// caller, guarantees them.
#include "lamina/linear.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <optional>

namespace nb = nanobind;
using namespace lamina::linear;

namespace {

template <class T> T *pointer(uintptr_t address) {
    return reinterpret_cast<T *>(address);
}

void pack_binding(uintptr_t weight, int64_t outputs, int64_t inputs, uintptr_t packed, int threads) {
    nb::gil_scoped_release release;
    pack(pointer<const uint16_t>(weight), outputs, inputs, pointer<uint32_t>(packed), threads);
}

void multiply_binding(uintptr_t x, int64_t x_stride, uintptr_t packed, uintptr_t bias, uintptr_t out,
                      int64_t rows, int64_t inputs, int64_t outputs, int threads, int bits, int64_t group,
                      uintptr_t scales, uintptr_t zeros, int64_t x_group,
                      std::optional<lamina::attention::Path> path) {
    const Linear task{pointer<const uint16_t>(x),
                      x_stride,
                      pointer<const void>(packed),
                      pointer<const uint16_t>(bias),
                      pointer<uint16_t>(out),
                      rows,
                      inputs,
                      outputs,
                      {bits, group, pointer<const float>(scales), pointer<const float>(zeros), x_group}};
    nb::gil_scoped_release release;
    if (path)
        multiply({&task, 1}, threads, *path);
    else
        multiply({&task, 1}, threads);
}

} // namespace

void register_linear(nb::module_ &module) {
    using namespace nb::literals;
    module.def("linear_available", &available,
               "Whether linear() has kernels for this processor: AVX-512 with bfloat16 pairs, or AVX2.");
    module.def("linear_takes_byte_rows", &takes_byte_rows,
               "Whether linear() has kernels for this processor that round x to 8 bits: AVX-512 with VNNI.");
    module.def(
        "linear_tiles_error", &lamina::attention::tiles_error,
        "The error number with which the system refuses matrix tiles (AMX); 0: granted; None: no tiles.");
    module.def("linear_packed_pairs", &packed_pairs, "outputs"_a, "inputs"_a,
               "Pairs of bfloat16, of 4 bytes each, in a packed weight [outputs, inputs]. inputs is even.");
    module.def("linear_pack", &pack_binding, "weight"_a, "outputs"_a, "inputs"_a, "packed"_a, "threads"_a,
               R"(
Pack a bfloat16 weight [outputs, inputs] into linear_packed_pairs(outputs, inputs) pairs at ``packed``.

Given by address and not checked; packed must be 64-byte aligned. Releases the GIL.)");
    module.def("linear_codes_bytes", &Codes::bytes, "bits"_a, "outputs"_a, "inputs"_a,
               "Bytes of a weight [outputs, inputs] as codes of 8 or 4 bits.");
    module.def("linear", &multiply_binding, "x"_a, "x_stride"_a, "packed"_a, "bias"_a, "out"_a, "rows"_a,
               "inputs"_a, "outputs"_a, "threads"_a, "bits"_a = 0, "group"_a = 0, "scales"_a = 0,
               "zeros"_a = 0, "x_group"_a = 0, "path"_a = nb::none(),
               R"(
Write out = x @ weight.T + bias in bfloat16, summed in float32 and rounded once.

Tensors are given by address and not checked: x [rows, inputs] with a row stride in elements, bias [outputs] or 0,
out [rows, outputs] contiguous. packed: pairs, or codes of 8 or 4 ``bits`` with scales and zeros (0: none) of
groups, see linear.h. x_group: inputs of x that share a scale if x is rounded to 8 bits, or 0. path: an
AttentionPath with kernels of linear layers, any but PORTABLE, by default the widest of this processor.
Releases the GIL.)");
}
