// Doorbells: sequence numbers in memory that one process rings and another waits on.
//
// Ringing is a store and, only when a waiter sleeps, a futex wake. No wake is lost:
//
//   ringer                                waiter
//   1 doorbell = sequence   (release)     a seen = arrivals      (acquire)
//   2 arrivals += 1         (seq_cst)     b look at the doorbells
//   3 sleepers == 0 ? done  (seq_cst)     c sleepers += 1        (seq_cst)
//   4 futex wake                          d futex wait while arrivals == seen
//
// If step a saw step 2, then step b sees step 1 and does not sleep. Otherwise arrivals differs from seen once
// step 2 is done: either the kernel notices in step d (which follows c), or step d came before step 2, so
// that step 3 sees c and wakes.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace lamina {

inline constexpr std::size_t kCacheLine = 64;

// A doorbell and the sequence number awaited there.
struct Target {
    std::uint32_t doorbell;
    std::uint64_t sequence;
};

// Layouts in shared memory: all-zero bytes are their initial state.
struct alignas(kCacheLine) Doorbell {
    std::atomic<std::uint64_t> sequence;
};
struct alignas(kCacheLine) Arrivals {
    std::atomic<std::uint32_t> count;    // futex word: every ring, on whichever doorbell
    std::atomic<std::uint32_t> sleepers; // waiters asleep, or about to be
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free &&
              std::atomic<std::uint32_t>::is_always_lock_free);
static_assert(sizeof(Doorbell) == kCacheLine && sizeof(Arrivals) == kCacheLine);

// The doorbells of one arena; owns nothing. Each doorbell has one ringer, whose sequence numbers only grow.
class Doorbells {
public:
    Doorbells(Arrivals *arrivals, std::span<Doorbell> bells) : arrivals_(arrivals), bells_(bells) {}

    std::size_t size() const { return bells_.size(); }
    const Doorbell *first() const { return bells_.data(); }
    std::uint64_t sequence(std::size_t doorbell) const {
        return bells_[doorbell].sequence.load(std::memory_order_acquire);
    }

    // Publishes everything this thread wrote before (release).
    void ring(std::size_t doorbell, std::uint64_t sequence);

    // Wakes the owner without a message, so that it checks its peers.
    void nudge();

    // Index of the first target that has been reached (acquire).
    std::optional<std::size_t> ready(std::span<const Target> targets) const;

    // Busy-waits until a target is reached or the time is over.
    std::optional<std::size_t> spin(std::span<const Target> targets,
                                    std::chrono::steady_clock::time_point until) const;

    // Polls the targets for `spin` without pause, then between short naps, until one is reached or the time
    // is over. For doorbells written by hardware, which wakes nobody.
    std::optional<std::size_t> watch(std::span<const Target> targets,
                                     std::chrono::steady_clock::time_point until,
                                     std::chrono::nanoseconds spin) const;

    // The count to hand to sleep(). Read it before looking at the doorbells.
    std::uint32_t arrivals() const { return arrivals_->count.load(std::memory_order_acquire); }

    // Sleeps until something arrives after `seen`, a signal, or the time is over.
    void sleep(std::uint32_t seen, std::chrono::nanoseconds at_most);

private:
    Arrivals *arrivals_;
    std::span<Doorbell> bells_;
};

} // namespace lamina
