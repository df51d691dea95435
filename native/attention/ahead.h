// Reading ahead: asks the memory for the next tile while this one is worked on.
#pragma once

#include "task.h"

namespace lamina::attention {
namespace {

// The K and V rows of one KV head over one tile of tokens.
template <class Kv> struct TileRows {
    const Kv *keys[kTileTokens];
    const Kv *values[kTileTokens];
    int64_t tokens; // rows past them point at zeros
};

// Asks for one row of the next tile at each step of the work on this one. A core keeps only so many reads in
// flight, so asking evenly is what overlaps reading with computing.
class Ahead {
public:
    template <class Kv>
    Ahead(const TileRows<Kv> &rows, const Shape &shape)
        : sources_{
              {reinterpret_cast<const std::byte *const *>(rows.keys), shape.qk_dim * int64_t{sizeof(Kv)}},
              {reinterpret_cast<const std::byte *const *>(rows.values), shape.v_dim * int64_t{sizeof(Kv)}}},
          tokens_(rows.tokens) {}

    // Always inlined: GCC takes a function that only prefetches for one without effects and drops its calls.
    [[gnu::always_inline]] void step() {
        if (token_ == tokens_) {
            if (source_ == 1 || tokens_ == 0)
                return;
            source_ = 1;
            token_ = 0;
        }
        const std::byte *row = sources_[source_].rows[token_++];
        for (int64_t offset = 0; offset < sources_[source_].row_bytes; offset += kCacheLine)
            __builtin_prefetch(row + offset);
    }

private:
    struct Source {
        const std::byte *const *rows;
        int64_t row_bytes;
    };
    Source sources_[2]; // keys, values
    int64_t tokens_;
    int source_ = 0;
    int64_t token_ = 0;
};

} // namespace
} // namespace lamina::attention
