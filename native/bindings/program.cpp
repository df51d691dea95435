// lamina._native: Program. Weights and matrices are given by address; lamina.lowering.program, its one
// caller, answers for them.
#include "lamina/program.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

namespace nb = nanobind;
using namespace lamina::program;
using lamina::elementwise::Activation;
using lamina::elementwise::ElementType;

namespace {

using Place = std::pair<int64_t, int64_t>; // matrix, column
// packed weight, bias or 0, out, outputs
using ProductOf = std::tuple<uintptr_t, uintptr_t, Place, int64_t>;

Part part(const Place &place) {
    return {place.first, place.second};
}

template <class T> T *pointer(uintptr_t address) {
    return reinterpret_cast<T *>(address);
}

void add_products(Program &program, const Place &x, int64_t inputs, const std::vector<ProductOf> &products) {
    Products group;
    for (const auto &[packed, bias, out, outputs] : products) {
        Product &product = group.emplace_back(Product{{}, part(x), part(out)});
        product.task.packed = pointer<const uint32_t>(packed);
        product.task.bias = pointer<const uint16_t>(bias);
        product.task.inputs = inputs, product.task.outputs = outputs;
    }
    program.add(std::move(group));
}

void add_norm(Program &program, const Place &x, const Place &residual, uintptr_t weight, const Place &sum,
              const Place &out, int64_t groups, int64_t width, float epsilon, float offset,
              bool round_before_weight) {
    Norm norm{{}, groups, part(x), part(residual), part(sum), part(out)};
    norm.task.type = ElementType::BFloat16;
    norm.task.weight = pointer<const void>(weight);
    norm.task.width = width;
    norm.task.epsilon = epsilon, norm.task.offset = offset;
    norm.task.round_before_weight = round_before_weight;
    program.add(norm);
}

void add_rotation(Program &program, const Place &x, const Place &cosines, const Place &sines,
                  const Place &out, int64_t heads, int64_t dim, int64_t rotary_dim) {
    Turn turn{{}, part(x), part(cosines), part(sines), part(out)};
    turn.task.type = ElementType::BFloat16;
    turn.task.heads = heads, turn.task.dim = dim, turn.task.rotary_dim = rotary_dim;
    program.add(turn);
}

void add_gate(Program &program, Activation activation, const Place &gate, const Place &up, const Place &out,
              int64_t width) {
    Gating gating{{}, part(gate), part(up), part(out)};
    gating.task.type = ElementType::BFloat16;
    gating.task.activation = activation, gating.task.width = width;
    program.add(gating);
}

void run(const Program &program, int64_t first, int64_t last, int64_t rows,
         const std::vector<uintptr_t> &matrices, uintptr_t scratch, int threads) {
    if (first < 0 || last > program.steps() || static_cast<int64_t>(matrices.size()) != program.given())
        throw nb::value_error("a program was given other steps or matrices than it has");
    std::vector<uint16_t *> addresses;
    for (const uintptr_t address : matrices)
        addresses.push_back(pointer<uint16_t>(address));
    nb::gil_scoped_release release;
    program.run(first, last, rows, addresses, pointer<uint16_t>(scratch), threads);
}

} // namespace

void register_program(nb::module_ &module) {
    nb::class_<Program>(module, "Program")
        .def(nb::init<std::vector<int64_t>, int64_t, lamina::elementwise::Path>())
        .def("add_products", &add_products)
        .def("add_norm", &add_norm)
        .def("add_rotation", &add_rotation)
        .def("add_gate", &add_gate)
        .def_prop_ro("steps", &Program::steps)
        .def("scratch_elements", &Program::scratch_elements)
        .def("run", &run);
}
