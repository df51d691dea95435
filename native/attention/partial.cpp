// Plans the tasks of one attention call, runs them on the thread pool and merges segments that were split.
#include "lamina/attention.h"
#include "lamina/thread_pool.h"
#include "task.h"

#include <cmath>
#include <limits>
#include <memory>
#include <new>
#include <vector>

namespace lamina::attention {
namespace {

constexpr int64_t kMinSplitTokens = 512;   // splitting shorter ranges costs more in merging than it gains
constexpr int64_t kTasksPerThread = 4;     // enough to even out ragged work
constexpr int64_t kMemoryBoundQueries = 8; // up to here a task takes the time of reading K and V once
constexpr int64_t kTogetherQueries = 32;   // up to here a task has all KV heads

// A block of rows whose token range was cut into several tasks, each with its own partial result.
struct Split {
    int64_t row_begin, rows;
    int64_t parts;
    std::unique_ptr<float[]> out; // [parts][rows, query_heads, v_dim]
    std::unique_ptr<float[]> lse; // [parts][rows, query_heads]
};

struct Plan {
    std::vector<Task> tasks;
    std::vector<Split> splits;
};

// Query rows of one task.
int64_t rows_of_block(const Shape &shape) {
    return std::max<int64_t>(1, kMaxQueries * shape.kv_heads / shape.query_heads);
}

// KV heads of one task. While reading memory takes much of the time, a token's heads are read together;
// beyond that, one head at a time keeps its accumulators in the cache.
int64_t heads_of_task(const Shape &shape, int64_t rows) {
    return rows * (shape.query_heads / shape.kv_heads) > kTogetherQueries ? 1 : shape.kv_heads;
}

class Planner {
public:
    Planner(const Problem &problem, int threads)
        : problem_(problem), shape_(problem.shape), group_(shape_.query_heads / shape_.kv_heads),
          block_rows_(rows_of_block(shape_)),
          task_cost_(threads == 1 ? std::numeric_limits<int64_t>::max()
                                  : std::max<int64_t>(1, total_cost() / (threads * kTasksPerThread))) {}

    Plan plan() {
        Plan plan;
        for_each_block([&](const Task &block) { add_tasks(plan, block); });
        return plan;
    }

private:
    // Visits blocks of rows that fit one task, with the tokens any of their rows sees.
    template <class Visit> void for_each_block(Visit visit) const {
        const Segments &segments = problem_.segments;
        for (int64_t pair = 0; pair < segments.count; ++pair) {
            const int64_t stop = segments.query_offsets[pair + 1];
            for (int64_t row = segments.query_offsets[pair]; row < stop; row += block_rows_) {
                const int64_t end = std::min(row + block_rows_, stop);
                visit(Task{.pair = pair,
                           .row_begin = row,
                           .row_end = end,
                           .head_begin = 0,
                           .head_end = shape_.kv_heads,
                           .token_begin = visible_tokens(problem_, pair, row).begin,
                           .token_end = visible_tokens(problem_, pair, end - 1).end,
                           .out = problem_.out + row * shape_.query_heads * shape_.v_dim,
                           .lse = problem_.lse + row * shape_.query_heads});
            }
        }
    }

    int64_t queries(const Task &task) const { return (task.row_end - task.row_begin) * group_; }

    int64_t cost(const Task &task) const {
        return (task.token_end - task.token_begin) * std::max(queries(task), kMemoryBoundQueries);
    }

    int64_t total_cost() const {
        int64_t total = 0;
        for_each_block([&](const Task &block) { total += cost(block); });
        return total;
    }

    void add_tasks(Plan &plan, const Task &block) const {
        const int64_t tokens = block.token_end - block.token_begin;
        const int64_t most = std::max<int64_t>(1, tokens / kMinSplitTokens);
        const int64_t part_tokens =
            round_up(tokens / std::clamp<int64_t>(cost(block) / task_cost_ + 1, 1, most) + 1, kTileTokens);
        const int64_t parts = std::max<int64_t>(1, (tokens + part_tokens - 1) / part_tokens);
        if (parts == 1) {
            add_heads(plan, block);
            return;
        }
        const int64_t rows = block.row_end - block.row_begin, heads = rows * shape_.query_heads;
        Split split{block.row_begin, rows, parts,
                    std::make_unique_for_overwrite<float[]>(parts * heads * shape_.v_dim),
                    std::make_unique_for_overwrite<float[]>(parts * heads)};
        for (int64_t part = 0; part < parts; ++part) {
            Task task = block;
            task.token_begin = block.token_begin + part * part_tokens;
            task.token_end = std::min(task.token_begin + part_tokens, block.token_end);
            task.out = split.out.get() + part * heads * shape_.v_dim;
            task.lse = split.lse.get() + part * heads;
            add_heads(plan, task);
        }
        plan.splits.push_back(std::move(split));
    }

    void add_heads(Plan &plan, Task task) const {
        const int64_t heads = heads_of_task(shape_, task.row_end - task.row_begin);
        for (int64_t head = 0; head < shape_.kv_heads; head += heads) {
            task.head_begin = head;
            task.head_end = head + heads;
            plan.tasks.push_back(task);
        }
    }

    const Problem &problem_;
    const Shape &shape_;
    const int64_t group_;      // query heads that share a KV head
    const int64_t block_rows_; // query rows of one task
    const int64_t task_cost_;  // a task above it is split by tokens
};

// Scratch memory of one thread, kept between calls.
class Scratch {
public:
    std::byte *reserve(int64_t bytes) {
        if (bytes > bytes_) {
            memory_.reset(static_cast<std::byte *>(::operator new[](bytes, std::align_val_t{64})));
            bytes_ = bytes;
        }
        return memory_.get();
    }

private:
    struct Free {
        void operator()(std::byte *memory) const { ::operator delete[](memory, std::align_val_t{64}); }
    };
    std::unique_ptr<std::byte[], Free> memory_;
    int64_t bytes_ = 0;
};

void run_task(const Problem &problem, const Task &task, TaskKernel kernel) {
    thread_local Scratch scratch;
    const int64_t heads = task.head_end - task.head_begin;
    const int64_t queries =
        (task.row_end - task.row_begin) * (problem.shape.query_heads / problem.shape.kv_heads);
    Workspace workspace;
    const int64_t bytes = Workspace::layout(problem.shape, heads, queries, nullptr, workspace);
    Workspace::layout(problem.shape, heads, queries, scratch.reserve(bytes), workspace);
    kernel(problem, task, workspace);
}

void merge_split(const Problem &problem, const Split &split) {
    const Shape &shape = problem.shape;
    const int64_t heads = split.rows * shape.query_heads;
    std::vector<const float *> outs, lses;
    for (int64_t part = 0; part < split.parts; ++part) {
        outs.push_back(split.out.get() + part * heads * shape.v_dim);
        lses.push_back(split.lse.get() + part * heads);
    }
    const int64_t first = split.row_begin * shape.query_heads;
    merge({.outs = outs.data(),
           .lses = lses.data(),
           .count = split.parts,
           .rows = split.rows,
           .heads = shape.query_heads,
           .v_dim = shape.v_dim,
           .sinks = nullptr,
           .out = problem.out + first * shape.v_dim,
           .out_type = ElementType::Float32,
           .lse = problem.lse + first},
          1);
}

// Where the attention of `rows` rows is kept until it is added to what there is.
struct Aside {
    Aside(Scratch &scratch, const Shape &shape, int64_t rows) {
        const int64_t all = rows * shape.query_heads;
        out = reinterpret_cast<float *>(scratch.reserve(all * (shape.v_dim + 1) * int64_t{sizeof(float)}));
        lse = out + all * shape.v_dim;
    }
    float *out, *lse;
};

// Merges a task's result into its rows and heads of out and lse.
void add(const Shape &shape, const Task &task, const float *out, const float *lse) {
    const int64_t group = shape.query_heads / shape.kv_heads;
    for (int64_t row = 0; row < task.row_end - task.row_begin; ++row)
        for (int64_t head = task.head_begin * group; head < task.head_end * group; ++head) {
            const int64_t at = row * shape.query_heads + head;
            const float most = std::max(task.lse[at], lse[at]);
            if (std::isinf(most))
                continue; // neither has seen anything
            const float old_weight = std::exp(task.lse[at] - most), new_weight = std::exp(lse[at] - most);
            const float sum = old_weight + new_weight, kept = old_weight / sum, added = new_weight / sum;
            float *to = task.out + at * shape.v_dim;
            const float *from = out + at * shape.v_dim;
            for (int64_t d = 0; d < shape.v_dim; ++d)
                to[d] = to[d] * kept + from[d] * added;
            task.lse[at] = most + std::log(sum);
        }
}

void run_and_add(const Problem &problem, const Task &task, TaskKernel kernel) {
    thread_local Scratch scratch;
    if (task.token_begin == task.token_end)
        return;
    const Aside results(scratch, problem.shape, task.row_end - task.row_begin);
    Task aside = task;
    aside.out = results.out;
    aside.lse = results.lse;
    run_task(problem, aside, kernel);
    add(problem.shape, task, results.out, results.lse);
}

// Runs an attention that is a single task by ranges of tokens, so that all threads have some.
void run_by_tokens(const Problem &problem, const Task &task, bool adds, int threads, Path path) {
    thread_local Scratch scratch;
    if (!adds) {
        partial(problem, threads, path);
        return;
    }
    const Aside results(scratch, problem.shape, task.row_end);
    Problem aside = problem;
    aside.out = results.out;
    aside.lse = results.lse;
    partial(aside, threads, path);
    add(problem.shape, task, results.out, results.lse);
}

TaskKernel kernel_for(Path path, ElementType kv_type) {
    switch (path) {
    case Path::Portable:
        return portable_kernel(kv_type);
#if defined(__x86_64__)
    case Path::Avx2:
        return avx2_kernel(kv_type);
    case Path::Avx512Bf16:
        return avx512bf16_kernel(kv_type);
    case Path::Amx:
        return amx_kernel(kv_type);
#else
    case Path::Avx2:
    case Path::Avx512Bf16:
    case Path::Amx:
        break;
#endif
    }
    return nullptr;
}

} // namespace

std::vector<Path> available_paths() {
    std::vector<Path> paths{Path::Portable};
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        paths.push_back(Path::Avx2);
    if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        paths.push_back(Path::Avx512Bf16);
    if (paths.back() == Path::Avx512Bf16 && tiles_error() == 0)
        paths.push_back(Path::Amx);
#endif
    return paths;
}

void partial(const Problem &problem, int threads, Path path) {
    Plan plan = Planner(problem, threads).plan();
    for (size_t i = 0; i + threads < plan.tasks.size(); ++i)
        plan.tasks[i].following = &plan.tasks[i + threads];
    const TaskKernel kernel = kernel_for(path, problem.kv_type);
    parallel_for(threads, static_cast<int64_t>(plan.tasks.size()),
                 [&](int64_t i) { run_task(problem, plan.tasks[i], kernel); });
    parallel_for(threads, static_cast<int64_t>(plan.splits.size()),
                 [&](int64_t i) { merge_split(problem, plan.splits[i]); });
}

int64_t count_tasks(const Shape &shape, const Segments &segments) {
    const int64_t block = rows_of_block(shape);
    int64_t count = 0;
    for (int64_t pair = 0; pair < segments.count; ++pair) {
        const int64_t rows = segments.query_offsets[pair + 1] - segments.query_offsets[pair],
                      rest = rows % block;
        count += rows / block * (shape.kv_heads / heads_of_task(shape, block));
        count += rest ? shape.kv_heads / heads_of_task(shape, rest) : 0;
    }
    return count;
}

void partial_tasks(const Problem &problem, int64_t first, int64_t last, bool adds, int threads, Path path) {
    std::vector<Task> tasks = Planner(problem, 1).plan().tasks; // planned for one thread, nothing is split
    if (tasks.size() == 1 && threads > 1) {
        run_by_tokens(problem, tasks[0], adds, threads, path);
        return;
    }
    const TaskKernel kernel = kernel_for(path, problem.kv_type);
    for (int64_t i = first; i + threads < last; ++i)
        tasks[i].following = &tasks[i + threads];
    parallel_for(threads, last - first,
                 [&](int64_t i) { (adds ? run_and_add : run_task)(problem, tasks[first + i], kernel); });
}

} // namespace lamina::attention
