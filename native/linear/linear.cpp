// Shares a product among threads: by panels of the weight, within blocks of rows that a core's cache holds.
#include "panel.h"
#include "quads.h"
#include "tiles.h"

#include "lamina/attention.h"
#include "lamina/thread_pool.h"

#include <algorithm>
#include <map>
#include <memory>
#include <vector>

namespace lamina::linear {
namespace {

constexpr int64_t kCachedBytes = 512 * 1024;       // of rows that stay in a core's cache while panels pass
constexpr int64_t kTilesCachedBytes = 1024 * 1024; // the same where tiles multiply: these cores have 2 MiB
constexpr int64_t kBytesPerTask = 256 * 1024;      // of the weight: long reads, and enough tasks to even out
constexpr int64_t kManyRows = 48;    // beyond these, reading the weight again for each block costs little
constexpr int64_t kSetStride = 4096; // bytes after which a core's first cache uses the same set again
constexpr int64_t kTilesSetStride =
    2048;                       // the same for the rows of a tile, which share half of the sets then
constexpr int64_t kSetRows = 7; // that a set holds beside the weight: most have 8 ways
constexpr int64_t kLine = 64;   // bytes of a cache line
constexpr int64_t kGap = 32;    // elements between copied rows: a cache line

int64_t panels_of(const Linear &linear) {
    return (linear.outputs + kPanel - 1) / kPanel;
}

int64_t tasks_of(const Linear &linear, int64_t panels_per_task) {
    return (panels_of(linear) + panels_per_task - 1) / panels_per_task;
}

// Rows from which on tiles are faster than vectors, which multiply bytes eight times as fast as bfloat16.
constexpr int64_t kFewestTiledPairs = 4;
constexpr int64_t kFewestTiledQuads = 16;

// Whether matrix tiles multiply: many rows, and runs of inputs that fill half of a tile or more.
bool uses_tiles(const Linear &linear, attention::Path path) {
    const Codes &codes = linear.codes;
    const bool quads = codes.x_group > 0;
    const int64_t pairs = (codes.bits == 0 ? linear.inputs : codes.group) / 2;
    return path == attention::Path::Amx && linear.rows >= (quads ? kFewestTiledQuads : kFewestTiledPairs) &&
           (codes.bits == 0 || codes.group % 2 == 0) &&
           tile_step(quads ? codes.x_group / 4 : pairs) >= kTileWords / 2;
}

// Of products without tiles.
PanelKernel kernel_for(const Linear &linear, attention::Path path) {
    const bool dense = linear.codes.bits == 0;
#if defined(__x86_64__)
    if (linear.codes.x_group > 0)
        return avx512vnni_quads();
#endif
    switch (path) {
#if defined(__x86_64__)
    case attention::Path::Amx:
    case attention::Path::Avx512Bf16:
        if (dense || linear.codes.group % 2 == 0)
            return dense ? avx512bf16_panels() : avx512bf16_codes();
        [[fallthrough]]; // every processor with kernels for pairs has AVX2
    case attention::Path::Avx2:
        return dense ? avx2_panels() : avx2_codes();
#endif
    default:
        return {};
    }
}

// Of a panel's part of the weight.
int64_t panel_bytes(const Linear &linear) {
    return kPanel * linear.inputs * (linear.codes.bits == 0 ? 16 : linear.codes.bits) / 8;
}

// Rows [begin, end), in blocks of equal size that a panel's sums fit, times panels [first, last).
void multiply_panels(const Linear &linear, attention::Path path, int64_t begin, int64_t end, int64_t first,
                     int64_t last) {
#if defined(__x86_64__)
    if (uses_tiles(linear, path)) {
        multiply_amx_tiles(linear, begin, end - begin, first, last);
        return;
    }
#endif
    const PanelKernel kernel = kernel_for(linear, path);
    const int64_t rows = end - begin;
    const int64_t most = linear.rows > kManyRows ? kernel.many_block : kernel.most_rows;
    const int64_t blocks = (rows + most - 1) / most;
    for (int64_t panel = first; panel < last; ++panel)
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t row = begin + rows * block / blocks;
            kernel.multiply(linear, row, begin + rows * (block + 1) / blocks - row, panel);
        }
}

// Whether the rows of a block, which are read side by side, push each other out of the cache.
bool collide(const Linear &linear, int64_t block, int64_t set_stride) {
    if (linear.byte_rows)
        return false;
    const int64_t together = std::min(linear.rows, block);
    return together > kSetRows && linear.x_stride * int64_t{sizeof(uint16_t)} % set_stride == 0;
}

// The memory of ByteRows.
struct ByteRowsBuffer {
    std::unique_ptr<int8_t[]> values;
    std::unique_ptr<float[]> scales;
    std::unique_ptr<int32_t[]> sums;
    ByteRows rows;
};

ByteRowsBuffer quantize_rows(const Linear &linear, int threads) {
    const int64_t group = linear.codes.x_group, groups = linear.inputs / group;
    int64_t stride = (linear.inputs + kLine - 1) / kLine * kLine;
    stride += stride % kSetStride == 0 || kSetStride % stride == 0 ? kLine : 0;
    ByteRowsBuffer buffer{std::make_unique_for_overwrite<int8_t[]>(linear.rows * stride),
                          std::make_unique_for_overwrite<float[]>(linear.rows * groups),
                          std::make_unique_for_overwrite<int32_t[]>(linear.rows * groups),
                          {}};
    buffer.rows = {stride, buffer.values.get(), buffer.scales.get(), buffer.sums.get()};
#if defined(__x86_64__)
    parallel_for(threads, linear.rows, [&](int64_t row) {
        quantize_row_avx512vnni(linear.x + row * linear.x_stride, linear.inputs, group,
                                buffer.values.get() + row * stride, buffer.scales.get() + row * groups,
                                buffer.sums.get() + row * groups);
    });
#endif
    return buffer;
}

// Multiplies rows rounded to 8 bits where weights take these.
void multiply_byte_rows(std::span<const Linear> group, int threads, attention::Path path) {
    std::map<int64_t, ByteRowsBuffer> by_group;
    std::vector<Linear> prepared(group.begin(), group.end());
    for (Linear &linear : prepared)
        if (const int64_t size = linear.codes.x_group; size > 0) {
            auto found = by_group.find(size);
            if (found == by_group.end())
                found = by_group.emplace(size, quantize_rows(linear, threads)).first;
            linear.byte_rows = &found->second.rows;
        }
    multiply(prepared, threads, path);
}

// Multiplies a copy of x, whose rows do not collide.
void multiply_apart(std::span<const Linear> group, int threads, attention::Path path, int64_t set_stride) {
    const Linear &first = group.front();
    const int64_t bytes = first.inputs * int64_t{sizeof *first.x};
    const int64_t stride = first.inputs + (bytes % set_stride == 0 ? kGap : 0);
    const auto copy = std::make_unique_for_overwrite<uint16_t[]>(first.rows * stride);
    parallel_for(threads, first.rows, [&](int64_t row) {
        std::copy_n(first.x + row * first.x_stride, first.inputs, copy.get() + row * stride);
    });
    std::vector<Linear> apart(group.begin(), group.end());
    for (Linear &linear : apart) {
        linear.x = copy.get();
        linear.x_stride = stride;
    }
    multiply(apart, threads, path);
}

} // namespace

bool available() {
    return kernel_for(Linear{}, attention::available_paths().back()).multiply != nullptr;
}

bool takes_byte_rows() {
#if defined(__x86_64__)
    return attention::available_paths().back() >= attention::Path::Avx512Bf16 &&
           __builtin_cpu_supports("avx512vnni");
#else
    return false;
#endif
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

void multiply(std::span<const Linear> group, int threads) {
    static const attention::Path widest = attention::available_paths().back();
    multiply(group, threads, widest);
}

void multiply(std::span<const Linear> group, int threads, attention::Path path) {
    if (std::ranges::any_of(group,
                            [](const Linear &each) { return each.codes.x_group > 0 && !each.byte_rows; })) {
        multiply_byte_rows(group, threads, path);
        return;
    }
    const bool tiles = uses_tiles(group.front(), path);
    const int64_t block = tiles ? kTiledRows : kernel_for(group.front(), path).most_rows;
    const int64_t set_stride = tiles ? kTilesSetStride : kSetStride;
    if (collide(group.front(), block, set_stride)) {
        multiply_apart(group, threads, path, set_stride);
        return;
    }
    const int64_t rows = group.front().rows, inputs = group.front().inputs;
    const int64_t per_task = std::max<int64_t>(1, kBytesPerTask / panel_bytes(group.front()));
    const int64_t cached_rows =
        (tiles ? kTilesCachedBytes : kCachedBytes) / (inputs * (group.front().byte_rows ? 1 : 2));
    const int64_t most = std::max<int64_t>(1, cached_rows / block) * block;
    const int64_t chunks = (rows + most - 1) / most;
    int64_t tasks = 0;
    for (const Linear &linear : group)
        tasks += tasks_of(linear, per_task);
    parallel_for(threads, tasks * chunks, [&](int64_t index) {
        const int64_t chunk = index / tasks, begin = rows * chunk / chunks, end = rows * (chunk + 1) / chunks;
        const Linear *linear = group.data();
        int64_t number = index % tasks;
        for (; number >= tasks_of(*linear, per_task); ++linear)
            number -= tasks_of(*linear, per_task);
        multiply_panels(*linear, path, begin, end, number * per_task,
                        std::min(panels_of(*linear), (number + 1) * per_task));
    });
}

} // namespace lamina::linear
