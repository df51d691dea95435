#include "lamina/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace lamina::attention {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The weight of a partial whose lse is `lse` against the largest one; a partial that saw nothing has none.
float weight(float lse, float largest) {
    return lse == -kInfinity ? 0.0f : std::exp(lse - largest);
}

} // namespace

void merge(const float *const *outs, const float *const *lses, int64_t count, int64_t rows, int64_t heads,
           int64_t v_dim, const float *sinks, float *out, float *lse) {
    for (int64_t row = 0; row < rows * heads; ++row) {
        const float sink = sinks ? sinks[row % heads] : -kInfinity;
        float largest = sink;
        for (int64_t part = 0; part < count; ++part)
            largest = std::max(largest, lses[part][row]);
        float sum = weight(sink, largest);
        for (int64_t part = 0; part < count; ++part)
            sum += weight(lses[part][row], largest);
        const int64_t at = row * v_dim;
        for (int64_t part = 0; part < count; ++part) {
            const bool neutral = lses[part][row] == -kInfinity; // whatever its out holds
            const float w = neutral ? 0.0f : weight(lses[part][row], largest) / sum;
            for (int64_t d = 0; d < v_dim; ++d)
                out[at + d] = (part == 0 ? 0.0f : out[at + d]) + (neutral ? 0.0f : w * outs[part][at + d]);
        }
        if (lse)
            lse[row] = sum == 0 ? -kInfinity : largest + std::log(sum);
    }
}

} // namespace lamina::attention
