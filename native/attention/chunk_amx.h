// Runs one task of many queries by matrix tiles (AMX): 16 queries at a time meet 64 tokens. Keys, values and
// queries are packed as for ChunkTask, whose words are those of a tile: a tile of queries has 16 words of
// each, a tile of keys these words of 16 tokens, and a tile of values 16 columns of 16 pairs of tokens.
#pragma once

#include "chunk_avx512bf16.h"
#include "tiles_amx.h"

#include <utility>

namespace lamina::attention {
namespace {

template <class Element> class TileChunkTask : ChunkTask<Element> {
    using Base = ChunkTask<Element>;
    using Base::query, Base::query_words, Base::state, Base::visible_columns, Base::run_blocks,
        Base::packing_steps;
    using Base::shape_, Base::work_, Base::queries_, Base::padded_queries_, Base::task_, Base::qk_words_,
        Base::query_stride_;
    using Base::W;
    using typename Base::F, typename Base::Word;
    static constexpr int64_t kTogether = kTileHeight;

public:
    TileChunkTask(const Problem &problem, const Task &task, const Workspace &work)
        : Base(problem, task, work, kTogether, packing_steps(problem.shape)) {}

    void run() {
        // Tiles 0 to 3 hold sums, 4 rows of queries or probabilities, 5 keys or values.
        configure_tiles({16, 16, 16, 16, 16, 16});
        // Tiles multiply what no query or token has written too: a number there must be finite.
        std::fill_n(work_.keys, query_stride_ * kTileTokens, 0.0f);
        std::fill_n(work_.values, kTileTokens / 2 * work_.v_padded, 0.0f);
        for (int64_t head = task_.head_begin; head < task_.head_end; ++head)
            std::fill_n(query_words(head), padded_queries_ * query_stride_, 0.0f);
        run_blocks(kTogether, [this](int64_t head, int64_t first, int64_t token, bool plain) {
            const int64_t last = query(head, std::min(first + kTogether, queries_) - 1).row;
            if (plain)
                attend_block<true>(head, first, token);
            else if (visible_columns(last, token).end > 0)
                attend_block<false>(head, first, token);
        });
        asm volatile("tilerelease");
    }

private:
    template <bool PLAIN> void attend_block(int64_t head, int64_t first, int64_t token) {
        score(query_words(head) + first * query_stride_);
        const int64_t end = std::min(first + kTogether, queries_);
        for (int64_t i = first; i < end; i += 4) {
            F x[4][4];
            for (int m = 0; m < 4; ++m)
                for (int n = 0; n < 4; ++n)
                    x[m][n] = load<F>(scores_[i - first + m] + n * W);
            this->template weigh_scores<4, 4, PLAIN>(head, i, token, x, pairs_ + (i - first));
        }
        float *accumulated = work_.accumulator + state(head, first) * work_.v_padded;
        int64_t column = 0;
        for (; column + 4 * W <= work_.v_padded; column += 4 * W)
            add_columns(accumulated, column, std::make_integer_sequence<int, 4>{});
        for (; column < work_.v_padded; column += W)
            add_columns(accumulated, column, std::make_integer_sequence<int, 1>{});
    }

    void score(const float *queries) {
        zero_sums();
        for (int64_t word = 0; word < query_stride_; word += W) {
            load_tile<4>(queries + word, query_stride_);
            add_each(work_.keys + word * kTileTokens, kTileTokens, std::make_integer_sequence<int, 4>{});
        }
        [this]<int... N>(std::integer_sequence<int, N...>) {
            (store_tile<N>(scores_[0] + N * W, kTileTokens), ...);
        }(std::make_integer_sequence<int, 4>{});
    }

    static void zero_sums() {
        asm volatile("tilezero %tmm0\n\ttilezero %tmm1\n\ttilezero %tmm2\n\ttilezero %tmm3");
    }

    // Adds the products of tile 4 with one tile after another of `words`, each 16 columns further.
    template <int... N>
    static void add_each(const float *words, int64_t stride, std::integer_sequence<int, N...>) {
        ((load_tile<5>(words + N * W, stride), add_products<N, 4, 5>()), ...);
    }

    // Adds columns of the values, weighed by probabilities.
    template <int... N>
    void add_columns(float *accumulated, int64_t column, std::integer_sequence<int, N...> tiles) {
        const int64_t stride = work_.v_padded;
        (load_tile<N>(accumulated + column + N * W, stride), ...);
        for (int64_t word = 0; word < kTileTokens / 2; word += W) {
            load_tile<4>(pairs_[0] + word, kTileTokens / 2);
            add_each(work_.values + word * stride + column, stride, tiles);
        }
        (store_tile<N>(accumulated + column + N * W, stride), ...);
    }

    alignas(64) float scores_[kTileHeight][kTileTokens];
    alignas(64) Word pairs_[kTileHeight][kTileTokens / 2] = {}; // rows of no query stay finite
};

} // namespace
} // namespace lamina::attention
