// Runs one task: online softmax over tiles of tokens, as two small matrix products per tile and KV head.
//
// A tile's keys are packed transposed ([qk_words][tokens]) and its values by token ([token_words][v_padded]),
// so that both products are the same register-blocked kernel: C = rescale * C + A B, where B's rows are whole
// vectors and A's words are broadcast. `Tile` supplies the words: see fma_tile.h (float) and
// kernel_avx512bf16.cpp (bfloat16 pairs).
#pragma once

#include "task.h"
#include "vector_math.h"

namespace lamina::attention {
namespace {

// C[MR x NV vectors] = rescale * C + A[MR x words] B[words x NV vectors]; a null rescale starts from 0.
template <class Tile, int MR, int NV>
inline void multiply_block(const float *a, int64_t a_stride, const float *b, int64_t b_stride, int64_t words,
                           float *c, int64_t c_stride, const float *rescale) {
    using F = Floats<Tile::W>;
    F sums[MR][NV];
    for (int m = 0; m < MR; ++m)
        for (int n = 0; n < NV; ++n)
            sums[m][n] = rescale ? load<F>(c + m * c_stride + n * Tile::W) * rescale[m] : F{};
    for (int64_t w = 0; w < words; ++w) {
        F row[NV];
        for (int n = 0; n < NV; ++n)
            row[n] = load<F>(b + w * b_stride + n * Tile::W);
        for (int m = 0; m < MR; ++m)
            for (int n = 0; n < NV; ++n)
                sums[m][n] = Tile::multiply_add(sums[m][n], a + m * a_stride + w, row[n]);
    }
    for (int m = 0; m < MR; ++m)
        for (int n = 0; n < NV; ++n)
            store(c + m * c_stride + n * Tile::W, sums[m][n]);
}

template <class Tile, int NV, int MR = Tile::kRows>
void multiply_rows(int64_t rows, const float *a, int64_t a_stride, const float *b, int64_t b_stride,
                   int64_t words, float *c, int64_t c_stride, const float *rescale) {
    int64_t m = 0;
    for (; m + MR <= rows; m += MR)
        multiply_block<Tile, MR, NV>(a + m * a_stride, a_stride, b, b_stride, words, c + m * c_stride,
                                     c_stride, rescale ? rescale + m : nullptr);
    if constexpr (MR > 1)
        if (m < rows)
            multiply_rows<Tile, NV, MR - 1>(rows - m, a + m * a_stride, a_stride, b, b_stride, words,
                                            c + m * c_stride, c_stride, rescale ? rescale + m : nullptr);
}

// C[rows x columns] = rescale * C + A[rows x words] B[words x columns]; columns is a multiple of Tile::W.
template <class Tile>
void multiply(int64_t rows, int64_t columns, const float *a, int64_t a_stride, const float *b, int64_t words,
              float *c, const float *rescale) {
    constexpr int64_t panel = Tile::kColumns * Tile::W;
    int64_t n = 0;
    for (; n + panel <= columns; n += panel)
        multiply_rows<Tile, Tile::kColumns>(rows, a, a_stride, b + n, columns, words, c + n, columns,
                                            rescale);
    for (; n < columns; n += Tile::W)
        multiply_rows<Tile, 1>(rows, a, a_stride, b + n, columns, words, c + n, columns, rescale);
}

template <class Tile> class Attend {
    static constexpr int W = Tile::W;
    using F = Floats<W>;
    using Kv = typename Tile::Kv;

public:
    Attend(const Problem &problem, const Task &task, const Workspace &work)
        : problem_(problem), shape_(problem.shape), task_(task), work_(work),
          group_(shape_.query_heads / shape_.kv_heads), queries_((task.row_end - task.row_begin) * group_),
          words_((shape_.qk_dim + Tile::kWord - 1) / Tile::kWord) {}

    void run() {
        start();
        const auto &segments = problem_.segments;
        const int32_t *slots = segments.slots + segments.kv_offsets[task_.pair];
        for (int64_t token = task_.token_begin; token < task_.token_end; token += kTileTokens)
            for (int64_t head = task_.head_begin; head < task_.head_end; ++head)
                attend_tile(head, slots + token, token, std::min(kTileTokens, task_.token_end - token));
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

    void start() {
        std::memset(work_.zeros, 0, sizeof(float) * std::max(work_.qk_padded, work_.v_padded));
        const int64_t count = (task_.head_end - task_.head_begin) * queries_;
        std::memset(work_.accumulator, 0, sizeof(float) * count * work_.v_padded);
        for (int64_t i = 0; i < count; ++i) {
            work_.maximum[i] = -kInfinity;
            work_.sum[i] = 0;
        }
        for (int64_t head = task_.head_begin; head < task_.head_end; ++head)
            for (int64_t i = 0; i < queries_; ++i) {
                const Query at = query(head, i);
                Tile::pack_query(problem_, (at.row * shape_.query_heads + at.head) * shape_.qk_dim,
                                 work_.query + state(head, i) * work_.qk_padded);
            }
    }

    void attend_tile(int64_t head, const int32_t *slots, int64_t token, int64_t tokens) {
        const Kv *rows[kTileTokens];
        gather(rows, problem_.k, slots, tokens, head, shape_.qk_dim);
        Tile::pack_keys(rows, shape_.qk_dim, work_.keys);
        multiply<Tile>(queries_, kTileTokens, work_.query + state(head, 0) * work_.qk_padded, work_.qk_padded,
                       work_.keys, words_, work_.scores, nullptr);
        for (int64_t i = 0; i < queries_; ++i)
            softmax(head, i, token, tokens);
        gather(rows, problem_.v, slots, tokens, head, shape_.v_dim);
        Tile::pack_values(rows, shape_.v_dim, work_.v_padded, work_.values);
        multiply<Tile>(queries_, work_.v_padded, work_.probabilities, kTileTokens, work_.values,
                       kTileTokens / Tile::kWord, work_.accumulator + state(head, 0) * work_.v_padded,
                       work_.rescale);
    }

    void gather(const Kv *(&rows)[kTileTokens], const void *slab, const int32_t *slots, int64_t tokens,
                int64_t head, int64_t dim) const {
        const Kv *base = static_cast<const Kv *>(slab) + head * dim;
        const int64_t stride = shape_.kv_heads * dim;
        for (int64_t t = 0; t < tokens; ++t)
            rows[t] = base + slots[t] * stride;
        for (int64_t t = tokens; t < kTileTokens; ++t)
            rows[t] = reinterpret_cast<const Kv *>(work_.zeros);
    }

    // Turns one query's scores over a tile into probabilities relative to its running maximum.
    void softmax(int64_t head, int64_t index, int64_t token, int64_t tokens) {
        const Query at = query(head, index);
        const Interval seen = visible_tokens(problem_, task_.pair, at.row);
        const int64_t low = std::max<int64_t>(seen.begin - token, 0),
                      high = std::min(seen.end - token, tokens);
        float *scores = work_.scores + index * kTileTokens;
        float *probabilities = work_.probabilities + index * kTileTokens;
        work_.rescale[index] = 1.0f;
        if (low >= high) {
            std::memset(probabilities, 0, sizeof(float) * kTileTokens);
            return;
        }
        float &most = work_.maximum[state(head, index)], &sum = work_.sum[state(head, index)];
        const float before = most;
        most = std::max(before, horizontal_maximum<W>(finish_scores(scores, at, token, low, high)));
        F total{};
        for (int64_t t = 0; t < kTileTokens; t += W) {
            const F p = exponential<W>(load<F>(scores + t) - most);
            total += p;
            Tile::store_probabilities(probabilities, t, p);
        }
        work_.rescale[index] = exponential<W>(broadcast<W>(before - most))[0];
        sum = sum * work_.rescale[index] + horizontal_sum<W>(total);
    }

    // Scales, caps, biases and masks raw scores; returns the largest of each vector lane.
    F finish_scores(float *scores, Query at, int64_t token, int64_t low, int64_t high) const {
        const Scoring &scoring = problem_.scoring;
        const float slope = scoring.alibi_slopes ? scoring.alibi_slopes[at.head] : 0.0f;
        const Segments &segments = problem_.segments;
        const int64_t position = query_position(segments, task_.pair, at.row);
        const auto distance = static_cast<float>(segments.kv_start[task_.pair] + token - position);
        Ints<W> lane;
        for (int i = 0; i < W; ++i)
            lane[i] = i;
        F most = broadcast<W>(-kInfinity);
        for (int64_t t = 0; t < kTileTokens; t += W) {
            F s = load<F>(scores + t) * scoring.scale;
            const Ints<W> column = lane + static_cast<int32_t>(t);
            if (scoring.softcap > 0)
                s = hyperbolic_tangent<W>(s / scoring.softcap) * scoring.softcap;
            if (slope != 0)
                s += slope * (__builtin_convertvector(column, F) + distance);
            s = column < static_cast<int32_t>(low) ? -kInfinity + F{} : s;
            s = column < static_cast<int32_t>(high) ? s : -kInfinity + F{};
            store(scores + t, s);
            most = maximum(most, s);
        }
        return most;
    }

    void finish() {
        for (int64_t head = task_.head_begin; head < task_.head_end; ++head)
            for (int64_t i = 0; i < queries_; ++i) {
                const int64_t s = state(head, i);
                const Query at = query(head, i);
                const int64_t target = (at.row - task_.row_begin) * shape_.query_heads + at.head;
                const float sum = work_.sum[s];
                const float *accumulated = work_.accumulator + s * work_.v_padded;
                for (int64_t d = 0; d < shape_.v_dim; ++d)
                    task_.out[target * shape_.v_dim + d] = sum == 0 ? 0.0f : accumulated[d] / sum;
                task_.lse[target] = sum == 0 ? -kInfinity : work_.maximum[s] + __builtin_logf(sum);
            }
    }

    const Problem &problem_;
    const Shape &shape_;
    const Task &task_;
    const Workspace &work_;
    const int64_t group_;   // query heads that share a KV head
    const int64_t queries_; // per KV head
    const int64_t words_;   // of one packed query
};

template <class Tile> void attend(const Problem &problem, const Task &task, const Workspace &work) {
    Attend<Tile>(problem, task, work).run();
}

} // namespace
} // namespace lamina::attention
