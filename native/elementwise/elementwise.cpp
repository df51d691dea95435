// Shares the rows of a task among threads.
#include "kernels.h"

#include "lamina/thread_pool.h"

#include <algorithm>

namespace lamina::elementwise {
namespace {

constexpr int64_t kElementsPerThread = 8192; // waking a waiting thread costs as much

Kernels kernels_for(Path path, ElementType type) {
    switch (path) {
#if defined(__x86_64__)
    case Path::Amx:
    case Path::Avx512Bf16:
        return avx512_kernels(type);
    case Path::Avx2:
        return avx2_kernels(type);
#endif
    default:
        return portable_kernels(type);
    }
}

template <class Task>
void run(void (*kernel)(const Task &, int64_t, int64_t), const Task &task, int64_t row_elements,
         int threads) {
    const int64_t worthwhile = task.rows * row_elements / kElementsPerThread;
    const int64_t parts =
        std::clamp<int64_t>(std::min<int64_t>(threads, worthwhile), 1, std::max<int64_t>(1, task.rows));
    if (parts == 1)
        return kernel(task, 0, task.rows);
    parallel_for(threads, parts, [&](int64_t part) {
        kernel(task, task.rows * part / parts, task.rows * (part + 1) / parts);
    });
}

} // namespace

void rms_norm(const RmsNorm &task, int threads, Path path) {
    run(kernels_for(path, task.type).rms_norm, task, task.width, threads);
}

void rotate(const Rotation &task, int threads, Path path) {
    run(kernels_for(path, task.type).rotate, task, task.heads * task.dim, threads);
}

void gate(const Gate &task, int threads, Path path) {
    run(kernels_for(path, task.type).gate, task, task.width, threads);
}

void largest(const Largest &task, int threads, Path path) {
    run(kernels_for(path, task.type).largest, task, task.width, threads);
}

void mask(const Masking &task, int threads, Path path) {
    run(kernels_for(path, task.type).mask, task, task.width, threads);
}

void draw(const Draw &task, int threads, Path path) {
    run(kernels_for(path, task.type).draw, task, task.width, threads);
}

} // namespace lamina::elementwise
