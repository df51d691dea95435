#include "lamina/doorbell.h"

#include <algorithm>
#include <climits>
#include <ctime>
#include <thread>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace lamina {
namespace {

// Shared futexes (no FUTEX_PRIVATE_FLAG): ringer and waiter are different processes.
void futex_wake_all(std::atomic<std::uint32_t> *word) {
    syscall(SYS_futex, reinterpret_cast<std::uint32_t *>(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void futex_wait(std::atomic<std::uint32_t> *word, std::uint32_t expected, std::chrono::nanoseconds at_most) {
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(at_most);
    const timespec timeout{static_cast<time_t>(seconds.count()),
                           static_cast<long>((at_most - seconds).count())};
    syscall(SYS_futex, reinterpret_cast<std::uint32_t *>(word), FUTEX_WAIT, expected, &timeout, nullptr, 0);
}

// Tells the core that this is a spin loop: saves power and leaves a sibling thread more room.
void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

} // namespace

void Doorbells::ring(std::size_t doorbell, std::uint64_t sequence) {
    bells_[doorbell].sequence.store(sequence, std::memory_order_release);
    nudge();
}

void Doorbells::nudge() {
    arrivals_->count.fetch_add(1, std::memory_order_seq_cst);
    if (arrivals_->sleepers.load(std::memory_order_seq_cst) != 0)
        futex_wake_all(&arrivals_->count);
}

std::optional<std::size_t> Doorbells::ready(std::span<const Target> targets) const {
    for (std::size_t i = 0; i < targets.size(); ++i)
        if (sequence(targets[i].doorbell) >= targets[i].sequence)
            return i;
    return std::nullopt;
}

std::optional<std::size_t> Doorbells::spin(std::span<const Target> targets,
                                           std::chrono::steady_clock::time_point until) const {
    constexpr int kLooksPerClock = 16; // reading the clock costs as much as several looks
    do {
        for (int look = 0; look < kLooksPerClock; ++look) {
            if (const auto index = ready(targets))
                return index;
            relax();
        }
    } while (std::chrono::steady_clock::now() < until);
    return std::nullopt;
}

std::optional<std::size_t> Doorbells::watch(std::span<const Target> targets,
                                            std::chrono::steady_clock::time_point until,
                                            std::chrono::nanoseconds spin) const {
    constexpr auto kNap = std::chrono::microseconds(50);
    const auto spin_until = std::min(std::chrono::steady_clock::now() + spin, until);
    auto index = this->spin(targets, spin_until);
    while (!index && std::chrono::steady_clock::now() < until) {
        std::this_thread::sleep_for(kNap);
        index = ready(targets);
    }
    return index;
}

void Doorbells::sleep(std::uint32_t seen, std::chrono::nanoseconds at_most) {
    arrivals_->sleepers.fetch_add(1, std::memory_order_seq_cst);
    futex_wait(&arrivals_->count, seen, at_most);
    arrivals_->sleepers.fetch_sub(1, std::memory_order_relaxed);
}

} // namespace lamina
