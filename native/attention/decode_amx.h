// Runs one task of a decode step by matrix tiles (AMX): one query row, whose query heads that share a KV head
// meet 32 tokens together, KV of bfloat16 or codes, head sizes that are multiples of 32.
//
// Half of the prefetches are between products: evenly spread, they overlap with all of the work.
//
// Keys are copied so that tiles can read them, and multiplied as they are: a tile of sums has a token per row
// and a query per column. Values are interleaved in pairs of tokens. Copies, products and probabilities are
// those of neighbouring heads, so that a processor overlaps them.
#pragma once

#include "decode_avx512bf16.h"
#include "tiles_amx.h"

namespace lamina::attention {
namespace {

constexpr int64_t kLeastTileQueries = 4; // per KV head: for fewer, AVX-512 is as fast

template <class Stored, int QUERIES> class TileDecodeTask : DecodeTask<Stored, QUERIES> {
    using Base = DecodeTask<Stored, QUERIES>;
    using typename Base::F, typename Base::Kv, typename Base::Word;
    using Ahead = AheadRows<Stored, false>;
    using Base::accumulator, Base::kScaled, Base::kElements, Base::W;
    using Base::heads_, Base::shape_, Base::stride_, Base::task_, Base::work_;
    static constexpr int64_t kTokens = 2 * kDecodeTokens; // of a block: two tiles of the ring
    static constexpr int kVectors = kScaled ? 2 : 1;      // of words, in kElements elements
    static constexpr int64_t kTile = W * W;               // words of a tile
    // Tiles 0 and 1 have sums by tokens, 2 and 3 those by queries, 4 what is by queries, the others
    // what is by tokens.
    static constexpr uint8_t kRows[8] = {16, 16, QUERIES, QUERIES, QUERIES, 16, 16, 16};

public:
    using Base::Base;

    void run() {
        configure_tiles(kRows);
        Base::clear_sums();
        pack_queries();
        const int64_t tiles = Base::count_tiles(task_);
        Base::template run_tiles<Ahead, 2>(
            [&](int64_t tile, int64_t token, const Kv *const *rows, Ahead &ahead) {
                const Kv *none[kTileRows];
                if (tile + 1 == tiles)
                    std::fill_n(none, kTileRows, reinterpret_cast<const Kv *>(work_.zeros));
                const Kv *const *tiles_rows[2] = {rows, tile + 1 == tiles ? none : rows + kTileRows};
                if constexpr (kScaled)
                    Base::aim_scales(token, 2);
                copy_keys(tiles_rows, 0, ahead);
                for (int64_t head = 0; head < heads_; ++head) {
                    if (head + 1 < heads_)
                        copy_keys(tiles_rows, head + 1, ahead);
                    multiply_keys(head, ahead);
                    if (head > 0)
                        weigh(head - 1, token);
                }
                interleave(tiles_rows, 0, ahead);
                weigh(heads_ - 1, token);
                for (int64_t head = 0; head < heads_; ++head) {
                    if (head + 1 < heads_)
                        interleave(tiles_rows, head + 1, ahead);
                    multiply_values(head, ahead);
                }
            });
        asm volatile("tilerelease");
        Base::finish();
    }

private:
    int64_t key_tiles() const { return round_up(shape_.qk_dim, kElements) / (2 * W); } // of 16 tokens
    // [key_tiles][W] rows of words of QUERIES queries.
    float *query_tiles(int64_t head) const { return work_.query + head * key_tiles() * kTile; }
    // What two neighbouring heads have in turn: keys [key_tiles][kTokens][W], values [kTokens / 2][stride_]
    // and scores [kTokens][W].
    float *keys(int64_t head) const { return work_.keys + head % 2 * key_tiles() * 2 * kTile; }
    float *values(int64_t head) const { return work_.values + head % 2 * kTokens / 2 * stride_; }
    float *scores(int64_t head) const { return work_.scores + head % 2 * 2 * kTile; }
    // [QUERIES][kTokens / 2].
    Word *pairs(int64_t head) const {
        return reinterpret_cast<Word *>(work_.probabilities) + head * QUERIES * W;
    }

    // In the order in which to_words() has the words of keys.
    void pack_queries() {
        std::memset(work_.query, 0, sizeof(float) * heads_ * key_tiles() * kTile);
        Base::for_queries([this](int64_t head, int q, int64_t d, const uint16_t *elements) {
            const auto *words = reinterpret_cast<const Word *>(elements);
            auto *tiles = reinterpret_cast<Word *>(query_tiles(head) + d / (2 * W) * kTile);
            for (int n = 0; n < kVectors; ++n)
                for (int i = 0; i < W; ++i) {
                    const int word = kScaled ? i / 4 * 8 + n * 4 + i % 4 : i;
                    std::memcpy(tiles + (n * W + i) * W + q, words + word, sizeof(Word));
                }
        });
    }

    void copy_keys(const Kv *const *const (&rows)[2], int64_t head, Ahead &ahead) const {
        const int64_t dim = shape_.qk_dim;
        for (int64_t t = 0; t < kTokens; t += 2) {
            const Kv *const *two = rows[t / kDecodeTokens] + t % kDecodeTokens;
            const Kv *even = two[0] + head * dim, *odd = two[1] + head * dim;
            float *copy = keys(head) + t * W;
            for (int64_t d = 0; d < dim; d += kElements, copy += kVectors * 2 * kTile) {
                const bool half = d + kElements > dim;
                if (t % 4 == 0 && (!half || t % 8 == 0))
                    ahead.ask_for_two();
                F words[2 * kVectors];
                to_words<Stored>(row_bytes(even + d, half), words);
                to_words<Stored>(row_bytes(odd + d, half), words + kVectors);
                for (int n = 0; n < kVectors; ++n) {
                    store(copy + n * 2 * kTile, words[n]);
                    store(copy + n * 2 * kTile + W, words[kVectors + n]);
                }
            }
        }
    }

    void multiply_keys(int64_t head, Ahead &ahead) const {
        const int64_t prefetches = shape_.qk_dim * int64_t{sizeof(Kv)} / 8 / key_tiles();
        asm volatile("tilezero %tmm0\n\ttilezero %tmm1");
        const float *key = keys(head), *query = query_tiles(head);
        for (int64_t n = 0; n < key_tiles(); ++n, query += kTile, key += 2 * kTile) {
            load_tile<5>(query, W);
            load_tile<6>(key, W);
            add_products<0, 6, 5>();
            load_tile<7>(key + kTile, W);
            add_products<1, 7, 5>();
            for (int64_t i = 0; i < prefetches; ++i)
                ahead.ask_for_two();
        }
        store_tile<0>(scores(head), W);
        store_tile<1>(scores(head) + kTile, W);
    }

    void weigh(int64_t head, int64_t token) {
        F by_query[2][QUERIES];
        turn(scores(head), by_query[0]);
        turn(scores(head) + kTile, by_query[1]);
        Base::weigh(head, token, by_query, pairs(head));
    }

    // Transposes scores [16 tokens][W], of which the first QUERIES columns count.
    static void turn(const float *scores, F (&by_query)[QUERIES]) {
        __m512i quarters[2][4]; // [n][i]: queries i and i + 4 of tokens 8n to 8n + 3, then of the next four
        for (int n = 0; n < 2; ++n) {
            __m512i rows[4];
            for (int t = 0; t < 4; ++t) {
                const float *row = scores + (8 * n + t) * W;
                rows[t] =
                    reinterpret_cast<__m512i>(of_quarters<0, 1, 4, 5>(load<F>(row), load<F>(row + 4 * W)));
            }
            transpose_keys<BFloat16>(rows[0], rows[1], rows[2], rows[3], quarters[n]);
        }
        for (int q = 0; q < QUERIES; ++q) {
            const auto first = reinterpret_cast<F>(quarters[0][q % 4]),
                       second = reinterpret_cast<F>(quarters[1][q % 4]);
            by_query[q] =
                q < 4 ? of_quarters<0, 2, 4, 6>(first, second) : of_quarters<1, 3, 5, 7>(first, second);
        }
    }

    void interleave(const Kv *const *const (&rows)[2], int64_t head, Ahead &ahead) const {
        const int64_t dim = shape_.v_dim;
        for (int64_t t = 0; t < kTokens; t += 2) {
            const Kv *const *two = rows[t / kDecodeTokens] + kDecodeTokens + t % kDecodeTokens;
            const Kv *even = two[0] + head * dim, *odd = two[1] + head * dim;
            float *target = values(head) + t / 2 * stride_;
            for (int64_t d = 0; d < dim; d += kElements) {
                const bool half = d + kElements > dim;
                if (t % 4 == 0 && (!half || t % 8 == 0))
                    ahead.ask_for_two();
                for (int n = 0; n < 2 * kVectors; n += 2) {
                    F words[2];
                    interleave_values<Stored>(even + d, odd + d, n, half, words, 0);
                    store(target + d + n * W, words[0]);
                    store(target + d + (n + 1) * W, words[1]);
                }
            }
        }
    }

    void multiply_values(int64_t head, Ahead &ahead) const {
        const int64_t prefetches = shape_.v_dim * int64_t{sizeof(Kv)} / 8 / (stride_ / (2 * W));
        load_tile<4>(pairs(head), W);
        const int64_t stride = accumulator(0, 1, 0) - accumulator(0, 0, 0);
        for (int64_t d = 0; d < stride_; d += 2 * W) {
            float *sums = accumulator(head, 0, d);
            load_tile<2>(sums, stride);
            load_tile<5>(values(head) + d, stride_);
            add_products<2, 4, 5>();
            load_tile<3>(sums + W, stride);
            load_tile<6>(values(head) + d + W, stride_);
            add_products<3, 4, 6>();
            store_tile<2>(sums, stride);
            store_tile<3>(sums + W, stride);
            for (int64_t i = 0; i < prefetches; ++i)
                ahead.ask_for_two();
        }
    }
};

} // namespace
} // namespace lamina::attention
