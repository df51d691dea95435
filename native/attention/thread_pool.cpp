#include "lamina/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#include <unistd.h>

namespace lamina {
namespace {

// Long enough to bridge the serial parts of one call, too short to starve a peer that shares the core.
constexpr auto kSpin = std::chrono::microseconds(20);

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Returns once `value` differs from `old`, spinning first.
template <class T> T wait_for_change(const std::atomic<T> &value, T old) {
    const auto deadline = std::chrono::steady_clock::now() + kSpin;
    while (value.load(std::memory_order_acquire) == old) {
        pause();
        if (std::chrono::steady_clock::now() > deadline)
            value.wait(old, std::memory_order_acquire);
    }
    return value.load(std::memory_order_acquire);
}

class ThreadPool {
public:
    // Helpers live as long as the process: joining them at exit could wait on a forked child's copies.
    static ThreadPool &instance() {
        static std::atomic<ThreadPool *> pool{nullptr};
        static std::mutex mutex;
        ThreadPool *current = pool.load(std::memory_order_acquire);
        if (current && current->process_ == getpid())
            return *current;
        const std::lock_guard lock(mutex);
        current = pool.load(std::memory_order_acquire);
        if (!current || current->process_ != getpid()) // threads do not survive a fork
            pool.store(current = new ThreadPool, std::memory_order_release);
        return *current;
    }

    void run(int threads, int64_t count, const std::function<void(int64_t)> &body) {
        const std::lock_guard lock(callers_);
        const int helpers = static_cast<int>(std::min<int64_t>(threads, count)) - 1;
        while (static_cast<int>(helpers_.size()) < helpers)
            helpers_.emplace_back(&ThreadPool::help, this, static_cast<int>(helpers_.size()),
                                  generation_.load());
        body_ = &body;
        count_ = count;
        wanted_ = helpers;
        next_.store(0, std::memory_order_relaxed);
        busy_.store(static_cast<int>(helpers_.size()), std::memory_order_relaxed);
        generation_.fetch_add(1, std::memory_order_release);
        generation_.notify_all();
        work();
        for (int busy = busy_.load(std::memory_order_acquire); busy != 0;
             busy = wait_for_change(busy_, busy)) {
        }
    }

private:
    void help(int index, uint32_t seen) {
        for (;;) {
            seen = wait_for_change(generation_, seen);
            if (index < wanted_)
                work();
            if (busy_.fetch_sub(1, std::memory_order_acq_rel) == 1)
                busy_.notify_one();
        }
    }

    void work() {
        for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;)
            (*body_)(i);
    }

    const pid_t process_ = getpid();
    std::mutex callers_;
    std::vector<std::thread> helpers_;
    const std::function<void(int64_t)> *body_ = nullptr;
    int64_t count_ = 0;
    int wanted_ = 0; // helpers that take part in the current loop
    alignas(64) std::atomic<uint32_t> generation_{0};
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<int> busy_{0};
};

} // namespace

void parallel_for(int threads, int64_t count, const std::function<void(int64_t)> &body) {
    if (threads > 1 && count > 1) {
        ThreadPool::instance().run(threads, count, body);
        return;
    }
    for (int64_t i = 0; i < count; ++i)
        body(i);
}

} // namespace lamina
