// What tasks that run in tiles of tokens have in common: queries, the rows of a tile, scores and results.
#pragma once

#include "ahead.h"
#include "stored.h"

namespace lamina::attention {
namespace {

template <class Element, int WIDTH> class TiledTask {
protected:
    using Stored = Element;
    using Kv = typename Stored::Kv;
    static constexpr int W = WIDTH;
    static constexpr bool kScaled = Stored::kScaled;
    static constexpr float kSlack = 8;
    using F = Floats<W>;

    // `steps`: prefetch steps per tile and head, see Ahead. `together`: queries that a kernel computes at a
    // time.
    TiledTask(const Problem &problem, const Task &task, const Workspace &work, int64_t steps,
              int64_t together = 4)
        : problem_(problem), shape_(problem.shape), task_(task), work_(work),
          group_(shape_.query_heads / shape_.kv_heads), queries_((task.row_end - task.row_begin) * group_),
          padded_queries_(round_up(queries_, together)),
          slots_(problem.segments.slots + problem.segments.kv_offsets[task.pair]),
          ahead_(problem, task, kTileTokens, steps) {}

    // Calls attend_tile(head, token, rows) for every tile and head.
    template <class AttendTile> void run_tiles(AttendTile attend_tile) {
        for (int64_t token = task_.token_begin; token < task_.token_end; token += kTileTokens) {
            const int64_t tokens = std::min(kTileTokens, task_.token_end - token), next = token + tokens;
            ahead_.aim(slots_ + next, std::min(kTileTokens, task_.token_end - next));
            TileRows<Kv> rows = gather(token, tokens);
            if constexpr (kScaled)
                gather_scales(token, tokens, next);
            for (int64_t head = task_.head_begin; head < task_.head_end; ++head) {
                attend_tile(head, token, rows);
                advance(rows);
            }
        }
    }

    // One query head of one row, in the order of the packed queries of a KV head.
    struct Query {
        int64_t row;
        int64_t head;
    };
    Query query(int64_t kv_head, int64_t index) const {
        return {task_.row_begin + index / group_, kv_head * group_ + index % group_};
    }

    int64_t state(int64_t head, int64_t index) const {
        return (head - task_.head_begin) * padded_queries_ + index;
    }

    // The packed queries of a KV head.
    float *query_words(int64_t head) const { return work_.query + state(head, 0) * work_.qk_padded; }

    // pack(offset, target) makes words of a query's elements of q from an offset on.
    template <class Pack> void start(int64_t query_stride, Pack pack) {
        const int64_t heads = task_.head_end - task_.head_begin, count = heads * padded_queries_;
        std::memset(work_.zeros, 0, sizeof(float) * heads * std::max(work_.qk_padded, work_.v_padded));
        std::memset(work_.accumulator, 0, sizeof(float) * count * work_.v_padded);
        std::memset(work_.sum, 0, sizeof(float) * count * W);
        for (int64_t head = task_.head_begin; head < task_.head_end; ++head)
            for (int64_t i = 0; i < queries_; ++i) {
                const Query at = query(head, i);
                pack((at.row * shape_.query_heads + at.head) * shape_.qk_dim,
                     query_words(head) + i * query_stride);
            }
    }

    // The rows of the task's first head.
    TileRows<Kv> gather(int64_t token, int64_t tokens) const {
        TileRows<Kv> rows;
        rows.columns = round_up(tokens, W);
        const int32_t *slots = slots_ + token;
        const auto *zeros = reinterpret_cast<const Kv *>(work_.zeros);
        const Kv *keys = static_cast<const Kv *>(problem_.k) + task_.head_begin * shape_.qk_dim;
        const Kv *values = static_cast<const Kv *>(problem_.v) + task_.head_begin * shape_.v_dim;
        const int64_t key_stride = shape_.kv_heads * shape_.qk_dim,
                      value_stride = shape_.kv_heads * shape_.v_dim;
        for (int64_t t = 0; t < tokens; ++t) {
            rows.keys[t] = keys + slots[t] * key_stride;
            rows.values[t] = values + slots[t] * value_stride;
        }
        for (int64_t t = tokens; t < kTileTokens; ++t)
            rows.keys[t] = rows.values[t] = zeros;
        return rows;
    }

    // The scales of a tile's tokens, by head, for all heads of the task; prefetches those of the next tile.
    void gather_scales(int64_t token, int64_t tokens, int64_t next) const {
        const int64_t heads = task_.head_end - task_.head_begin;
        const float *keys = problem_.k_scales + task_.head_begin,
                    *values = problem_.v_scales + task_.head_begin;
        for (int64_t t = 0; t < tokens; ++t) {
            const int64_t at = slots_[token + t] * shape_.kv_heads;
            for (int64_t head = 0; head < heads; ++head) {
                work_.key_scales[head * kTileTokens + t] = keys[at + head] * Stored::kUnit;
                work_.value_scales[head * kTileTokens + t] = values[at + head] * Stored::kUnit;
            }
        }
        for (int64_t head = 0; head < heads && tokens < kTileTokens; ++head) {
            std::fill_n(work_.key_scales + head * kTileTokens + tokens, kTileTokens - tokens, 0.0f);
            std::fill_n(work_.value_scales + head * kTileTokens + tokens, kTileTokens - tokens, 0.0f);
        }
        for (int64_t t = next; t < std::min(next + kTileTokens, task_.token_end); ++t) {
            __builtin_prefetch(keys + slots_[t] * shape_.kv_heads);
            __builtin_prefetch(values + slots_[t] * shape_.kv_heads);
        }
    }

    void advance(TileRows<Kv> &rows) const {
        for (int64_t t = 0; t < kTileTokens; ++t) {
            rows.keys[t] += shape_.qk_dim;
            rows.values[t] += shape_.v_dim;
        }
    }

    // Scales, caps, biases and masks the raw scores of a query, in units of log 2.
    template <int N>
    [[gnu::always_inline]] void finish_scores(Query at, int64_t token, Interval columns,
                                              F (&scores)[N]) const {
        const Scoring &scoring = problem_.scoring;
        for (int v = 0; v < N; ++v)
            scores[v] *= scoring.scale * kLog2E;
        if (scoring.softcap > 0) [[unlikely]]
            for (F &s : scores)
                s = hyperbolic_tangent<W>(s / (scoring.softcap * kLog2E)) * (scoring.softcap * kLog2E);
        Ints<W> lane;
        for (int i = 0; i < W; ++i)
            lane[i] = i;
        if (scoring.alibi_slopes) [[unlikely]] {
            const Segments &segments = problem_.segments;
            const int64_t distance =
                segments.kv_start[task_.pair] + token - query_position(segments, task_.pair, at.row);
            for (int v = 0; v < N; ++v)
                scores[v] += scoring.alibi_slopes[at.head] * kLog2E *
                             __builtin_convertvector(lane + static_cast<int32_t>(distance + v * W), F);
        }
        if (columns.begin > 0 || columns.end < N * W) [[unlikely]]
            for (int v = 0; v < N; ++v) {
                const Ints<W> column = lane + v * W;
                scores[v] = column < static_cast<int32_t>(columns.begin) ? -kInfinity + F{} : scores[v];
                scores[v] = column < static_cast<int32_t>(columns.end) ? scores[v] : -kInfinity + F{};
            }
    }

    // The columns of a tile that a row sees.
    Interval visible_columns(int64_t row, int64_t token) const {
        const Interval seen = visible_tokens(problem_, task_.pair, row);
        return {std::max<int64_t>(seen.begin - token, 0),
                std::min({seen.end - token, task_.token_end - token, kTileTokens})};
    }

    // Scales of a tile's tokens for a KV head.
    const float *key_scales(int64_t head) const {
        return work_.key_scales + (head - task_.head_begin) * kTileTokens;
    }
    const float *value_scales(int64_t head) const {
        return work_.value_scales + (head - task_.head_begin) * kTileTokens;
    }

    void finish() {
        for (int64_t head = task_.head_begin; head < task_.head_end; ++head)
            for (int64_t i = 0; i < queries_; ++i) {
                const int64_t s = state(head, i);
                const Query at = query(head, i);
                const int64_t target = (at.row - task_.row_begin) * shape_.query_heads + at.head;
                const float sum = horizontal_sum<W>(load<F>(work_.sum + s * W));
                const float share = sum == 0 ? 0.0f : 1 / sum;
                const float *accumulated = work_.accumulator + s * work_.v_padded;
                for (int64_t d = 0; d < shape_.v_dim; ++d)
                    task_.out[target * shape_.v_dim + d] = accumulated[d] * share;
                task_.lse[target] = (work_.reference[s] + __builtin_log2f(sum)) / kLog2E;
            }
    }

    const Problem &problem_;
    const Shape &shape_;
    const Task &task_;
    const Workspace &work_;
    const int64_t group_;          // query heads that share a KV head
    const int64_t queries_;        // per KV head
    const int64_t padded_queries_; // room for them: kernels compute several together
    const int32_t *const slots_;   // of the pair's tokens
    Ahead ahead_;
};

} // namespace
} // namespace lamina::attention
