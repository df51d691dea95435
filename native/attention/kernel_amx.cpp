#include "chunk_amx.h"
#include "decode_amx.h"

namespace lamina::attention {
namespace {

template <class Stored, int... MORE>
bool decode_any(const Problem &problem, const Task &task, const Workspace &work,
                std::integer_sequence<int, MORE...>) {
    const auto decode = [&]<int QUERIES>(std::integral_constant<int, QUERIES>) {
        const bool fits = problem.shape.query_heads == QUERIES * problem.shape.kv_heads;
        if (fits)
            TileDecodeTask<Stored, QUERIES>(problem, task, work).run();
        return fits;
    };
    return (decode(std::integral_constant<int, kLeastTileQueries + MORE>()) || ...);
}

// Tiles pay for several rows, or query heads that share a KV head; other tasks run as on processors without
// tiles.
template <class Stored, ElementType TYPE>
void attend_tiles(const Problem &problem, const Task &task, const Workspace &work) {
    const bool pairs = !Stored::kScaled || problem.q_type == ElementType::BFloat16;
    constexpr auto kSizes = std::make_integer_sequence<int, kDecodeQueries - kLeastTileQueries + 1>{};
    if (pairs && task.row_end - task.row_begin > 1)
        TileChunkTask<Stored>(problem, task, work).run();
    else if (!pairs || !decodable(problem.shape) || (Stored::kScaled && !has_code_words()) ||
             !decode_any<Stored>(problem, task, work, kSizes))
        avx512bf16_kernel(TYPE)(problem, task, work);
}

} // namespace

TaskKernel amx_kernel(ElementType kv_type) {
    switch (kv_type) {
    case ElementType::BFloat16:
        return attend_tiles<BFloat16, ElementType::BFloat16>;
    case ElementType::Int8:
        return attend_tiles<Int8, ElementType::Int8>;
    case ElementType::Fp8:
        return attend_tiles<Fp8, ElementType::Fp8>;
    case ElementType::Float32:
    case ElementType::Float16:
        break;
    }
    return avx512bf16_kernel(kv_type);
}

} // namespace lamina::attention
