// lamina._native: linear layers on packed weights. They take addresses and sizes as integers, because
// checking arrays would cost more than the work on few rows: lamina.lowering.linear, their one caller,
// answers for them.
#include "lamina/linear.h"

#include <nanobind/nanobind.h>

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
                      int64_t rows, int64_t inputs, int64_t outputs, int threads) {
    const Linear task{pointer<const uint16_t>(x),
                      x_stride,
                      pointer<const uint32_t>(packed),
                      pointer<const uint16_t>(bias),
                      pointer<uint16_t>(out),
                      rows,
                      inputs,
                      outputs};
    nb::gil_scoped_release release;
    multiply({&task, 1}, threads);
}

} // namespace

void register_linear(nb::module_ &module) {
    module.def("linear_available", &available);
    module.def("linear_packed_pairs", &packed_pairs);
    module.def("linear_pack", &pack_binding);
    module.def("linear", &multiply_binding);
}
