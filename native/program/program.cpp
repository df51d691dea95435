// Gives the steps of a program their addresses and runs them one after another.
#include "lamina/program.h"

#include <stdexcept>
#include <string>

namespace lamina::program {
namespace {

constexpr int64_t kNone = -1;
constexpr int64_t kAlignment = 32; // elements

int64_t aligned(int64_t elements) {
    return (elements + kAlignment - 1) / kAlignment * kAlignment;
}

// Checks the operands of steps against matrices of these widths.
class Check {
public:
    explicit Check(std::span<const int64_t> widths) : widths_(widths) {}

    // `count` elements of each row.
    void inside(const Part &part, int64_t count) const {
        if (part.matrix < 0 || part.matrix >= static_cast<int64_t>(widths_.size()) || part.column < 0 ||
            part.column + count > widths_[part.matrix])
            throw std::invalid_argument(describe(part, count) + " does not exist");
    }

    // All elements of each row.
    void whole(const Part &part, int64_t count) const {
        inside(part, count);
        if (widths_[part.matrix] != count)
            throw std::invalid_argument(describe(part, count) + " is not the whole matrix");
    }

    void step(const Products &products) const {
        if (products.empty())
            throw std::invalid_argument("a step of a program has no product; give it at least one");
        for (const auto &[task, x, out] : products) {
            inside(x, task.inputs);
            whole(out, task.outputs);
            if (task.inputs != products.front().task.inputs || x.matrix != products.front().x.matrix ||
                x.column != products.front().x.column)
                throw std::invalid_argument("products of one step have different x");
        }
    }

    void step(const Norm &norm) const {
        for (const Part &part : {norm.x, norm.out})
            whole(part, norm.groups * norm.task.width);
        if ((norm.residual.matrix == kNone) != (norm.sum.matrix == kNone))
            throw std::invalid_argument("a norm has a residual or a sum but not both");
        if (norm.residual.matrix != kNone)
            for (const Part &part : {norm.residual, norm.sum})
                whole(part, norm.groups * norm.task.width);
    }

    void step(const Turn &turn) const {
        inside(turn.x, turn.task.heads * turn.task.dim);
        whole(turn.out, turn.task.heads * turn.task.dim);
        if (turn.task.rotary_dim > 0)
            for (const Part &part : {turn.cosines, turn.sines})
                whole(part, turn.task.rotary_dim);
    }

    void step(const Gating &gating) const {
        for (const Part &part : {gating.gate, gating.up})
            inside(part, gating.task.width);
        whole(gating.out, gating.task.width);
    }

private:
    std::string describe(const Part &part, int64_t count) const {
        return "a step's part of matrix " + std::to_string(part.matrix) + ", columns " +
               std::to_string(part.column) + " to " + std::to_string(part.column + count) + ",";
    }

    std::span<const int64_t> widths_;
};

// One run: the addresses of matrices.
struct Run {
    std::span<const int64_t> widths;
    std::vector<uint16_t *> matrices;
    int64_t rows;
    int threads;
    elementwise::Path path;

    uint16_t *at(const Part &part) const {
        return part.matrix == kNone ? nullptr : matrices[part.matrix] + part.column;
    }

    void step(const Products &products) const {
        std::vector<linear::Linear> group;
        for (const Product &product : products) {
            linear::Linear &task = group.emplace_back(product.task);
            task.x = at(product.x), task.out = at(product.out);
            task.x_stride = widths[product.x.matrix];
            task.rows = rows;
        }
        linear::multiply(group, threads);
    }

    void step(const Norm &norm) const {
        elementwise::RmsNorm task = norm.task;
        task.x = at(norm.x), task.residual = at(norm.residual), task.sum = at(norm.sum);
        task.out = at(norm.out);
        task.rows = rows * norm.groups;
        elementwise::rms_norm(task, threads, path);
    }

    void step(const Turn &turn) const {
        elementwise::Rotation task = turn.task;
        task.x = at(turn.x), task.cosines = at(turn.cosines), task.sines = at(turn.sines);
        task.out = at(turn.out);
        task.row_stride = widths[turn.x.matrix], task.head_stride = task.dim;
        task.rows = rows;
        elementwise::rotate(task, threads, path);
    }

    void step(const Gating &gating) const {
        elementwise::Gate task = gating.task;
        task.gate = at(gating.gate), task.up = at(gating.up), task.out = at(gating.out);
        task.gate_stride = widths[gating.gate.matrix], task.up_stride = widths[gating.up.matrix];
        task.rows = rows;
        elementwise::gate(task, threads, path);
    }
};

} // namespace

Program::Program(std::vector<int64_t> widths, int64_t given, elementwise::Path path)
    : widths_(std::move(widths)), given_(given), path_(path) {
    if (given < 0 || given > static_cast<int64_t>(widths_.size()))
        throw std::invalid_argument(std::to_string(given) + " of " + std::to_string(widths_.size()) +
                                    " matrices is an invalid number of given matrices");
}

void Program::add(Step step) {
    std::visit([&](const auto &known) { Check(widths_).step(known); }, step);
    steps_.push_back(std::move(step));
}

int64_t Program::scratch_elements(int64_t rows) const {
    int64_t elements = 0;
    for (size_t i = given_; i < widths_.size(); ++i)
        elements += aligned(rows * widths_[i]);
    return elements;
}

void Program::run(int64_t first, int64_t last, int64_t rows, std::span<uint16_t *const> matrices,
                  uint16_t *scratch, int threads) const {
    Run run{widths_, {matrices.begin(), matrices.end()}, rows, threads, path_};
    for (size_t i = given_; i < widths_.size(); ++i) {
        run.matrices.push_back(scratch);
        scratch += aligned(rows * widths_[i]);
    }
    for (int64_t i = first; i < last; ++i)
        std::visit([&](const auto &known) { run.step(known); }, steps_[i]);
}

} // namespace lamina::program
