// Prefetching: reads the next tile while this one is computed.
#pragma once

#include "task.h"

namespace lamina::attention {
namespace {

// The K and V rows of one KV head over one tile of tokens; rows past its last token point at zeros.
template <class Kv> struct TileRows {
    const Kv *keys[kTileTokens];
    const Kv *values[kTileTokens];
    int64_t columns; // tokens, rounded up to a vector
};

// Prefetch steps that softmax makes for one tile and head, at least; packing and products make the others.
constexpr int64_t kSoftmaxSteps = 24;

// Prefetches the tokens of the next tile, all heads of the task, a few cache lines at each step of the work
// on this one. A core has a limited number of reads in flight, so even prefetching is what overlaps reading
// with computing; prefetching a token's heads together visits each page once and lets the memory stream.
class Ahead {
public:
    // `steps`: calls of step() per tile and head, at least. More cost little; fewer leave tokens unread.
    Ahead(const Problem &problem, const Task &task, int64_t tile_tokens, int64_t steps) {
        const int64_t size = element_size(problem.kv_type);
        rows_[0] = slab_rows(problem.k, problem.shape.qk_dim * size, problem.shape.kv_heads, task);
        rows_[1] = slab_rows(problem.v, problem.shape.v_dim * size, problem.shape.kv_heads, task);
        const int64_t tile_bytes = (rows_[0].bytes + rows_[1].bytes) * tile_tokens;
        bytes_per_step_ = tile_bytes / (steps * (task.head_end - task.head_begin)) + 1;
    }

    // Prefetches tokens [0, tokens) of `slots` from now on; drops those not prefetched before.
    void aim(const int32_t *slots, int64_t tokens) {
        slots_ = slots;
        slots_end_ = slots + tokens;
        slab_ = 0;
        due_ = 0;
        start_row();
    }

    // Always inlined: GCC considers a function that only prefetches free of effects and drops its calls.
    [[gnu::always_inline]] void step() {
        if (slots_ == slots_end_)
            return;
        const std::byte *line = line_;
        int64_t due = due_ + bytes_per_step_;
        for (; due >= kCacheLine; due -= kCacheLine) {
            __builtin_prefetch(line);
            line += kCacheLine;
            if (line >= row_end_) {
                next_row();
                line = line_;
                if (slots_ == slots_end_)
                    break;
            }
        }
        line_ = line;
        due_ = due;
    }

private:
    struct SlabRows {
        const std::byte *first; // of slot 0
        int64_t stride;         // from slot to slot
        int64_t bytes;          // of the task's heads
    };

    static SlabRows slab_rows(const void *slab, int64_t head_bytes, int64_t heads, const Task &task) {
        return {static_cast<const std::byte *>(slab) + task.head_begin * head_bytes, heads * head_bytes,
                (task.head_end - task.head_begin) * head_bytes};
    }

    [[gnu::always_inline]] void next_row() {
        slots_ += slab_;
        slab_ ^= 1;
        start_row();
    }

    [[gnu::always_inline]] void start_row() {
        if (slots_ == slots_end_)
            return;
        line_ = rows_[slab_].first + *slots_ * rows_[slab_].stride;
        row_end_ = line_ + rows_[slab_].bytes;
    }

    SlabRows rows_[2]; // keys, values
    int64_t bytes_per_step_;
    int64_t due_ = 0; // bytes to prefetch at the next step
    int slab_ = 0;
    const int32_t *slots_ = nullptr, *slots_end_ = nullptr;
    const std::byte *line_ = nullptr, *row_end_ = nullptr;
};

} // namespace
} // namespace lamina::attention
