// A dense slice as steps over numbered matrices of bfloat16, run in one call. Plain pointers; nothing here
// knows Python or a framework.
#pragma once

#include "lamina/elementwise.h"
#include "lamina/linear.h"

#include <cstdint>
#include <span>
#include <variant>
#include <vector>

namespace lamina::program {

// A matrix's elements of each row from `column` on.
struct Part {
    int64_t matrix, column;
};

// Steps hold their task without the pointers to matrices and the number of rows, which `run` sets.
struct Product {
    linear::Linear task;
    Part x, out;
};

struct Norm {
    elementwise::RmsNorm task; // of each of the `groups` that a row consists of
    int64_t groups;
    Part x, residual, sum, out; // residual and sum of matrix -1: without a residual
};

struct Turn {
    elementwise::Rotation task;
    Part x, cosines, sines, out;
};

struct Gating {
    elementwise::Gate task;
    Part gate, up, out;
};

using Products = std::vector<Product>; // of one x
using Step = std::variant<Products, Norm, Turn, Gating>;

// Matrices [rows, widths[i]], contiguous: the first `given` are the caller's, the others scratch.
class Program {
public:
    // Throws std::invalid_argument.
    Program(std::vector<int64_t> widths, int64_t given, elementwise::Path path);

    // Appends a step. Throws std::invalid_argument if a part of it lies outside its matrix or is not laid out
    // as its kernel expects.
    void add(Step step);

    int64_t given() const { return given_; }
    int64_t steps() const { return static_cast<int64_t>(steps_.size()); }

    // Elements that `scratch` must hold; 64-byte aligned.
    int64_t scratch_elements(int64_t rows) const;

    // Runs steps [first, last). `matrices` are addresses of the given ones. Scratch must still hold the
    // results of the steps before `first`.
    void run(int64_t first, int64_t last, int64_t rows, std::span<uint16_t *const> matrices,
             uint16_t *scratch, int threads) const;

private:
    std::vector<int64_t> widths_;
    int64_t given_;
    std::vector<Step> steps_;
    elementwise::Path path_;
};

} // namespace lamina::program
