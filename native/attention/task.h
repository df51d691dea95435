// A task: one block of query rows against one range of a segment's tokens, for a range of KV heads.
// The planner (partial.cpp) makes tasks; an instruction set's kernel runs them.
#pragma once

#include "lamina/attention.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace lamina::attention {

constexpr int64_t kTileTokens = 64;     // tokens whose scores are held at once, at most
constexpr int64_t kMaxQueries = 256;    // query rows times query heads that share one KV head, in a task
constexpr int64_t kCacheLine = 64;      // bytes
constexpr int64_t kVectorElements = 16; // floats of the widest vector; packed rows are padded to it
constexpr int64_t kDecodePadding = 64;  // elements that a decode step pads rows to, at most

constexpr int64_t round_up(int64_t n, int64_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

// Functions below are static, not inline: every instruction set compiles its own copy.
static int64_t query_position(const Segments &segments, int64_t pair, int64_t row) {
    return segments.query_start[pair] + row - segments.query_offsets[pair];
}

struct Interval {
    int64_t begin, end;
};

// The tokens of a pair's segment (as indices into it) that a query row sees.
static Interval visible_tokens(const Problem &problem, int64_t pair, int64_t row) {
    const Segments &segments = problem.segments;
    const Scoring &scoring = problem.scoring;
    const int64_t position = query_position(segments, pair, row), start = segments.kv_start[pair];
    const int64_t tokens = segments.kv_offsets[pair + 1] - segments.kv_offsets[pair];
    int64_t first = 0;
    if (scoring.window > 0)
        first = std::max(first, position - scoring.window + 1);
    if (scoring.chunk > 0)
        first = std::max(first, position / scoring.chunk * scoring.chunk);
    const int64_t begin = std::clamp<int64_t>(first - start, 0, tokens);
    return {begin, std::clamp(position + 1 - start, begin, tokens)};
}

struct Task {
    int64_t pair;
    int64_t row_begin, row_end; // rows of q
    int64_t head_begin, head_end;
    int64_t token_begin, token_end;  // into the pair's tokens
    float *out;                      // of row_begin, all heads: rows of [query_heads, v_dim]
    float *lse;                      // of row_begin, all heads: rows of [query_heads]
    const Task *following = nullptr; // what the thread is likely to run next, if anything
};

// Scratch memory of one running task, carved out of one buffer. "Words" are what the kernel multiplies: a
// float, or a pair of bfloat16.
struct Workspace {
    float *query;         // [heads][queries][qk_words]
    float *keys;          // [qk_words][tile]
    float *values;        // [tile][v_padded]
    float *scores;        // [queries][tile]
    float *probabilities; // [queries][tile], or in a decode step [heads][queries][8 or 16]
    float *rescale;       // [queries]
    float *accumulator;   // [heads][queries][v_padded]
    float *reference;     // [heads][queries] the score that sums are relative to
    float *limit;         // [heads][queries] above it, scores change the reference
    float *sum;           // [heads][queries][vector]
    float *zeros;         // [heads][qk_dim or v_dim, padded]: stands for tokens past the end of a tile
    float *key_scales;    // [heads][tile], of codes
    float *value_scales;  // [heads][tile], of codes

    int64_t qk_padded;
    int64_t v_padded;

    // Lays the arrays out from `base` (64-byte aligned; null to measure) and returns the bytes needed.
    static int64_t layout(const Shape &shape, int64_t heads, int64_t queries, std::byte *base,
                          Workspace &workspace) {
        queries = round_up(queries, 16); // kernels compute up to 16 together
        const int64_t qk = round_up(shape.qk_dim, kVectorElements),
                      v = round_up(shape.v_dim, kVectorElements);
        workspace.qk_padded = qk;
        workspace.v_padded = v;
        int64_t used = 0;
        auto take = [&](float *&array, int64_t elements) {
            array = reinterpret_cast<float *>(base + used);
            used += round_up(elements * int64_t{sizeof(float)}, 64);
        };
        take(workspace.query,
             heads * queries * round_up(qk, kDecodePadding) * 2); // a decode step's are spread
        take(workspace.keys, qk * kTileTokens);
        take(workspace.values, kTileTokens * v);
        take(workspace.scores, queries * kTileTokens);
        take(workspace.probabilities, queries * std::max(kTileTokens, 8 * heads));
        take(workspace.rescale, queries);
        take(workspace.accumulator, heads * queries * round_up(v, kDecodePadding));
        take(workspace.reference, heads * queries);
        take(workspace.limit, heads * queries);
        take(workspace.sum, heads * queries * kVectorElements);
        take(workspace.zeros, heads * std::max(qk, v));
        take(workspace.key_scales, heads * kTileTokens);
        take(workspace.value_scales, heads * kTileTokens);
        return used;
    }
};

using TaskKernel = void (*)(const Problem &, const Task &, const Workspace &);

// The kernel of each instruction set for a KV type; null where the build has none.
TaskKernel portable_kernel(ElementType kv_type);
TaskKernel avx2_kernel(ElementType kv_type);
TaskKernel avx512bf16_kernel(ElementType kv_type);
TaskKernel amx_kernel(ElementType kv_type);

} // namespace lamina::attention
