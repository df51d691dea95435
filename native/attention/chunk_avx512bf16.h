// Runs one task of many queries: KV of bfloat16 or codes, any head sizes.
//
// A tile's keys are packed transposed ([qk_words][tokens]) and its values as pairs of tokens
// ([token pairs][v_padded]); words are pairs of bfloat16. Four queries at a time meet the tile: their scores
// stay in registers from the product with the keys until they are probabilities, which then meet the values.
// chunk_amx.h has the products by matrix tiles.
#pragma once

#include "stored_avx512bf16.h"
#include "tiled_task.h"

namespace lamina::attention {
namespace {

template <class Element> class ChunkTask : protected TiledTask<Element, 16> {
protected:
    using Base = TiledTask<Element, 16>;
    using Base::problem_, Base::shape_, Base::task_, Base::work_, Base::group_, Base::queries_,
        Base::padded_queries_, Base::ahead_;
    using Base::start, Base::run_tiles, Base::finish, Base::finish_scores, Base::query_words, Base::state,
        Base::key_scales, Base::value_scales, Base::visible_columns, Base::query;
    using Base::W, Base::kScaled, Base::kSlack;
    using typename Base::F, typename Base::Kv, typename Base::Query, typename Base::Stored;
    static constexpr int kQueries = 4; // that meet a tile together
    static_assert(kTileTokens == 4 * W);
    static constexpr float kNone =
        -std::numeric_limits<float>::max(); // the limit before a query's first score
    using Word = uint32_t;

public:
    // `together`: queries that meet a tile together; `steps`: see Ahead.
    ChunkTask(const Problem &problem, const Task &task, const Workspace &work, int64_t together,
              int64_t steps)
        : Base(problem, task, work, steps, together), qk_words_((shape_.qk_dim + 1) / 2),
          query_stride_(round_up(shape_.qk_dim, 2 * W) / 2),
          special_(problem.scoring.softcap > 0 || problem.scoring.alibi_slopes) {}

    ChunkTask(const Problem &problem, const Task &task, const Workspace &work)
        : ChunkTask(problem, task, work, kQueries, packing_steps(problem.shape) + problem.shape.qk_dim / 2) {}

    void run() {
        run_blocks(kQueries, [this](int64_t head, int64_t first, int64_t token, bool plain) {
            attend_some(head, first, token, plain);
        });
    }

protected:
    // Calls attend(head, first, token, plain) for every tile and head, and for every block of `together`
    // queries.
    template <class Attend> void run_blocks(int64_t together, Attend attend) {
        start(query_stride_, [this](int64_t offset, float *packed) {
            round_pairs(problem_, offset, shape_.qk_dim, reinterpret_cast<uint16_t *>(packed));
        });
        const int64_t heads_end = state(task_.head_end, 0);
        std::fill_n(work_.reference, heads_end, 0.0f);
        std::fill_n(work_.limit, heads_end, kNone);
        for (int64_t head = task_.head_begin; head < task_.head_end; ++head)
            std::fill(query_words(head) + queries_ * query_stride_,
                      query_words(head) + padded_queries_ * query_stride_, 0.0f);
        run_tiles([&](int64_t head, int64_t token, const TileRows<Kv> &rows) {
            pack_keys(rows);
            pack_values(rows);
            const bool plain =
                !special_ && sees_all(task_.row_begin, token) && sees_all(task_.row_end - 1, token);
            for (int64_t i = 0; i < queries_; i += together) {
                if (token == task_.token_begin)
                    prefetch_ends(head, i, together);
                attend(head, i, token, plain);
            }
        });
        finish();
    }

    // Prefetch steps of packing one tile and head; the products of one block have qk_dim / 2 more.
    static int64_t packing_steps(const Shape &shape) {
        return kTileTokens * shape.qk_dim / 256 + kTileTokens / 2;
    }

    bool sees_all(int64_t row, int64_t token) const {
        const Interval columns = visible_columns(row, token);
        return columns.begin == 0 && columns.end == kTileTokens;
    }

    void pack_keys(const TileRows<Kv> &rows) {
        int64_t d = 0;
        for (; d + 2 * W <= shape_.qk_dim; d += 2 * W)
            pack_key_words(rows, d, W, [](const Kv *row) { return load_pairs<Stored>(row); });
        const __mmask32 mask = low_bits(shape_.qk_dim - d);
        if (mask)
            pack_key_words(rows, d, qk_words_ - d / 2,
                           [mask](const Kv *row) { return load_pairs<Stored>(row, mask); });
    }

    template <class Load>
    void pack_key_words(const TileRows<Kv> &rows, int64_t d, int64_t words, Load load_elements) {
        for (int64_t t = 0; t < rows.columns; t += W) {
            F block[W];
            for (int i = 0; i < W / 8; ++i)
                ahead_.step();
            for (int i = 0; i < W; ++i)
                block[i] = _mm512_castsi512_ps(load_elements(rows.keys[t + i] + d));
            transpose<W>(block);
            for (int64_t i = 0; i < words; ++i)
                store(work_.keys + (d / 2 + i) * kTileTokens + t, block[i]);
        }
    }

    // Word (t, d) is the pair of element d of tokens 2t and 2t + 1.
    void pack_values(const TileRows<Kv> &rows) {
        float *packed = work_.values;
        for (int64_t t = 0; t < rows.columns; t += 2, packed += work_.v_padded) {
            const Kv *even = rows.values[t], *odd = rows.values[t + 1];
            ahead_.step();
            int64_t d = 0;
            for (; d + 2 * W <= shape_.v_dim; d += 2 * W) {
                const __m512i a = load_pairs<Stored>(even + d), b = load_pairs<Stored>(odd + d);
                store(packed + d, _mm512_permutex2var_epi16(a, interleave(0), b));
                store(packed + d + W, _mm512_permutex2var_epi16(a, interleave(W), b));
            }
            if (d < shape_.v_dim) {
                const __mmask32 mask = low_bits(shape_.v_dim - d);
                const __m512i a = load_pairs<Stored>(even + d, mask), b = load_pairs<Stored>(odd + d, mask);
                store(packed + d, _mm512_permutex2var_epi16(a, interleave(0), b));
                if (d + W < work_.v_padded)
                    store(packed + d + W, _mm512_permutex2var_epi16(a, interleave(W), b));
            }
        }
    }

    // Indices that pair elements first, first + 1, ... of two vectors.
    static __m512i interleave(int first) {
        typename Vectors<2 * W>::Halves indices;
        for (int i = 0; i < W; ++i) {
            indices[2 * i] = static_cast<uint16_t>(first + i);
            indices[2 * i + 1] = static_cast<uint16_t>(2 * W + first + i);
        }
        return reinterpret_cast<__m512i>(indices);
    }

    // While this task meets its first tile: prefetches `count` queries of the task that may follow, and the
    // memory of these queries' results. Always inlined: see Ahead::step.
    [[gnu::always_inline]] void prefetch_ends(int64_t head, int64_t first, int64_t count) const {
        const Task &next = task_.following ? *task_.following : task_;
        const int64_t bytes = shape_.qk_dim * element_size(problem_.q_type);
        for (int64_t i = first; i < std::min(first + count, queries_); ++i) {
            const int64_t row = std::min(next.row_begin + i / group_, next.row_end - 1);
            const int64_t q_row = row * shape_.query_heads + next.head_begin * group_ + i % group_;
            const auto *q = static_cast<const std::byte *>(problem_.q) + q_row * bytes;
            for (int64_t at = 0; at < bytes; at += kCacheLine)
                __builtin_prefetch(q + at);
            const Query at = query(head, i);
            const float *out =
                task_.out + ((at.row - task_.row_begin) * shape_.query_heads + at.head) * shape_.v_dim;
            for (int64_t d = 0; d < shape_.v_dim; d += W)
                __builtin_prefetch(out + d, 1);
        }
    }

    // Leaves out vectors of tokens that none of the queries sees.
    void attend_some(int64_t head, int64_t first, int64_t token, bool plain) {
        const int64_t left = queries_ - first;
        const int64_t last_row = query(head, std::min(first + kQueries, queries_) - 1).row;
        const int64_t end = plain ? kTileTokens : visible_columns(last_row, token).end;
        if (plain && left > 2)
            attend_block<kQueries, 4, true>(head, first, token);
        else if (plain && left == 2)
            attend_block<2, 4, true>(head, first, token);
        else if (plain)
            attend_block<1, 4, true>(head, first, token);
        else if (end > 3 * W)
            attend_block<kQueries, 4, false>(head, first, token);
        else if (end > 2 * W)
            attend_block<kQueries, 3, false>(head, first, token);
        else if (end > W)
            attend_block<kQueries, 2, false>(head, first, token);
        else if (end > 0)
            attend_block<kQueries, 1, false>(head, first, token);
    }

    // M queries against the first N vectors of a tile's tokens. Plain: all are seen, and scores are scaled
    // products.
    template <int M, int N, bool PLAIN> void attend_block(int64_t head, int64_t first, int64_t token) {
        F x[M][N] = {};
        score(query_words(head) + first * query_stride_, x);
        alignas(64) Word pairs[M][N * W / 2];
        weigh_scores<M, N, PLAIN>(head, first, token, x, pairs);
        float *accumulated = work_.accumulator + state(head, first) * work_.v_padded;
        int64_t column = 0;
        for (; column + 4 * W <= work_.v_padded; column += 4 * W)
            add_columns<M, 4>(pairs, column, accumulated + column);
        for (; column < work_.v_padded; column += W)
            add_columns<M, 1>(pairs, column, accumulated + column);
    }

    // Turns products of queries and keys into probabilities, in pairs of tokens.
    template <int M, int N, bool PLAIN>
    [[gnu::always_inline]] void weigh_scores(int64_t head, int64_t first, int64_t token, F (&x)[M][N],
                                             Word (*pairs)[N * W / 2]) {
        if constexpr (kScaled)
            for (int n = 0; n < N; ++n) {
                const F scales = load<F>(key_scales(head) + n * W);
                for (int m = 0; m < M; ++m)
                    x[m][n] *= scales;
            }
        if constexpr (!PLAIN)
            for (int m = 0; m < M; ++m) {
                const Query at = query(head, std::min(first + m, queries_ - 1));
                finish_scores(at, token, visible_columns(at.row, token), x[m]);
            }
        const int64_t s = state(head, first);
        subtract_references(s, PLAIN ? problem_.scoring.scale * kLog2E : 1, x);
        weigh(head, s, x, pairs);
    }

    template <int M, int N> [[gnu::always_inline]] void score(const float *queries, F (&x)[M][N]) {
        for (int64_t w = 0; w < qk_words_; ++w) {
            ahead_.step();
            F keys[N];
            for (int n = 0; n < N; ++n)
                keys[n] = load<F>(work_.keys + w * kTileTokens + n * W);
            for (int m = 0; m < M; ++m)
                for (int n = 0; n < N; ++n)
                    x[m][n] = dot_pairs(x[m][n], broadcast_word(queries + m * query_stride_ + w), keys[n]);
        }
    }

    // Makes scores relative to a reference: a query's largest so far, give or take kSlack, so that sums
    // rarely need rescaling. References are whole numbers: probabilities relative to others differ by powers
    // of two, and are rounded to bfloat16 alike, however tokens are divided among tiles and tasks.
    template <int M, int N>
    [[gnu::always_inline]] void subtract_references(int64_t s, float factor, F (&x)[M][N]) {
        F most[M];
        __mmask16 above = 0;
        for (int m = 0; m < M; ++m) {
            for (int n = 0; n < N; ++n)
                x[m][n] = x[m][n] * factor - work_.reference[s + m];
            most[m] = x[m][0];
            for (int n = 1; n < N; ++n)
                most[m] = _mm512_maskz_max_ps(0xffff, x[m][n], most[m]);
            above |= _mm512_cmp_ps_mask(most[m], broadcast<W>(work_.limit[s + m]), _CMP_GT_OQ);
        }
        if (above) [[unlikely]]
            for (int m = 0; m < M; ++m) {
                const float largest = horizontal_maximum<W>(most[m]);
                if (!(largest > work_.limit[s + m]))
                    continue;
                const float rise = __builtin_ceilf(largest);
                for (int n = 0; n < N; ++n)
                    x[m][n] -= rise;
                raise_reference(s + m, rise);
            }
    }

    [[gnu::noinline]] void raise_reference(int64_t s, float rise) {
        work_.reference[s] += rise;
        if (work_.limit[s] == kSlack) {
            const float rescale = __builtin_exp2f(-rise);
            float *sum = work_.sum + s * W, *accumulated = work_.accumulator + s * work_.v_padded;
            store(sum, load<F>(sum) * rescale);
            for (int64_t d = 0; d < work_.v_padded; d += W)
                store(accumulated + d, load<F>(accumulated + d) * rescale);
        }
        work_.limit[s] = kSlack;
    }

    // Turns scores into probabilities, in pairs of tokens.
    template <int M, int N>
    [[gnu::always_inline]] void weigh(int64_t head, int64_t s, F (&x)[M][N], Word (*pairs)[N * W / 2]) {
        for (int m = 0; m < M; ++m) {
            float *sum = work_.sum + (s + m) * W;
            F total = load<F>(sum);
            for (int n = 0; n < N; ++n) {
                x[m][n] = power_of_two<W>(x[m][n]);
                total += x[m][n];
                if constexpr (kScaled)
                    x[m][n] *= load<F>(value_scales(head) + n * W);
            }
            store(sum, total);
            for (int n = 0; n + 1 < N; n += 2)
                store(pairs[m] + n * W / 2, _mm512_cvtne2ps_pbh(x[m][n + 1], x[m][n]));
            if constexpr (N % 2)
                store(pairs[m] + (N - 1) * W / 2, _mm512_cvtneps_pbh(x[m][N - 1]));
        }
    }

    // Adds N vectors of columns of the values, weighed by probabilities.
    template <int M, int N, int WORDS>
    [[gnu::always_inline]] void add_columns(const Word (&pairs)[M][WORDS], int64_t column,
                                            float *accumulated) {
        const int64_t stride = work_.v_padded;
        F sums[M][N];
        for (int m = 0; m < M; ++m)
            for (int n = 0; n < N; ++n)
                sums[m][n] = load<F>(accumulated + m * stride + n * W);
        for (int w = 0; w < WORDS; ++w) {
            F values[N];
            for (int n = 0; n < N; ++n)
                values[n] = load<F>(work_.values + w * stride + column + n * W);
            for (int m = 0; m < M; ++m)
                for (int n = 0; n < N; ++n)
                    sums[m][n] = dot_pairs(sums[m][n], broadcast_word(&pairs[m][w]), values[n]);
        }
        for (int m = 0; m < M; ++m)
            for (int n = 0; n < N; ++n)
                store(accumulated + m * stride + n * W, sums[m][n]);
    }

    template <class T> [[gnu::always_inline]] static F broadcast_word(const T *word) {
        return reinterpret_cast<F>(Ints<W>{} + load<int32_t>(word));
    }

    const int64_t qk_words_;     // of a key
    const int64_t query_stride_; // words from query to query
    const bool special_;         // scores are more than scaled products
};

} // namespace
} // namespace lamina::attention
