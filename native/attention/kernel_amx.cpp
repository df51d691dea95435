#include "chunk_amx.h"

namespace lamina::attention {
namespace {

// Tiles pay from several rows on; other tasks run as on processors without tiles.
template <class Stored, ElementType TYPE>
void attend_tiles(const Problem &problem, const Task &task, const Workspace &work) {
    const bool pairs = !Stored::kScaled || problem.q_type == ElementType::BFloat16;
    if (pairs && task.row_end - task.row_begin > 1)
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
