// Runs one task of float words: online softmax over tiles of tokens, as two small matrix products per tile
// and KV head.
//
// A tile's keys are packed transposed ([qk_dim][tokens]) and its values by token ([tokens][v_padded]), so
// that multiply.h computes both products. `Tile` (fma_tile.h) makes the words of any vector width.
#pragma once

#include "decode_rows.h"
#include "tiled_task.h"

namespace lamina::attention {
namespace {

// A tile's values as they lie in the slab, made into words on the way to the product: packing pays only if
// several blocks of queries use them.
template <class Tile> struct ValueRows {
    const typename Tile::Kv *const *rows;

    template <class, int N> void load_row(int64_t w, int64_t column, Floats<Tile::W> (&row)[N]) const {
        Tile::value_words(rows + w, column, row);
    }
};

template <class Tile> class Attend : TiledTask<typename Tile::Stored, Tile::W> {
    using Base = TiledTask<typename Tile::Stored, Tile::W>;
    using Base::problem_, Base::shape_, Base::task_, Base::work_, Base::group_, Base::queries_, Base::ahead_;
    using Base::start, Base::run_tiles, Base::finish, Base::finish_scores, Base::query_words, Base::state,
        Base::key_scales, Base::value_scales, Base::visible_columns;
    using Base::W, Base::kScaled, Base::kSlack;
    using typename Base::F, typename Base::Kv, typename Base::Query;
    static constexpr int kVectors = kTileTokens / W;
    static constexpr int64_t kMaskedRows = 16;

public:
    Attend(const Problem &problem, const Task &task, const Workspace &work)
        : Base(problem, task, work, Tile::steps(problem.shape)) {}

    void run() {
        start(work_.qk_padded,
              [this](int64_t offset, float *packed) { Tile::pack_query(problem_, offset, packed); });
        std::fill_n(work_.reference, state(task_.head_end, 0), -kInfinity);
        run_tiles([this](int64_t head, int64_t token, const TileRows<Kv> &rows) {
            if (decodes())
                decode_tile(head, token, rows);
            else
                attend_tile(head, token, rows);
        });
        finish();
    }

private:
    // Whether one row's few queries take the products of decode_rows.h.
    bool decodes() const {
        return task_.row_end - task_.row_begin == 1 && queries_ <= kDecodeRowQueries &&
               shape_.qk_dim % W == 0 && shape_.v_dim % W == 0;
    }

    // Not inlined, like attend_tile: its products would have fewer registers.
    [[gnu::noinline]] void decode_tile(int64_t head, int64_t token, const TileRows<Kv> &rows) {
        score_rows<Tile>(queries_, {query_words(head), work_.qk_padded}, shape_.qk_dim, rows, work_.scores,
                         ahead_);
        for (int64_t step = 0; step < kSoftmaxSteps; ++step)
            ahead_.step();
        softmax(head, task_.row_begin, token);
        multiply_few<Tile>(
            queries_, shape_.v_dim, {work_.probabilities, kTileTokens}, ValueRows<Tile>{rows.values},
            rows.columns,
            {work_.accumulator + state(head, 0) * work_.v_padded, work_.v_padded, work_.rescale}, ahead_);
    }

    // Where a mask's edge crosses the tile, a few rows at a time: each block skips the tokens that none of
    // its rows sees.
    [[gnu::noinline]] void attend_tile(int64_t head, int64_t token, const TileRows<Kv> &rows) {
        Tile::pack_keys(rows, shape_.qk_dim, work_.keys, ahead_);
        const bool packs = queries_ > Tile::kRows || shape_.v_dim % W != 0;
        if (packs)
            Tile::pack_values(rows, shape_.v_dim, work_.v_padded, work_.values, ahead_);
        for (int64_t step = 0; step < kSoftmaxSteps; ++step)
            ahead_.step();
        const bool masked = visible_tokens(problem_, task_.pair, task_.row_begin).end < token + rows.columns;
        const int64_t block = masked ? kMaskedRows : task_.row_end - task_.row_begin;
        for (int64_t row = task_.row_begin; row < task_.row_end; row += block) {
            const int64_t end = std::min(row + block, task_.row_end);
            const int64_t seen = visible_tokens(problem_, task_.pair, end - 1).end - token;
            const int64_t columns = std::min(round_up(seen, W), rows.columns);
            if (columns <= 0)
                continue;
            const int64_t first = (row - task_.row_begin) * group_, queries = (end - row) * group_;
            multiply<Tile>(queries, columns, {query_words(head) + first * work_.qk_padded, work_.qk_padded},
                           Words{work_.keys, kTileTokens}, shape_.qk_dim,
                           {work_.scores + first * kTileTokens, kTileTokens, nullptr}, ahead_);
            for (int64_t each = row; each < end; ++each)
                softmax(head, each, token);
            const Words probabilities{work_.probabilities + first * kTileTokens, kTileTokens};
            const Sums sums{work_.accumulator + state(head, first) * work_.v_padded, work_.v_padded,
                            work_.rescale + first};
            if (packs)
                multiply<Tile>(queries, work_.v_padded, probabilities, Words{work_.values, work_.v_padded},
                               columns, sums, ahead_);
            else
                multiply<Tile>(queries, shape_.v_dim, probabilities, ValueRows<Tile>{rows.values}, columns,
                               sums, ahead_);
        }
    }

    // Turns the scores of one row's queries over a tile into exponentials relative to a reference score: a
    // query's largest so far, give or take kSlack, so that sums rarely need rescaling.
    void softmax(int64_t head, int64_t row, int64_t token) {
        const Interval columns = visible_columns(row, token);
        const int64_t first = (row - task_.row_begin) * group_;
        for (int64_t i = first; i < first + group_; ++i) {
            float *probabilities = work_.probabilities + i * kTileTokens;
            work_.rescale[i] = 1.0f;
            if (columns.begin >= columns.end) {
                std::memset(probabilities, 0, sizeof(float) * kTileTokens);
                continue;
            }
            F scores[kVectors];
            for (int v = 0; v < kVectors; ++v) {
                scores[v] = load<F>(work_.scores + i * kTileTokens + v * W);
                if constexpr (kScaled)
                    scores[v] *= load<F>(key_scales(head) + v * W);
            }
            finish_scores({row, head * group_ + i - first}, token, columns, scores);
            F most = scores[0];
            for (int v = 1; v < kVectors; ++v)
                most = maximum(most, scores[v]);
            float &reference = work_.reference[state(head, i)];
            if (!within<W>(most, reference + kSlack)) [[unlikely]] {
                const float before = reference;
                reference = std::max(before, horizontal_maximum<W>(most));
                work_.rescale[i] = __builtin_exp2f(before - reference);
            }
            float *sums = work_.sum + state(head, i) * W;
            F total = load<F>(sums) * work_.rescale[i];
            for (int v = 0; v < kVectors; ++v) {
                F p = power_of_two<W>(scores[v] - reference);
                total += p;
                if constexpr (kScaled)
                    p *= load<F>(value_scales(head) + v * W);
                store(probabilities + v * W, p);
            }
            store(sums, total);
        }
    }
};

template <class Tile> void attend(const Problem &problem, const Task &task, const Workspace &work) {
    Attend<Tile>(problem, task, work).run();
}

} // namespace
} // namespace lamina::attention
