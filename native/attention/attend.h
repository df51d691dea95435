// Runs one task: online softmax over tiles of tokens, as two small matrix products per tile and KV head.
//
// A tile's keys are packed transposed ([qk_words][tokens]) and its values by token ([token_words][v_padded]),
// so that multiply.h computes both products. `Tile` supplies the words: fma_tile.h (floats, any vector
// width) and kernel_avx512bf16.cpp (pairs of bfloat16).
#pragma once

#include "decode_rows.h"

namespace lamina::attention {
namespace {

// A tile's values as they lie in the slab, made into words on the way to the product: packing pays only if
// several blocks of queries use them.
template <class Tile> struct ValueRows {
    const typename Tile::Kv *const *rows;

    template <class, int N> void load_row(int64_t w, int64_t column, Floats<Tile::W> (&row)[N]) const {
        Tile::value_words(rows + w * Tile::kWord, column, row);
    }
};

template <class Tile> class Attend {
    static constexpr int W = Tile::W, kVectors = Tile::kTokens / W;
    using F = Floats<W>;
    using Kv = typename Tile::Kv;
    static constexpr bool kScaled = Tile::Stored::kScaled;
    static constexpr float kSlack = 8;
    static constexpr int64_t kMaskedRows = 16;

public:
    Attend(const Problem &problem, const Task &task, const Workspace &work)
        : problem_(problem), shape_(problem.shape), task_(task), work_(work),
          group_(shape_.query_heads / shape_.kv_heads), queries_((task.row_end - task.row_begin) * group_),
          slots_(problem.segments.slots + problem.segments.kv_offsets[task.pair]),
          ahead_(problem, task, Tile::kTokens, Tile::steps(shape_)) {}

    void run() {
        start();
        for (int64_t token = task_.token_begin; token < task_.token_end; token += Tile::kTokens) {
            const int64_t tokens = std::min(Tile::kTokens, task_.token_end - token), next = token + tokens;
            ahead_.aim(slots_ + next, std::min(Tile::kTokens, task_.token_end - next));
            TileRows<Kv> rows = gather(token, tokens);
            if constexpr (kScaled)
                gather_scales(token, tokens, next);
            for (int64_t head = task_.head_begin; head < task_.head_end; ++head) {
                attend_tile(head, token, rows);
                advance(rows);
            }
        }
        finish();
    }

private:
    // One query head of one row, in the order of the packed queries of a KV head.
    struct Query {
        int64_t row;
        int64_t head;
    };
    Query query(int64_t kv_head, int64_t index) const {
        return {task_.row_begin + index / group_, kv_head * group_ + index % group_};
    }

    int64_t state(int64_t head, int64_t index) const { return (head - task_.head_begin) * queries_ + index; }

    // The packed queries of a KV head: room for a multiple of 4.
    float *query_words(int64_t head) const {
        return work_.query + (head - task_.head_begin) * round_up(queries_, 4) * work_.qk_padded;
    }

    void start() {
        const int64_t heads = task_.head_end - task_.head_begin;
        std::memset(work_.zeros, 0, sizeof(float) * heads * std::max(work_.qk_padded, work_.v_padded));
        const int64_t count = heads * queries_;
        std::memset(work_.accumulator, 0, sizeof(float) * count * work_.v_padded);
        std::memset(work_.sum, 0, sizeof(float) * count * W);
        std::fill_n(work_.reference, count, -kInfinity);
        for (int64_t head = task_.head_begin; head < task_.head_end; ++head) {
            for (int64_t i = 0; i < queries_; ++i) {
                const Query at = query(head, i);
                Tile::pack_query(problem_, (at.row * shape_.query_heads + at.head) * shape_.qk_dim,
                                 query_words(head) + i * work_.qk_padded);
            }
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
        for (int64_t t = tokens; t < Tile::kTokens; ++t)
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
                work_.key_scales[head * kTileTokens + t] = keys[at + head] * Tile::Stored::kUnit;
                work_.value_scales[head * kTileTokens + t] = values[at + head] * Tile::Stored::kUnit;
            }
        }
        for (int64_t head = 0; head < heads && tokens < Tile::kTokens; ++head) {
            std::fill_n(work_.key_scales + head * kTileTokens + tokens, Tile::kTokens - tokens, 0.0f);
            std::fill_n(work_.value_scales + head * kTileTokens + tokens, Tile::kTokens - tokens, 0.0f);
        }
        for (int64_t t = next; t < std::min(next + Tile::kTokens, task_.token_end); ++t) {
            __builtin_prefetch(keys + slots_[t] * shape_.kv_heads);
            __builtin_prefetch(values + slots_[t] * shape_.kv_heads);
        }
    }

    void advance(TileRows<Kv> &rows) const {
        for (int64_t t = 0; t < Tile::kTokens; ++t) {
            rows.keys[t] += shape_.qk_dim;
            rows.values[t] += shape_.v_dim;
        }
    }

    // Whether one row's few queries take the products of decode_rows.h.
    bool decodes() const {
        return Tile::kWord == 1 && task_.row_end - task_.row_begin == 1 && queries_ <= kDecodeRowQueries &&
               shape_.qk_dim % W == 0 && shape_.v_dim % W == 0;
    }

    void decode_tile(int64_t head, int64_t token, const TileRows<Kv> &rows) {
        score_rows<Tile>(queries_, {query_words(head), work_.qk_padded}, shape_.qk_dim, rows, work_.scores,
                         ahead_);
        for (int64_t step = 0; step < kSoftmaxSteps; ++step)
            ahead_.step();
        softmax(head, task_.row_begin, token);
        multiply_few<Tile>(
            queries_, shape_.v_dim, {work_.probabilities, Tile::kTokens}, ValueRows<Tile>{rows.values},
            rows.columns,
            {work_.accumulator + state(head, 0) * work_.v_padded, work_.v_padded, work_.rescale}, ahead_);
    }

    // Where a mask's edge crosses the tile, a few rows at a time: each block skips the tokens that none of
    // its rows sees.
    void attend_tile(int64_t head, int64_t token, const TileRows<Kv> &rows) {
        if constexpr (Tile::kWord == 1)
            if (decodes()) {
                decode_tile(head, token, rows);
                return;
            }
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
                           Words{work_.keys, Tile::kTokens}, (shape_.qk_dim + Tile::kWord - 1) / Tile::kWord,
                           {work_.scores + first * Tile::kTokens, Tile::kTokens, nullptr}, ahead_);
            for (int64_t each = row; each < end; ++each)
                softmax(head, each, token);
            const Words probabilities{work_.probabilities + first * Tile::kTokens, Tile::kTokens};
            const Sums sums{work_.accumulator + state(head, first) * work_.v_padded, work_.v_padded,
                            work_.rescale + first};
            const int64_t words = columns / Tile::kWord;
            if (packs)
                multiply<Tile>(queries, work_.v_padded, probabilities, Words{work_.values, work_.v_padded},
                               words, sums, ahead_);
            else
                multiply<Tile>(queries, shape_.v_dim, probabilities, ValueRows<Tile>{rows.values}, words,
                               sums, ahead_);
        }
    }

    // Turns the scores of one row's queries over a tile into exponentials relative to a reference score: a
    // query's largest so far, give or take kSlack, so that sums rarely need rescaling.
    void softmax(int64_t head, int64_t row, int64_t token) {
        const Interval seen = visible_tokens(problem_, task_.pair, row);
        const Interval columns{std::max<int64_t>(seen.begin - token, 0),
                               std::min({seen.end - token, task_.token_end - token, Tile::kTokens})};
        const int64_t first = (row - task_.row_begin) * group_;
        for (int64_t i = first; i < first + group_; ++i) {
            float *probabilities = work_.probabilities + i * Tile::kTokens;
            work_.rescale[i] = 1.0f;
            if (columns.begin >= columns.end) {
                std::memset(probabilities, 0, sizeof(float) * Tile::kTokens);
                continue;
            }
            F scores[kVectors];
            const F most = finish_scores(work_.scores + i * Tile::kTokens, {row, head * group_ + i - first},
                                         token, columns, scores);
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
                    p *= load<F>(work_.value_scales + (head - task_.head_begin) * kTileTokens + v * W);
                Tile::store_probabilities(probabilities, v * W, p);
            }
            store(sums, total);
        }
    }

    // Scales, caps, biases and masks raw scores, in units of log 2; returns the largest of each vector lane.
    [[gnu::always_inline]] F finish_scores(const float *raw, Query at, int64_t token, Interval columns,
                                           F (&scores)[kVectors]) const {
        const Scoring &scoring = problem_.scoring;
        for (int v = 0; v < kVectors; ++v)
            scores[v] = load<F>(raw + v * W) * (scoring.scale * kLog2E);
        if constexpr (kScaled) {
            const float *scales = work_.key_scales + (at.head / group_ - task_.head_begin) * kTileTokens;
            for (int v = 0; v < kVectors; ++v)
                scores[v] *= load<F>(scales + v * W);
        }
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
            for (int v = 0; v < kVectors; ++v)
                scores[v] += scoring.alibi_slopes[at.head] * kLog2E *
                             __builtin_convertvector(lane + static_cast<int32_t>(distance + v * W), F);
        }
        if (columns.begin > 0 || columns.end < Tile::kTokens) [[unlikely]]
            for (int v = 0; v < kVectors; ++v) {
                const Ints<W> column = lane + v * W;
                scores[v] = column < static_cast<int32_t>(columns.begin) ? -kInfinity + F{} : scores[v];
                scores[v] = column < static_cast<int32_t>(columns.end) ? scores[v] : -kInfinity + F{};
            }
        F most = scores[0];
        for (int v = 1; v < kVectors; ++v)
            most = maximum(most, scores[v]);
        return most;
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
    const int64_t group_;        // query heads that share a KV head
    const int64_t queries_;      // per KV head
    const int32_t *const slots_; // of the pair's tokens
    Ahead ahead_;
};

template <class Tile> void attend(const Problem &problem, const Task &task, const Workspace &work) {
    Attend<Tile>(problem, task, work).run();
}

} // namespace
} // namespace lamina::attention
