// lamina._native: Program. Weights and matrices are given by address; lamina.lowering.native_program, its one
// caller, guarantees them.
#include "lamina/program.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

namespace nb = nanobind;
using namespace lamina::program;
using lamina::elementwise::Activation;
using lamina::elementwise::ElementType;

namespace {

using Place = std::pair<int64_t, int64_t>; // matrix, column
// bits or 0, group, scales, zeros or 0
using CodesOf = std::tuple<int, int64_t, uintptr_t, uintptr_t>;
// and the group of x, which is rounded to 8 bits
using ByteCodesOf = std::tuple<int, int64_t, uintptr_t, uintptr_t, int64_t>;
// packed weight, bias or 0, out, outputs, codes
using ProductOf = std::tuple<uintptr_t, uintptr_t, Place, int64_t, std::variant<CodesOf, ByteCodesOf>>;

Part part(const Place &place) {
    return {place.first, place.second};
}

template <class T> T *pointer(uintptr_t address) {
    return reinterpret_cast<T *>(address);
}

lamina::linear::Codes codes_of(const CodesOf &codes, int64_t x_group = 0) {
    const auto &[bits, group, scales, zeros] = codes;
    return {bits, group, pointer<const float>(scales), pointer<const float>(zeros), x_group};
}

lamina::linear::Codes codes_of(const ByteCodesOf &codes) {
    const auto &[bits, group, scales, zeros, x_group] = codes;
    return codes_of(CodesOf{bits, group, scales, zeros}, x_group);
}

void add_products(Program &program, const Place &x, int64_t inputs, const std::vector<ProductOf> &products) {
    Products group;
    for (const auto &[packed, bias, out, outputs, codes] : products) {
        Product &product = group.emplace_back(Product{{}, part(x), part(out)});
        product.task.packed = pointer<const void>(packed);
        product.task.codes = std::visit([](const auto &known) { return codes_of(known); }, codes);
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
    using namespace nb::literals;
    nb::class_<Program>(module, "Program",
                        R"(
A dense slice as steps over numbered matrices [rows, width] of bfloat16, contiguous, run in one call.

An operand is (matrix, column): a matrix's elements of each row from that column on. Weights are given by address
and must outlive the program. Adding a step raises ValueError if an operand lies outside its matrix or is not laid
out as the kernel expects.)")
        .def(nb::init<std::vector<int64_t>, int64_t, lamina::elementwise::Path>(), "widths"_a, "given"_a,
             "path"_a,
             "The first ``given`` matrices are the caller's, the others scratch. Raises ValueError.")
        .def("add_products", &add_products, "x"_a, "inputs"_a, "products"_a,
             R"(
Linear layers of one x, each given as (packed weight, bias or 0, out, outputs, codes).

codes: (bits, group, scales, zeros), as linear() takes them; bits is 0 for a weight in pairs.)")
        .def("add_norm", &add_norm, "x"_a, "residual"_a, "weight"_a, "sum"_a, "out"_a, "groups"_a, "width"_a,
             "epsilon"_a, "offset"_a, "round_before_weight"_a,
             "rms_norm() of each of the ``groups`` parts of a row. Without a residual: residual and sum are "
             "(-1, 0).")
        .def("add_rotation", &add_rotation, "x"_a, "cosines"_a, "sines"_a, "out"_a, "heads"_a, "dim"_a,
             "rotary_dim"_a,
             "rotate() of the first ``rotary_dim`` elements of each head; the others are copied.")
        .def("add_gate", &add_gate, "activation"_a, "gate"_a, "up"_a, "out"_a, "width"_a,
             "out = activation(gate) * up.")
        .def_prop_ro("steps", &Program::steps, "Number of steps.")
        .def("scratch_elements", &Program::scratch_elements, "rows"_a,
             "Elements that scratch must hold for that many rows; its address is 64-byte aligned.")
        .def("run", &run, "first"_a, "last"_a, "rows"_a, "matrices"_a, "scratch"_a, "threads"_a,
             R"(
Run steps [first, last) on that many rows, given the addresses of the caller's matrices and of scratch.

What steps before ``first`` left in scratch must still be there. Releases the GIL. Raises ValueError.)");
}
