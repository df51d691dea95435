#include "lamina/attention.h"
#include "lamina/thread_pool.h"
#include "widest.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

namespace lamina::attention {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kElementsPerThread =
    65536; // with half as many, two busy-waiting threads take as long as one

// The weight of a partial whose lse is `lse` against the largest one; 0 for a partial that saw nothing.
float weight(float lse, float largest) {
    return lse == -kInfinity ? 0.0f : std::exp(lse - largest);
}

// Rounds to nearest even.
LAMINA_WIDEST void round_row(const float *row, int64_t size, float *target) {
    std::copy_n(row, size, target);
}
LAMINA_WIDEST void round_row(const float *row, int64_t size, _Float16 *target) {
    std::transform(row, row + size, target, [](float value) { return static_cast<_Float16>(value); });
}
LAMINA_WIDEST void round_row(const float *row, int64_t size, uint16_t *target) {
    std::transform(row, row + size, target, [](float value) {
        const auto bits = std::bit_cast<uint32_t>(value);
        const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, nan = bits >> 16 | 0x40;
        return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
    });
}

LAMINA_WIDEST void add_weighted(float weight, const float *row, int64_t size, float *sum) {
    for (int64_t i = 0; i < size; ++i)
        sum[i] += weight * row[i];
}

template <class Out> void merge_rows(const Merge &task, int64_t begin, int64_t end) {
    std::vector<float> merged(task.v_dim), weights(task.count);
    for (int64_t row = begin; row < end; ++row) {
        const int64_t at = row * task.v_dim;
        Out *target = static_cast<Out *>(task.out) + at;
        if (task.count == 1 && !task.sinks && !task.lse && task.lses[0][row] != -kInfinity) {
            round_row(task.outs[0] + at, task.v_dim, target); // most rows: nothing to merge with
            continue;
        }
        const float sink = task.sinks ? task.sinks[row % task.heads] : -kInfinity;
        float largest = sink;
        for (int64_t part = 0; part < task.count; ++part)
            largest = std::max(largest, task.lses[part][row]);
        float sum = weight(sink, largest);
        for (int64_t part = 0; part < task.count; ++part)
            sum += weights[part] = weight(task.lses[part][row], largest);
        std::fill(merged.begin(), merged.end(), 0.0f);
        for (int64_t part = 0; part < task.count; ++part) {
            if (task.lses[part][row] == -kInfinity) // its out is undefined
                continue;
            add_weighted(weights[part] / sum, task.outs[part] + at, task.v_dim, merged.data());
        }
        round_row(merged.data(), task.v_dim, target);
        if (task.lse)
            task.lse[row] = sum == 0 ? -kInfinity : largest + std::log(sum);
    }
}

} // namespace

void merge(const Merge &task, int threads) {
    const auto kernel = task.out_type == ElementType::Float32   ? merge_rows<float>
                        : task.out_type == ElementType::Float16 ? merge_rows<_Float16>
                                                                : merge_rows<uint16_t>;
    const int64_t rows = task.rows * task.heads;
    const int64_t parts =
        std::clamp<int64_t>(rows * task.v_dim * task.count / kElementsPerThread, 1, threads);
    parallel_for(threads, parts,
                 [&](int64_t part) { kernel(task, rows * part / parts, rows * (part + 1) / parts); });
}

} // namespace lamina::attention
