// Runs one task of a decode step: one query row, KV of bfloat16 or codes, head sizes that are multiples
// of 32.
//
// Tiles of 16 tokens: first the scores of all heads, while the tile's values are read ahead, then the values
// of all heads, while the next tile's keys are read ahead. decode_words_avx512bf16.h makes words of both by
// shuffles that run beside multiplications.
#pragma once

#include "decode_products_avx512bf16.h"

namespace lamina::attention {
namespace {

constexpr int64_t kDecodeColumns = 32; // head sizes are multiples of it
constexpr int64_t kDecodeQueries = 8;  // per KV head, at most

bool decodable(const Shape &shape) {
    return shape.qk_dim % kDecodeColumns == 0 && shape.v_dim % kDecodeColumns == 0;
}

// A ring of tiles: of each, the rows of its keys, then those of its values. A row begins at the task's first
// head; tokens past the last one of a task have zeros.
constexpr int64_t kTileRows = 2 * kDecodeTokens, kRingTiles = 8;
template <class Stored> using Rows = const typename Stored::Kv * [kRingTiles * kTileRows];

// Prefetches rows some tiles ahead of their use. A core seems to drop a prefetch when it has no room to track
// another miss, which is often while memory is the limit: so every line is prefetched twice, half a tile
// apart. On one Zen 5 core that raises the bytes read per second by 1 to 30%, on two by up to 15%.
//
// TWICE: false where products are by matrix tiles: those processors wait instead, and the second cache has
// more room for what is on its way.
template <class Stored, bool TWICE = true> class AheadRows {
public:
    // Prefetches the first rows: `tiles` tiles but for half of the last one. The ring has one tile more.
    AheadRows(const Rows<Stored> &rows, int64_t key_bytes, int64_t value_bytes, int64_t tiles)
        : rows_(rows), bytes_{key_bytes, value_bytes},
          second_(std::max(key_bytes, value_bytes) > kCacheLine ? kCacheLine : 0),
          due_(tiles * kTileRows - kDecodeTokens) {
        start_row(0);
        finish_due();
    }

    // Called after a tile: prefetches what is left of one tile's rows, if they are not whole pairs of lines.
    void next_tile() {
        due_ += kTileRows;
        finish_due();
    }

    // Always inlined: GCC considers a function that only prefetches free of effects and drops its calls.
    [[gnu::always_inline]] void ask_for_two() {
        constexpr int kLocality = TWICE ? 3 : 2; // 2: into the second cache
        __builtin_prefetch(early_row_ + at_, 0, kLocality);
        __builtin_prefetch(early_row_ + at_ + second_, 0, kLocality);
        if constexpr (TWICE) {
            __builtin_prefetch(late_row_ + at_);
            __builtin_prefetch(late_row_ + at_ + second_);
        }
        at_ += 2 * kCacheLine;
        if (at_ >= end_) [[unlikely]]
            next_row();
    }

private:
    void finish_due() {
        while (late_ < due_)
            ask_for_two();
    }

    [[gnu::always_inline]] void next_row() {
        if (second_ == 0) { // a second row instead of a second line
            start_row(late_ + 1);
            __builtin_prefetch(early_row_);
            __builtin_prefetch(late_row_);
        }
        start_row(late_ + 1);
    }

    [[gnu::always_inline]] void start_row(int64_t late) {
        const int64_t early = late + kDecodeTokens / 2;
        late_ = late;
        late_row_ = reinterpret_cast<const std::byte *>(rows_[late & (kRingTiles * kTileRows - 1)]);
        early_row_ = reinterpret_cast<const std::byte *>(rows_[early & (kRingTiles * kTileRows - 1)]);
        end_ = bytes_[early / kDecodeTokens & 1];
        at_ = 0;
    }

    const typename Stored::Kv *const *rows_; // the ring
    int64_t bytes_[2];                       // of a row of keys, of values
    int64_t second_; // from the first of two lines to the second; 0: rows are one line
    int64_t due_;    // rows to prefetch until the next tile
    int64_t late_;   // the row that is prefetched again
    const std::byte *early_row_, *late_row_;
    int64_t at_, end_; // bytes into both
};

// QUERIES query heads share a KV head.
template <class Stored, int QUERIES> class DecodeTask {
protected:
    using Kv = typename Stored::Kv;
    using Ahead = AheadRows<Stored>;
    static constexpr bool kScaled = Stored::kScaled;
    static constexpr int kElements = kRowElements<Stored>, kWords = kKeyVectors<Stored>;
    static constexpr int W = 16;
    static constexpr int kBlock = QUERIES <= 4 ? 4 : 2; // vectors of a query's sums that registers hold
    static constexpr bool kBlocked = kBlock == 2;       // sums of kBlock vectors of all queries lie together
    static constexpr bool kApart = kScaled && kBlocked; // values are added by add_two_vectors()
    // Read ahead, at least a tile and at most what the ring holds. Less is not enough for short rows, and
    // more slows down a single query of bfloat16.
    static constexpr int64_t kAheadBytes = QUERIES == 1 && !kScaled ? 8 * 1024 : 16 * 1024;
    static constexpr float kSlack = 8;
    using F = Floats<W>;
    using Word = uint32_t; // two bfloat16

public:
    DecodeTask(const Problem &problem, const Task &task, const Workspace &work)
        : problem_(problem), shape_(problem.shape), task_(task), work_(work),
          heads_(task.head_end - task.head_begin),
          query_stride_(QUERIES * round_up(shape_.qk_dim, kElements) * 2),
          stride_(round_up(shape_.v_dim, kElements)),
          special_(problem.scoring.softcap > 0 || problem.scoring.alibi_slopes) {}

    void run() {
        clear_sums();
        for_queries([this](int64_t head, int q, int64_t d, const uint16_t *elements) {
            spread_query<Stored>(elements, queries(head) + (d / 8 * QUERIES + q) * W, QUERIES * W);
        });
        run_tiles<Ahead, 1>([this](int64_t, int64_t token, const Kv *const *rows, Ahead &ahead) {
            if constexpr (kScaled)
                aim_scales(token, 1);
            for (int64_t head = 0; head < heads_; ++head) {
                F halves[2][QUERIES], scores[1][QUERIES];
                score(rows, head, halves[0], ahead);
                score(rows + kDecodeTokens / 2, head, halves[1], ahead);
                for (int q = 0; q < QUERIES; ++q)
                    scores[0][q] = of_quarters<0, 2, 4, 6>(halves[0][q], halves[1][q]) +
                                   of_quarters<1, 3, 5, 7>(halves[0][q], halves[1][q]);
                weigh(head, token, scores, probabilities(head));
            }
            for (int64_t head = 0; head < heads_; ++head)
                add_values(rows + kDecodeTokens, head, ahead);
        });
        finish();
    }

protected:
    // Calls attend(tile, token, rows, ahead) for every TOGETHER tiles, whose rows follow each other in the
    // ring.
    template <class Prefetches, int64_t TOGETHER, class Attend>
    [[gnu::always_inline]] void run_tiles(Attend attend) {
        const int64_t key_bytes = heads_ * shape_.qk_dim * int64_t{sizeof(Kv)},
                      value_bytes = heads_ * shape_.v_dim * int64_t{sizeof(Kv)};
        const int64_t tiles_ahead = std::clamp<int64_t>(
            kAheadBytes / (kDecodeTokens * (key_bytes + value_bytes)), TOGETHER, kRingTiles - TOGETHER);
        Rows<Stored> ring;
        for (int64_t tile = 0; tile < tiles_ahead + TOGETHER; ++tile)
            gather_tile(tile, ring);
        Prefetches ahead(ring, key_bytes, value_bytes, tiles_ahead);
        const int64_t tiles = count_tiles(task_);
        for (int64_t tile = 0; tile < tiles; tile += TOGETHER) {
            attend(tile, task_.token_begin + tile * kDecodeTokens, ring + tile % kRingTiles * kTileRows,
                   ahead);
            for (int64_t more = 0; more < TOGETHER; ++more) {
                gather_tile(tile + tiles_ahead + TOGETHER + more, ring);
                ahead.next_tile();
            }
        }
    }

    // A query's sums of a vector of columns and those after it, if kBlocked only to the end of a block.
    float *accumulator(int64_t head, int64_t q, int64_t column) const {
        constexpr int kColumns = kBlock * W;
        return work_.accumulator + head * QUERIES * stride_ +
               (kBlocked ? (column / kColumns * QUERIES + q) * kColumns + column % kColumns
                         : q * stride_ + column);
    }
    float *sums(int64_t head) const { return work_.sum + head * QUERIES * W; }
    float *references(int64_t head) const { return work_.reference + head * QUERIES; }
    // [qk_dim / kElements][kWords][QUERIES] vectors that meet those of keys.
    float *queries(int64_t head) const { return work_.query + head * query_stride_; }
    // Those of a tile's tokens, in pairs: [QUERIES][kDecodeTokens / 2].
    Word *probabilities(int64_t head) const {
        return reinterpret_cast<Word *>(work_.probabilities) + head * QUERIES * (kDecodeTokens / 2);
    }
    int64_t query_head(int64_t head, int q) const { return (task_.head_begin + head) * QUERIES + q; }

    void clear_sums() {
        std::memset(work_.zeros, 0, sizeof(float) * heads_ * std::max(work_.qk_padded, work_.v_padded));
        std::memset(work_.accumulator, 0, sizeof(float) * heads_ * QUERIES * stride_);
        std::memset(work_.sum, 0, sizeof(float) * heads_ * QUERIES * W);
        std::fill_n(work_.reference, heads_ * QUERIES, -kInfinity);
    }

    // Calls take(head, q, d, elements) for elements [d, d + kElements) of every query, with zeros past its
    // end.
    template <class Take> [[gnu::always_inline]] void for_queries(Take take) {
        const int64_t first = (task_.row_begin * shape_.query_heads + query_head(0, 0)) * shape_.qk_dim;
        for (int64_t head = 0; head < heads_; ++head)
            for (int64_t q = 0; q < QUERIES; ++q)
                for (int64_t d = 0; d < shape_.qk_dim; d += kElements) {
                    uint16_t elements[kElements] = {};
                    round_pairs(problem_, first + (head * QUERIES + q) * shape_.qk_dim + d,
                                std::min<int64_t>(kElements, shape_.qk_dim - d), elements);
                    take(head, static_cast<int>(q), d, elements);
                }
    }

    static int64_t count_tiles(const Task &task) {
        return (task.token_end - task.token_begin + kDecodeTokens - 1) / kDecodeTokens;
    }

    // Puts a tile's rows into the ring; past the end of the task, those of the task that this thread may run
    // next.
    void gather_tile(int64_t tile, Rows<Stored> &ring) const {
        const int64_t beyond = tile - count_tiles(task_);
        const Kv **rows = ring + tile % kRingTiles * kTileRows;
        if (beyond >= 0 && task_.following)
            gather(*task_.following, task_.following->token_begin + beyond * kDecodeTokens, rows);
        else
            gather(task_, task_.token_begin + tile * kDecodeTokens, rows);
    }

    // A function of its own, whose first loop GCC then makes of vectors, without touching the registers of
    // the products.
    [[gnu::noinline]] void gather(const Task &task, int64_t token, const Kv **keys) const {
        const Kv **values = keys + kDecodeTokens;
        const int32_t *slots = problem_.segments.slots + problem_.segments.kv_offsets[task.pair];
        const auto *zeros = reinterpret_cast<const Kv *>(work_.zeros);
        const Kv *first_key = static_cast<const Kv *>(problem_.k) + task.head_begin * shape_.qk_dim;
        const Kv *first_value = static_cast<const Kv *>(problem_.v) + task.head_begin * shape_.v_dim;
        const int64_t tokens = std::clamp<int64_t>(task.token_end - token, 0, kDecodeTokens);
        for (int64_t t = 0; t < tokens; ++t) {
            const int64_t row = slots[token + t] * shape_.kv_heads;
            keys[t] = first_key + row * shape_.qk_dim;
            values[t] = first_value + row * shape_.v_dim;
        }
        if constexpr (kScaled) // apart from the loop above, which prefetches would keep scalar
            for (int64_t t = 0; t < tokens; ++t) {
                const int64_t row = slots[token + t] * shape_.kv_heads;
                __builtin_prefetch(problem_.k_scales + row);
                __builtin_prefetch(problem_.v_scales + row);
            }
        std::fill(keys + tokens, keys + kDecodeTokens, zeros);
        std::fill(values + tokens, values + kDecodeTokens, zeros);
    }

    // The scales of the tokens of one or two tiles lie at these places, for the task's first head.
    void aim_scales(int64_t token, int tiles) {
        const int32_t *slots = problem_.segments.slots + problem_.segments.kv_offsets[task_.pair];
        for (int n = 0; n < tiles; ++n, token += kDecodeTokens) {
            present_[n] = static_cast<__mmask16>((1u << present(token)) - 1);
            places_[n] = _mm512_mullo_epi32(_mm512_maskz_loadu_epi32(present_[n], slots + token),
                                            _mm512_set1_epi32(static_cast<int>(shape_.kv_heads)));
        }
    }

    // Tokens of the tile that begins at `token`.
    int64_t present(int64_t token) const {
        return std::clamp<int64_t>(task_.token_end - token, 0, kDecodeTokens);
    }

    // Those of a head and tile; 0 past the last token.
    [[gnu::always_inline]] F scales(const float *all, int64_t head, int tile) const {
        return _mm512_mask_i32gather_ps(_mm512_setzero_ps(), present_[tile], places_[tile],
                                        all + task_.head_begin + head, 4);
    }

    // Raw scores of 8 tokens; quarters 0 and 1 (2 and 3) hold parts of the sums of the first (second) 4
    // tokens.
    [[gnu::always_inline]] void score(const Kv *const *keys, int64_t head, F (&halves)[QUERIES],
                                      Ahead &ahead) {
        const int64_t dim = shape_.qk_dim;
        const float *query = queries(head);
        asm("" : "+r"(query)); // otherwise GCC keeps queries in registers across calls, and sums in memory
        F sums[2][QUERIES] = {};
        int64_t d = 0;
        for (; d + kElements <= dim; d += kElements)
            add_scores<false>(keys, head * dim + d, query, sums, ahead);
        if constexpr (kElements > kDecodeColumns)
            if (d < dim) [[unlikely]]
                add_scores<true>(keys, head * dim + d, query, sums, ahead);
        for (int q = 0; q < QUERIES; ++q)
            halves[q] = of_quarters<0, 1, 4, 5>(sums[0][q], sums[1][q]) +
                        of_quarters<2, 3, 6, 7>(sums[0][q], sums[1][q]);
    }

    // Those of kElements elements, or of HALF of them.
    template <bool HALF>
    [[gnu::always_inline]] static void add_scores(const Kv *const *keys, int64_t offset, const float *&query,
                                                  F (&sums)[2][QUERIES], Ahead &ahead) {
        __m512i rows[2][4];
        for (int g = 0; g < 2; ++g) {
            const Kv *const *four = keys + 4 * g;
            const __m512i a = row_bytes(four[0] + offset, HALF), b = row_bytes(four[1] + offset, HALF);
            if constexpr (!HALF)
                ahead.ask_for_two();
            const __m512i c = row_bytes(four[2] + offset, HALF), d = row_bytes(four[3] + offset, HALF);
            ahead.ask_for_two();
            transpose_keys<Stored>(a, b, c, d, rows[g]);
        }
        for (int j = 0; j < 4; ++j) {
            F words[2][kWords / 4];
            for (int g = 0; g < 2; ++g)
                to_words<Stored>(rows[g][j], words[g]);
            for (int i = 0; i < kWords / 4; ++i, query += QUERIES * W)
                for (int q = 0; q < QUERIES; ++q)
                    for (int g = 0; g < 2; ++g)
                        sums[g][q] = dot_pairs(sums[g][q], words[g][i], load<F>(query + q * W));
        }
    }

    // Turns a head's scores of TILES tiles into probabilities `pairs` [QUERIES][TILES * kDecodeTokens / 2],
    // relative to a reference: the largest score so far, give or take kSlack, so that sums rarely need
    // rescaling.
    template <int TILES>
    [[gnu::always_inline]] void weigh(int64_t head, int64_t token, F (&scores)[TILES][QUERIES], Word *pairs) {
        const float *reference = references(head);
        const bool plain = !special_ && token + TILES * kDecodeTokens <= task_.token_end;
        const float factor = plain ? problem_.scoring.scale * kLog2E : 1;
        F x[TILES][QUERIES], most = broadcast<W>(-kInfinity);
        F value_scales[TILES];
        for (int n = 0; n < TILES; ++n) {
            if constexpr (kScaled) {
                const F key_scales = scales(problem_.k_scales, head, n) * Stored::kUnit;
                value_scales[n] = scales(problem_.v_scales, head, n) * Stored::kUnit;
                for (F &one : scores[n])
                    one *= key_scales;
            }
            if (!plain) [[unlikely]]
                for (int q = 0; q < QUERIES; ++q)
                    scores[n][q] =
                        finish_scores(scores[n][q], query_head(head, q), token + n * kDecodeTokens);
            for (int q = 0; q < QUERIES; ++q) {
                x[n][q] = scores[n][q] * factor - reference[q];
                most = _mm512_maskz_max_ps(0xffff, x[n][q], most);
            }
        }
        if (_mm512_cmp_ps_mask(most, broadcast<W>(kSlack), _CMP_GT_OQ)) [[unlikely]] {
            for (int n = 0; n < TILES; ++n)
                raise_references(head, scores[n], factor);
            for (int n = 0; n < TILES; ++n)
                for (int q = 0; q < QUERIES; ++q)
                    x[n][q] = scores[n][q] * factor - reference[q];
        }
        float *sum = sums(head);
        for (int q = 0; q < QUERIES; ++q) {
            F total = load<F>(sum + q * W);
            for (int n = 0; n < TILES; ++n) {
                F p = power_of_two<W>(x[n][q]);
                total += p;
                if constexpr (kScaled)
                    p *= value_scales[n];
                store(pairs + (q * TILES + n) * (kDecodeTokens / 2), _mm512_cvtneps_pbh(p));
            }
            store(sum + q * W, total);
        }
    }

    // Scales, caps, biases and masks raw scores, in units of log 2, where weigh() cannot do it itself.
    F finish_scores(F s, int64_t query_head, int64_t token) const {
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
        if (const int64_t tokens = present(token); tokens < kDecodeTokens) [[unlikely]]
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
            float *sum = sums(head) + q * W;
            store(sum, load<F>(sum) * rescale);
            for (int64_t d = 0; d < stride_; d += W) {
                float *accumulated = accumulator(head, q, d);
                store(accumulated, load<F>(accumulated) * rescale);
            }
        }
    }

    // Adds a tile's values of a head, weighed by its probabilities.
    [[gnu::always_inline]] void add_values(const Kv *const *values, int64_t head, Ahead &ahead) {
        constexpr int kColumns = std::max<int>(kBlock * W, kElements);
        const int64_t dim = shape_.v_dim;
        int64_t d = 0;
        for (; d + kColumns <= dim; d += kColumns)
            add_columns<kColumns / W, false>(values, head, d, ahead);
        if constexpr (kColumns > kDecodeColumns)
            if (d < dim)
                add_columns<kValueVectors<Stored>, kScaled>(values, head, d, ahead);
    }

    // VECTORS vectors of columns, as many at once as registers hold.
    template <int VECTORS, bool HALF>
    [[gnu::always_inline]] void add_columns(const Kv *const *values, int64_t head, int64_t column,
                                            Ahead &ahead) {
        if constexpr (kApart) {
            const int64_t offset = head * shape_.v_dim + column;
            const Word *pairs = probabilities(head);
            add_two_vectors<Stored, QUERIES, 0, HALF>(values, offset, pairs, accumulator(head, 0, column),
                                                      ahead);
            add_two_vectors<Stored, QUERIES, 2, HALF>(values, offset, pairs,
                                                      accumulator(head, 0, column + 2 * W), ahead);
        } else {
            add_block<VECTORS, HALF>(values, head, column, ahead);
        }
    }

    template <int VECTORS, bool HALF>
    [[gnu::always_inline]] void add_block(const Kv *const *values, int64_t head, int64_t column,
                                          Ahead &ahead) {
        const int64_t offset = head * shape_.v_dim + column;
        float *accumulated = accumulator(head, 0, column);
        const int64_t stride = kBlocked ? kBlock * W : stride_;
        const Word *pairs = probabilities(head);
        asm("" : "+r"(pairs)); // otherwise GCC keeps them in registers across blocks, and sums in memory
        F sums[QUERIES][VECTORS];
        for (int q = 0; q < QUERIES; ++q)
            for (int n = 0; n < VECTORS; ++n)
                sums[q][n] = load<F>(accumulated + q * stride + n * W);
#pragma GCC unroll 8
        for (int w = 0; w < kDecodeTokens / 2; ++w) {
            F words[VECTORS];
            const Kv *even = values[2 * w] + offset, *odd = values[2 * w + 1] + offset;
            interleave_values<Stored>(even, odd, 0, HALF, words, 0);
            if (!HALF || w % 2 == 0)
                ahead.ask_for_two();
            if constexpr (VECTORS == 4) {
                interleave_values<Stored>(even, odd, 2, HALF, words, 2);
                if (!kScaled)
                    ahead.ask_for_two();
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
                float *out = task_.out + query_head(head, q) * shape_.v_dim;
                for (int64_t d = 0; d < shape_.v_dim; d += kElements) {
                    F sums[kElements / W], columns[kElements / W];
                    for (int n = 0; n < kElements / W; ++n)
                        sums[n] = load<F>(accumulator(head, q, d + n * W));
                    restore_columns<Stored>(sums, columns);
                    for (int64_t n = 0; n < kElements / W && d + n * W < shape_.v_dim; ++n)
                        store(out + d + n * W, columns[n] * share);
                }
                task_.lse[query_head(head, q)] = (references(head)[q] + __builtin_log2f(sum)) / kLog2E;
            }
    }

    const Problem &problem_;
    const Shape &shape_;
    const Task &task_;
    const Workspace &work_;
    const int64_t heads_;        // KV heads
    const int64_t query_stride_; // floats of a head's queries
    const int64_t stride_;       // floats of a query's sums
    const bool special_;         // scores are more than scaled products
    __mmask16 present_[2];       // the tokens of one or two tiles
    __m512i places_[2];          // of their scales
};

} // namespace
} // namespace lamina::attention
