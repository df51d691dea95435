// Shares a product among threads: by panels of the weight, within blocks of rows that a core's cache holds.
#include "panel.h"

#include "lamina/attention.h"
#include "lamina/thread_pool.h"

#include <algorithm>

namespace lamina::linear {
namespace {

constexpr int64_t kCachedBytes = 512 * 1024;  // of rows that stay in a core's cache while panels pass
constexpr int64_t kBytesPerTask = 256 * 1024; // of the weight: long reads, and enough tasks to even out

} // namespace

bool available() {
    const auto paths = attention::available_paths();
    return std::ranges::find(paths, attention::Path::Avx512Bf16) != paths.end();
}

void pack(const uint16_t *weight, int64_t outputs, int64_t inputs, uint32_t *packed, int threads) {
    const int64_t panels = (outputs + kPanel - 1) / kPanel, words = inputs / 2;
    parallel_for(threads, panels, [&](int64_t panel) {
        uint32_t *target = packed + panel * kPanel * words;
        for (int64_t column = 0; column < kPanel; ++column) {
            const int64_t output = panel * kPanel + column;
            const uint16_t *row = weight + output * inputs;
            for (int64_t w = 0; w < words; ++w)
                target[w * kPanel + column] =
                    output < outputs ? row[2 * w] | static_cast<uint32_t>(row[2 * w + 1]) << 16 : 0;
        }
    });
}

void multiply(const Linear &task, int threads) {
    const int64_t panels = (task.outputs + kPanel - 1) / kPanel;
    const int64_t panel_bytes = kPanel * task.inputs * 2;
    const int64_t per_task = std::max<int64_t>(1, kBytesPerTask / panel_bytes);
    const int64_t tasks = (panels + per_task - 1) / per_task;
    const int64_t most = std::max<int64_t>(1, kCachedBytes / (task.inputs * 2) / kMostRows) * kMostRows;
    const int64_t chunks = (task.rows + most - 1) / most;
    parallel_for(threads, tasks * chunks, [&](int64_t index) {
        const int64_t chunk = index / tasks, begin = task.rows * chunk / chunks,
                      end = task.rows * (chunk + 1) / chunks;
        const int64_t blocks = (end - begin + kMostRows - 1) / kMostRows;
        const int64_t first = index % tasks * per_task, last = std::min(panels, first + per_task);
        for (int64_t panel = first; panel < last; ++panel)
            for (int64_t block = 0; block < blocks; ++block) {
                const int64_t row = begin + (end - begin) * block / blocks;
                multiply_panel(task, row, begin + (end - begin) * (block + 1) / blocks - row, panel);
            }
    });
}

} // namespace lamina::linear
