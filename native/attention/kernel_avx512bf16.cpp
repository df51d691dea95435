#include "chunk_avx512bf16.h"
#include "decode_avx512bf16.h"
#include "fma_tile.h"

namespace lamina::attention {
namespace {

template <class Stored, int QUERIES>
bool decode(int64_t queries, const Problem &problem, const Task &task, const Workspace &work) {
    if (queries == QUERIES)
        DecodeTask<Stored, QUERIES>(problem, task, work).run();
    return queries == QUERIES;
}

template <class Stored, int... LESS_ONE>
bool decode_any(int64_t queries, const Problem &problem, const Task &task, const Workspace &work,
                std::integer_sequence<int, LESS_ONE...>) {
    return (decode<Stored, LESS_ONE + 1>(queries, problem, task, work) || ...);
}

// Queries of codes are multiplied as pairs only if they are bfloat16: nothing is rounded but probabilities.
template <class Stored> void attend_pairs(const Problem &problem, const Task &task, const Workspace &work) {
    if (Stored::kScaled && problem.q_type != ElementType::BFloat16) {
        attend<FmaTile<Stored, 16, 6, 4>>(problem, task, work);
        return;
    }
    const int64_t group = problem.shape.query_heads / problem.shape.kv_heads;
    const bool decodes = task.row_end - task.row_begin == 1 && decodable(problem.shape) &&
                         (!Stored::kScaled || has_code_words());
    if (!decodes ||
        !decode_any<Stored>(group, problem, task, work, std::make_integer_sequence<int, kDecodeQueries>{}))
        ChunkTask<Stored>(problem, task, work).run();
}

} // namespace

TaskKernel avx512bf16_kernel(ElementType kv_type) {
    switch (kv_type) {
    case ElementType::BFloat16:
        return attend_pairs<BFloat16>;
    case ElementType::Int8:
        return attend_pairs<Int8>;
    case ElementType::Fp8:
        return attend_pairs<Fp8>;
    case ElementType::Float32:
    case ElementType::Float16:
        return fma_kernel<16, 6, 4>(kv_type);
    }
    return nullptr;
}

} // namespace lamina::attention
