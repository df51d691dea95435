// Runs one task of a decode step: one query row, KV of bfloat16 or codes, head sizes that are multiples
// of 32.
//
// Tiles of 16 tokens: first the scores of all heads, while the tile's values are read ahead, then the values
// of all heads, while the next tile's keys are read ahead. Scores of 4 tokens and one query come from the
// tokens' keys transposed within quarters of vectors: quarter i of word vector j holds word 4i + j of each
// token, and meets word 4i + j of the query. Values of 2 tokens are interleaved within quarters, which leaves
// columns in an order that finish() restores. Both need only shuffles that run beside multiplications.
#pragma once

#include "stored_avx512bf16.h"

namespace lamina::attention {
namespace {

constexpr int64_t kDecodeTokens = 16;
constexpr int64_t kDecodeColumns = 32; // elements of a vector of pairs: head sizes are multiples of it
constexpr int64_t kDecodeQueries = 8;  // per KV head, at most

// In every quarter (16 bytes) of a vector: elements I of the same quarter of a followed by b.
template <class V, int... I> inline V in_quarters(const V &a, const V &b) {
    constexpr int size = sizeof...(I), elements = 4 * size;
    constexpr auto place = [](int lane, int i) { return i < size ? lane + i : elements + lane + i - size; };
    return __builtin_shufflevector(a, b, place(0, I)..., place(size, I)..., place(2 * size, I)...,
                                   place(3 * size, I)...);
}

// Quarters A, B, C and D of a followed by b.
template <int A, int B, int C, int D>
inline Floats<16> of_quarters(const Floats<16> &a, const Floats<16> &b) {
    return __builtin_shufflevector(a, b, 4 * A, 4 * A + 1, 4 * A + 2, 4 * A + 3, 4 * B, 4 * B + 1, 4 * B + 2,
                                   4 * B + 3, 4 * C, 4 * C + 1, 4 * C + 2, 4 * C + 3, 4 * D, 4 * D + 1,
                                   4 * D + 2, 4 * D + 3);
}

bool decodable(const Shape &shape) {
    return shape.qk_dim % kDecodeColumns == 0 && shape.v_dim % kDecodeColumns == 0;
}

// The rows of two tiles in the order of the work: the keys of one, its values, the keys of the next, its
// values. A row begins at the task's first head; tokens past the last one of a tile have zeros.
template <class Stored> using Rows = const typename Stored::Kv * [4 * kDecodeTokens];
constexpr int64_t kValues = kDecodeTokens, kNextKeys = 2 * kDecodeTokens; // where they begin

// Prefetches rows a tile ahead of their use. A core seems to drop a prefetch when it has no room to track
// another miss, which is often while memory is the limit: so every line is prefetched twice, half a tile
// apart. On one Zen 5 core that raises the bytes read per second by 1 to 30%, on two by up to 15%.
template <class Stored> class AheadTwice {
public:
    // Prefetches the keys of the first tile and half of its values.
    AheadTwice(const Rows<Stored> &rows, int64_t key_bytes, int64_t value_bytes)
        : rows_(rows), bytes_{key_bytes, value_bytes} {
        for (start_row(0); late_ < kDecodeTokens;)
            ask_for_two();
    }

    // Called once the rows have moved on by a tile: continues with the second half of the first tile's
    // values.
    void next_tile() { start_row(kDecodeTokens); }

    // Always inlined: GCC considers a function that only prefetches free of effects and drops its calls.
    [[gnu::always_inline]] void ask_for_two() {
        __builtin_prefetch(early_row_ + at_);
        __builtin_prefetch(early_row_ + at_ + kCacheLine);
        __builtin_prefetch(late_row_ + at_);
        __builtin_prefetch(late_row_ + at_ + kCacheLine);
        at_ += 2 * kCacheLine;
        if (at_ >= end_) [[unlikely]]
            start_row(late_ + 1);
    }

private:
    [[gnu::always_inline]] void start_row(int64_t late) {
        const int64_t early = late + kDecodeTokens / 2;
        late_ = late;
        late_row_ = reinterpret_cast<const std::byte *>(rows_[late]);
        early_row_ = reinterpret_cast<const std::byte *>(rows_[early]);
        end_ = bytes_[early / kDecodeTokens % 2];
        at_ = 0;
    }

    const typename Stored::Kv *const *rows_; // all of them
    int64_t bytes_[2];                       // of a row of keys, of values
    int64_t late_;                           // the row that is prefetched again
    const std::byte *early_row_, *late_row_;
    int64_t at_, end_; // bytes into both
};

// QUERIES query heads share a KV head.
template <class Stored, int QUERIES> class DecodeTask {
    using Kv = typename Stored::Kv;
    using Ahead = AheadTwice<Stored>;
    static constexpr bool kScaled = Stored::kScaled;
    static constexpr int kRowsPerStep = 4 / int{sizeof(Kv)}; // loads of 32 elements for a prefetch of 2 lines
    static constexpr int W = 16;
    static constexpr int kBlock = QUERIES <= 4 ? 4 : 2; // vectors of a query's sums that registers hold
    static constexpr float kSlack = 8;
    using F = Floats<W>;
    using Halves = Vectors<2 * W>::Halves;
    using Word = uint32_t; // two bfloat16

public:
    DecodeTask(const Problem &problem, const Task &task, const Workspace &work)
        : problem_(problem), shape_(problem.shape), task_(task), work_(work),
          heads_(task.head_end - task.head_begin),
          special_(problem.scoring.softcap > 0 || problem.scoring.alibi_slopes) {}

    void run() {
        start();
        const int64_t bytes = heads_ * int64_t{sizeof(Kv)};
        Rows<Stored> rows;
        gather(task_, task_.token_begin, rows + kNextKeys);
        advance(task_.token_begin + kDecodeTokens, rows);
        Ahead ahead(rows, bytes * shape_.qk_dim, bytes * shape_.v_dim);
        for (int64_t token = task_.token_begin; token < task_.token_end; token += kDecodeTokens) {
            const int64_t tokens = std::min(kDecodeTokens, task_.token_end - token);
            if constexpr (kScaled)
                aim_scales(token, tokens);
            for (int64_t head = 0; head < heads_; ++head) {
                F halves[2][QUERIES];
                score(rows, head, halves[0], ahead);
                score(rows + kDecodeTokens / 2, head, halves[1], ahead);
                weigh(head, token, tokens, halves);
            }
            for (int64_t head = 0; head < heads_; ++head)
                add_values(rows + kValues, head, ahead);
            advance(token + 2 * kDecodeTokens, rows);
            ahead.next_tile();
        }
        finish();
    }

private:
    float *accumulator(int64_t head) const { return work_.accumulator + head * QUERIES * work_.v_padded; }
    float *sums(int64_t head) const { return work_.sum + head * QUERIES * W; }
    float *references(int64_t head) const { return work_.reference + head * QUERIES; }
    // [qk_dim / 32][4][QUERIES] vectors: word J of every quarter of 32 elements, in all words of the quarter.
    float *queries(int64_t head) const { return work_.query + head * QUERIES * shape_.qk_dim * 2; }
    // Those of a tile's tokens, in pairs: [QUERIES][kDecodeTokens / 2].
    Word *probabilities(int64_t head) const {
        return reinterpret_cast<Word *>(work_.probabilities) + head * QUERIES * (kDecodeTokens / 2);
    }
    int64_t query_head(int64_t head, int q) const { return (task_.head_begin + head) * QUERIES + q; }

    void start() {
        std::memset(work_.zeros, 0, sizeof(float) * heads_ * std::max(work_.qk_padded, work_.v_padded));
        std::memset(work_.accumulator, 0, sizeof(float) * heads_ * QUERIES * work_.v_padded);
        std::memset(work_.sum, 0, sizeof(float) * heads_ * QUERIES * W);
        std::fill_n(work_.reference, heads_ * QUERIES, -kInfinity);
        const int64_t first = (task_.row_begin * shape_.query_heads + query_head(0, 0)) * shape_.qk_dim;
        for (int64_t head = 0; head < heads_; ++head)
            for (int64_t q = 0; q < QUERIES; ++q)
                for (int64_t d = 0; d < shape_.qk_dim; d += kDecodeColumns)
                    spread_query(first + (head * QUERIES + q) * shape_.qk_dim + d,
                                 queries(head) + (d / 8 * QUERIES + q) * W);
    }

    // 32 elements of a query, as 4 vectors that are QUERIES apart.
    void spread_query(int64_t offset, float *target) const {
        uint16_t pairs[kDecodeColumns];
        round_pairs(problem_, offset, kDecodeColumns, pairs);
        const auto words = load<F>(pairs);
        store(target, in_quarters<F, 0, 0, 0, 0>(words, words));
        store(target + QUERIES * W, in_quarters<F, 1, 1, 1, 1>(words, words));
        store(target + 2 * QUERIES * W, in_quarters<F, 2, 2, 2, 2>(words, words));
        store(target + 3 * QUERIES * W, in_quarters<F, 3, 3, 3, 3>(words, words));
    }

    // Moves on by a tile. The new next tile begins at `next` or, where the task ends, is the first one of the
    // task that this thread may run next.
    void advance(int64_t next, Rows<Stored> &rows) const {
        std::copy_n(rows + kNextKeys, 2 * kDecodeTokens, rows);
        const bool beyond = next >= task_.token_end && task_.following;
        const Task &task = beyond ? *task_.following : task_;
        gather(task, beyond ? task.token_begin : next, rows + kNextKeys);
    }

    void gather(const Task &task, int64_t token, const Kv **keys) const {
        const Kv **values = keys + kValues;
        const int32_t *slots = problem_.segments.slots + problem_.segments.kv_offsets[task.pair];
        const auto *zeros = reinterpret_cast<const Kv *>(work_.zeros);
        const Kv *first_key = static_cast<const Kv *>(problem_.k) + task.head_begin * shape_.qk_dim;
        const Kv *first_value = static_cast<const Kv *>(problem_.v) + task.head_begin * shape_.v_dim;
        const int64_t tokens = std::clamp<int64_t>(task.token_end - token, 0, kDecodeTokens);
        for (int64_t t = 0; t < tokens; ++t) {
            const int64_t row = slots[token + t] * shape_.kv_heads;
            keys[t] = first_key + row * shape_.qk_dim;
            values[t] = first_value + row * shape_.v_dim;
            if constexpr (kScaled) {
                __builtin_prefetch(problem_.k_scales + row);
                __builtin_prefetch(problem_.v_scales + row);
            }
        }
        std::fill(keys + tokens, keys + kDecodeTokens, zeros);
        std::fill(values + tokens, values + kDecodeTokens, zeros);
    }

    // The scales of a tile's tokens lie at these places, for the task's first head.
    void aim_scales(int64_t token, int64_t tokens) {
        const int32_t *slots = problem_.segments.slots + problem_.segments.kv_offsets[task_.pair] + token;
        present_ = static_cast<__mmask16>((1u << tokens) - 1);
        places_ = _mm512_mullo_epi32(_mm512_maskz_loadu_epi32(present_, slots),
                                     _mm512_set1_epi32(static_cast<int>(shape_.kv_heads)));
    }

    // Those of a head; 0 past the last token.
    [[gnu::always_inline]] F scales(const float *all, int64_t head) const {
        return _mm512_mask_i32gather_ps(_mm512_setzero_ps(), present_, places_, all + task_.head_begin + head,
                                        4);
    }

    // Raw scores of 8 tokens; quarters 0 and 1 (2 and 3) hold parts of the sums of the first (second) 4
    // tokens.
    [[gnu::always_inline]] void score(const Kv *const *keys, int64_t head, F (&halves)[QUERIES],
                                      Ahead &ahead) {
        const int64_t dim = shape_.qk_dim;
        const float *query = queries(head);
        asm("" : "+r"(query)); // otherwise GCC keeps queries in registers across calls, and sums in memory
        F sums[2][QUERIES] = {};
        for (int64_t d = 0; d < dim; d += kDecodeColumns) {
            F words[2][4];
            for (int g = 0; g < 2; ++g)
                key_words(keys + 4 * g, head * dim + d, words[g], ahead);
            for (int j = 0; j < 4; ++j, query += QUERIES * W)
                for (int q = 0; q < QUERIES; ++q)
                    for (int g = 0; g < 2; ++g)
                        sums[g][q] = dot_pairs(sums[g][q], words[g][j], load<F>(query + q * W));
        }
        for (int q = 0; q < QUERIES; ++q)
            halves[q] = of_quarters<0, 1, 4, 5>(sums[0][q], sums[1][q]) +
                        of_quarters<2, 3, 6, 7>(sums[0][q], sums[1][q]);
    }

    [[gnu::always_inline]] static F pairs_at(const Kv *source) {
        return reinterpret_cast<F>(load_pairs<Stored>(source));
    }

    [[gnu::always_inline]] static void key_words(const Kv *const *keys, int64_t offset, F (&words)[4],
                                                 Ahead &ahead) {
        const F a = pairs_at(keys[0] + offset), b = pairs_at(keys[1] + offset);
        if constexpr (kRowsPerStep == 2)
            ahead.ask_for_two();
        const F c = pairs_at(keys[2] + offset), d = pairs_at(keys[3] + offset);
        ahead.ask_for_two();
        const F ab_low = in_quarters<F, 0, 4, 1, 5>(a, b), ab_high = in_quarters<F, 2, 6, 3, 7>(a, b),
                cd_low = in_quarters<F, 0, 4, 1, 5>(c, d), cd_high = in_quarters<F, 2, 6, 3, 7>(c, d);
        words[0] = in_quarters<F, 0, 1, 4, 5>(ab_low, cd_low);
        words[1] = in_quarters<F, 2, 3, 6, 7>(ab_low, cd_low);
        words[2] = in_quarters<F, 0, 1, 4, 5>(ab_high, cd_high);
        words[3] = in_quarters<F, 2, 3, 6, 7>(ab_high, cd_high);
    }

    // Turns a head's scores into probabilities relative to a reference: the largest score so far, give or
    // take kSlack, so that sums rarely need rescaling.
    [[gnu::always_inline]] void weigh(int64_t head, int64_t token, int64_t tokens, F (&halves)[2][QUERIES]) {
        const float *reference = references(head);
        const bool plain = !special_ && tokens == kDecodeTokens;
        const float factor = plain ? problem_.scoring.scale * kLog2E : 1;
        F scores[QUERIES], x[QUERIES], most = broadcast<W>(-kInfinity);
        for (int q = 0; q < QUERIES; ++q)
            scores[q] = of_quarters<0, 2, 4, 6>(halves[0][q], halves[1][q]) +
                        of_quarters<1, 3, 5, 7>(halves[0][q], halves[1][q]);
        F value_scales;
        if constexpr (kScaled) {
            const F key_scales = scales(problem_.k_scales, head) * Stored::kUnit;
            value_scales = scales(problem_.v_scales, head) * Stored::kUnit;
            for (F &one : scores)
                one *= key_scales;
        }
        if (!plain) [[unlikely]]
            for (int q = 0; q < QUERIES; ++q)
                scores[q] = finish_scores(scores[q], query_head(head, q), token, tokens);
        for (int q = 0; q < QUERIES; ++q) {
            x[q] = scores[q] * factor - reference[q];
            most = _mm512_maskz_max_ps(0xffff, x[q], most);
        }
        if (_mm512_cmp_ps_mask(most, broadcast<W>(kSlack), _CMP_GT_OQ)) [[unlikely]] {
            raise_references(head, scores, factor);
            for (int q = 0; q < QUERIES; ++q)
                x[q] = scores[q] * factor - reference[q];
        }
        float *sum = sums(head);
        Word *pairs = probabilities(head);
        for (int q = 0; q < QUERIES; ++q) {
            F p = power_of_two<W>(x[q]);
            store(sum + q * W, load<F>(sum + q * W) + p);
            if constexpr (kScaled)
                p *= value_scales;
            store(pairs + q * (kDecodeTokens / 2), _mm512_cvtneps_pbh(p));
        }
    }

    // Scales, caps, biases and masks raw scores, in units of log 2, where weigh() cannot do it itself.
    F finish_scores(F s, int64_t query_head, int64_t token, int64_t tokens) const {
        const Scoring &scoring = problem_.scoring;
        if (scoring.softcap > 0) [[unlikely]]
            s = hyperbolic_tangent<W>(s * (scoring.scale / scoring.softcap)) * (scoring.softcap * kLog2E);
        else
            s = s * (scoring.scale * kLog2E);
        const F lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        if (scoring.alibi_slopes) [[unlikely]] {
            const Segments &segments = problem_.segments;
            const int64_t position = query_position(segments, task_.pair, task_.row_begin);
            const auto distance = static_cast<float>(segments.kv_start[task_.pair] + token - position);
            s += scoring.alibi_slopes[query_head] * kLog2E * (lane + distance);
        }
        if (tokens < kDecodeTokens) [[unlikely]]
            s = lane < static_cast<float>(tokens) ? s : -kInfinity + F{};
        return s;
    }

    [[gnu::noinline]] void raise_references(int64_t head, const F (&scores)[QUERIES], float factor) {
        for (int q = 0; q < QUERIES; ++q) {
            float &reference = references(head)[q];
            const float most = horizontal_maximum<W>(scores[q] * factor);
            if (!(most > reference + kSlack))
                continue;
            const float rescale = __builtin_exp2f(reference - most);
            reference = most;
            float *sum = sums(head) + q * W, *accumulated = accumulator(head) + q * work_.v_padded;
            store(sum, load<F>(sum) * rescale);
            for (int64_t d = 0; d < shape_.v_dim; d += W)
                store(accumulated + d, load<F>(accumulated + d) * rescale);
        }
    }

    // Adds a tile's values of a head, weighed by its probabilities.
    [[gnu::always_inline]] void add_values(const Kv *const *values, int64_t head, Ahead &ahead) {
        int64_t d = 0;
        for (; d + kBlock * W <= shape_.v_dim; d += kBlock * W)
            add_columns<kBlock>(values, head, d, ahead);
        if constexpr (kBlock > 2)
            for (; d < shape_.v_dim; d += kDecodeColumns)
                add_columns<2>(values, head, d, ahead);
    }

    template <int VECTORS>
    [[gnu::always_inline]] void add_columns(const Kv *const *values, int64_t head, int64_t column,
                                            Ahead &ahead) {
        const int64_t stride = work_.v_padded;
        const int64_t offset = head * shape_.v_dim + column;
        float *accumulated = accumulator(head) + column;
        const Word *pairs = probabilities(head);
        asm("" : "+r"(pairs)); // otherwise GCC keeps them in registers across blocks, and sums in memory
        F sums[QUERIES][VECTORS];
        for (int q = 0; q < QUERIES; ++q)
            for (int n = 0; n < VECTORS; ++n)
                sums[q][n] = load<F>(accumulated + q * stride + n * W);
#pragma GCC unroll 8
        for (int w = 0; w < kDecodeTokens / 2; ++w) {
            F words[VECTORS];
            for (int n = 0; n < VECTORS; n += 2) {
                const auto even =
                               reinterpret_cast<Halves>(load_pairs<Stored>(values[2 * w] + offset + n * W)),
                           odd = reinterpret_cast<Halves>(
                               load_pairs<Stored>(values[2 * w + 1] + offset + n * W));
                if (kRowsPerStep == 2 || w % 2)
                    ahead.ask_for_two();
                words[n] = reinterpret_cast<F>(in_quarters<Halves, 0, 8, 1, 9, 2, 10, 3, 11>(even, odd));
                words[n + 1] =
                    reinterpret_cast<F>(in_quarters<Halves, 4, 12, 5, 13, 6, 14, 7, 15>(even, odd));
            }
            for (int q = 0; q < QUERIES; ++q) {
                const F p =
                    reinterpret_cast<F>(Ints<W>{} + static_cast<int32_t>(pairs[q * (kDecodeTokens / 2) + w]));
                for (int n = 0; n < VECTORS; ++n)
                    sums[q][n] = dot_pairs(sums[q][n], p, words[n]);
            }
        }
        for (int q = 0; q < QUERIES; ++q)
            for (int n = 0; n < VECTORS; ++n)
                store(accumulated + q * stride + n * W, sums[q][n]);
    }

    void finish() {
        for (int64_t head = 0; head < heads_; ++head)
            for (int q = 0; q < QUERIES; ++q) {
                const float sum = horizontal_sum<W>(load<F>(sums(head) + q * W));
                const float share = sum == 0 ? 0.0f : 1 / sum;
                const float *accumulated = accumulator(head) + q * work_.v_padded;
                float *out = task_.out + query_head(head, q) * shape_.v_dim;
                for (int64_t d = 0; d < shape_.v_dim; d += kDecodeColumns) {
                    const auto low = load<F>(accumulated + d) * share,
                               high = load<F>(accumulated + d + W) * share;
                    store(out + d, of_quarters<0, 4, 1, 5>(low, high));
                    store(out + d + W, of_quarters<2, 6, 3, 7>(low, high));
                }
                task_.lse[query_head(head, q)] = (references(head)[q] + __builtin_log2f(sum)) / kLog2E;
            }
    }

    const Problem &problem_;
    const Shape &shape_;
    const Task &task_;
    const Workspace &work_;
    const int64_t heads_; // KV heads
    const bool special_;  // scores are more than scaled products
    __mmask16 present_;   // the tokens of a tile
    __m512i places_;      // of their scales
};

} // namespace
} // namespace lamina::attention
