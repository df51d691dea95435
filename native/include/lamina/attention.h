// Attention over segments of a token-granular KV slab, and the algebra that merges its partial results.
// Plain pointers to C-contiguous memory; nothing here knows Python or a framework.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace lamina::attention {

// Int8 and Fp8 (e4m3 without infinities) are codes: a row, K or V of one token and KV head, is its codes
// times a float scale, the row's largest magnitude over the largest code (127 or 448).
enum class ElementType { Float32, Float16, BFloat16, Int8, Fp8 };

constexpr bool is_code(ElementType type) {
    return type == ElementType::Int8 || type == ElementType::Fp8;
}

constexpr int64_t element_size(ElementType type) {
    return type == ElementType::Float32 ? 4 : is_code(type) ? 1 : 2;
}

// Instruction sets with kernels of their own, slowest first.
enum class Path { Portable, Avx2, Avx512Bf16, Amx };

// The error number with which the operating system refuses this process matrix tiles (AMX), or 0: products of
// many rows use them. None if the processor has none. Asks once.
std::optional<int> tiles_error();

// Paths that this processor can run, slowest first; never empty.
std::vector<Path> available_paths();

struct Shape {
    int64_t query_heads; // a multiple of kv_heads
    int64_t kv_heads;
    int64_t qk_dim;
    int64_t v_dim;
};

// A query at position p sees the key at position j when j <= p, p - j < window (if window > 0) and
// j / chunk == p / chunk (if chunk > 0).
struct Scoring {
    float scale;
    int64_t window;            // 0: none
    int64_t chunk;             // 0: none
    float softcap;             // 0: none
    const float *alibi_slopes; // [query_heads], or null
};

// (sequence, segment) pairs: the query rows of each, and the slab slots of the segment's tokens.
struct Segments {
    int64_t count;
    const int32_t *query_offsets; // [count + 1] into the rows of q
    const int32_t *query_start;   // [count] position of the first query row
    const int64_t *kv_offsets;    // [count + 1] into slots
    const int32_t *kv_start;      // [count] position of the first token
    const int32_t *slots;         // [kv_offsets[count]] ascending positions
};

struct Problem {
    Shape shape;
    Scoring scoring;
    Segments segments;
    ElementType q_type; // Float32 or kv_type; if kv_type is a code, any that is not
    ElementType kv_type;
    const void *q;                    // [rows, query_heads, qk_dim]
    const void *k;                    // [slots, kv_heads, qk_dim]
    const void *v;                    // [slots, kv_heads, v_dim]
    const float *k_scales, *v_scales; // [slots, kv_heads], of codes
    float *out;                       // [rows, query_heads, v_dim]; 0 for a row that sees nothing
    float *lse;                       // [rows, query_heads] natural log; -inf for a row that sees nothing
};

// Writes every row of out and lse. Offsets and slots must be valid. `path` must be available.
void partial(const Problem &problem, int threads, Path path);

// Number of tasks of the same attention without splitting segments by tokens: blocks of query rows by KV
// heads.
int64_t count_tasks(const Shape &shape, const Segments &segments);

// Runs tasks [first, last) of them, for an attention computed in several calls: by tasks, each with rows and
// heads of its own, and by tokens. Writes these rows and heads of out and lse, or, if `adds`, merges into
// what they hold.
void partial_tasks(const Problem &problem, int64_t first, int64_t last, bool adds, int threads, Path path);

// Copies rows [count, row_elements] of `source_type` into slots of a slab of `slab_type`, rounding to nearest
// even. source_type is Float32 or slab_type.
void append(void *slab, ElementType slab_type, const void *source, ElementType source_type,
            const int32_t *slots, int64_t count, int64_t row_elements, int threads);

// Rounds rows [count, heads, dim], of a type that is not a code, to codes and scales in slots of slab
// [slots, heads, dim] and scales [slots, heads]. A row with NaN or an infinity gets NaN as its scale.
void append_codes(void *slab, ElementType slab_type, float *scales, const void *source,
                  ElementType source_type, const int32_t *slots, int64_t count, int64_t heads, int64_t dim,
                  int threads);

// Partial results of the same rows, each over other tokens, and the destination of the merged result.
struct Merge {
    const float *const *outs; // [count] arrays of [rows, heads, v_dim]
    const float *const *lses; // [count] arrays of [rows, heads]; the out of an lse of -inf is ignored
    int64_t count, rows, heads, v_dim;
    const float *sinks; // [heads], added to the softmax's denominator once; or null
    void *out;          // [rows, heads, v_dim], rounded once; may be the first partial's
    ElementType out_type;
    float *lse; // [rows, heads], may be the first partial's; null: not wanted
};

// On up to `threads` threads, fewer where there is little to do.
void merge(const Merge &task, int threads);

} // namespace lamina::attention
