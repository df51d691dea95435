// Reading ahead: asks the memory for the next tile while this one is worked on.
#pragma once

#include "task.h"

namespace lamina::attention {
namespace {

// The K and V rows of one KV head over one tile of tokens; rows past `tokens` point at zeros.
template <class Kv> struct TileRows {
    const Kv *keys[kTileTokens];
    const Kv *values[kTileTokens];
    int64_t tokens;
};

// Asks for the tokens of the next tile, all heads of the task, a few cache lines at each step of the work on
// this one. A core keeps only so many reads in flight, so asking evenly is what overlaps reading with
// computing; asking for a token's heads together meets each page once and lets the memory stream.
class Ahead {
public:
    Ahead(const Problem &problem, const Task &task) {
        const int64_t size = element_size(problem.kv_type);
        rows_[0] = slab_rows(problem.k, problem.shape.qk_dim * size, problem.shape.kv_heads, task);
        rows_[1] = slab_rows(problem.v, problem.shape.v_dim * size, problem.shape.kv_heads, task);
        const int64_t heads = task.head_end - task.head_begin;
        rows_per_step_ = std::max<int64_t>(1, 2 * kTileTokens / (kSteps * heads));
        const int64_t steps_per_row = std::max<int64_t>(1, kSteps * heads / (2 * kTileTokens));
        for (SlabRows &rows : rows_)
            rows.bytes_per_step = round_up((rows.bytes + steps_per_row - 1) / steps_per_row, kCacheLine);
    }

    // Makes tokens [0, tokens) of `slots` the ones to ask for; drops what was not asked for before.
    void aim(const int32_t *slots, int64_t tokens) {
        slots_ = slots;
        slots_end_ = slots + std::max<int64_t>(tokens, 0);
        slab_ = 0;
        start_row();
    }

    // Always inlined: GCC takes a function that only prefetches for one without effects and drops its calls.
    [[gnu::always_inline]] void step() {
        for (int64_t i = 0; i < rows_per_step_ && slots_ != slots_end_; ++i) {
            const std::byte *line = line_, *end = std::min(line + rows_[slab_].bytes_per_step, row_end_);
            for (; line < end; line += kCacheLine)
                __builtin_prefetch(line);
            line_ = line;
            if (line >= row_end_) {
                slots_ += slab_;
                slab_ ^= 1;
                start_row();
            }
        }
    }

private:
    static constexpr int64_t kSteps = 64; // at least so many are made per tile and head

    struct SlabRows {
        const std::byte *first; // of slot 0
        int64_t stride;         // from slot to slot
        int64_t bytes;          // of the task's heads
        int64_t bytes_per_step;
    };

    static SlabRows slab_rows(const void *slab, int64_t head_bytes, int64_t heads, const Task &task) {
        return {static_cast<const std::byte *>(slab) + task.head_begin * head_bytes, heads * head_bytes,
                (task.head_end - task.head_begin) * head_bytes, 0};
    }

    [[gnu::always_inline]] void start_row() {
        if (slots_ == slots_end_)
            return;
        line_ = rows_[slab_].first + *slots_ * rows_[slab_].stride;
        row_end_ = line_ + rows_[slab_].bytes;
    }

    SlabRows rows_[2]; // keys, values
    int64_t rows_per_step_;
    int slab_ = 0;
    const int32_t *slots_ = nullptr, *slots_end_ = nullptr;
    const std::byte *line_ = nullptr, *row_end_ = nullptr;
};

} // namespace
} // namespace lamina::attention
