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
uint32_t wait_for_change(const std::atomic<uint32_t> &value, uint32_t old) {
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
        const auto helpers = static_cast<size_t>(std::min<int64_t>(threads, count)) - 1;
        while (helpers_.size() < helpers)
            helpers_.emplace_back(&ThreadPool::help, this, static_cast<int>(helpers_.size()), loop_.load());
        body_ = &body;
        count_ = count;
        wanted_ = static_cast<int>(helpers);
        done_.store(0, std::memory_order_relaxed);
        const uint32_t loop = loop_.load(std::memory_order_relaxed) + 1;
        open_.store(ticket(loop, count), std::memory_order_release);
        loop_.store(loop, std::memory_order_release);
        loop_.notify_all();
        work(loop);
        const auto all = static_cast<uint32_t>(count);
        for (uint32_t done = done_.load(std::memory_order_acquire); done != all;
             done = wait_for_change(done_, done)) {
        }
    }

private:
    // A loop's number with the count of its indices not taken yet.
    static uint64_t ticket(uint32_t loop, int64_t left) {
        return static_cast<uint64_t>(loop) << 32 | static_cast<uint32_t>(left);
    }

    void help(int index, uint32_t seen) {
        for (;;) {
            seen = wait_for_change(loop_, seen);
            if (index < wanted_)
                work(seen);
        }
    }

    // A helper may come late, when the loop has ended and another has begun: it then takes nothing, and
    // nobody waits for it. While a thread holds an index, its loop, and so body_ and count_, stay unchanged.
    void work(uint32_t loop) {
        for (uint64_t open = open_.load(std::memory_order_acquire);
             open >> 32 == loop && static_cast<uint32_t>(open) != 0;) {
            if (!open_.compare_exchange_weak(open, open - 1, std::memory_order_acq_rel))
                continue;
            const auto count = static_cast<uint32_t>(count_);
            (*body_)(count - static_cast<uint32_t>(open));
            if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == count)
                done_.notify_one();
            open = open_.load(std::memory_order_acquire);
        }
    }

    const pid_t process_ = getpid();
    std::mutex callers_;
    std::vector<std::thread> helpers_;
    const std::function<void(int64_t)> *body_ = nullptr;
    int64_t count_ = 0;
    std::atomic<int> wanted_{0}; // helpers that take part in the current loop
    alignas(64) std::atomic<uint32_t> loop_{0};
    alignas(64) std::atomic<uint64_t> open_{0};
    alignas(64) std::atomic<uint32_t> done_{0};
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
