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

constexpr int64_t kLeastChunkQueries = 5; // of a task and KV head: AVX-512 packs keys for fewer as fast

// Runs tasks with tiles where these pay; others as on processors without tiles.
template <class Stored, ElementType TYPE>
void attend_tiles(const Problem &problem, const Task &task, const Workspace &work) {
    constexpr auto kSizes = std::make_integer_sequence<int, kDecodeQueries - kLeastTileQueries + 1>{};
    const bool pairs = !Stored::kScaled || problem.q_type == ElementType::BFloat16;
    const int64_t rows = task.row_end - task.row_begin,
                  queries = rows * problem.shape.query_heads / problem.shape.kv_heads;
    const bool decodes = pairs && rows == 1 && queries <= kDecodeQueries && decodable(problem.shape) &&
                         (!Stored::kScaled || has_code_words());
    if (decodes && decode_any<Stored>(problem, task, work, kSizes))
        return;
    if (pairs && !decodes && queries >= kLeastChunkQueries)
        TileChunkTask<Stored>(problem, task, work).run();
    else
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
