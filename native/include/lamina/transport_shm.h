// Waits on an arena in shared memory, mapped by its owner and by every peer that writes into it.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include <poll.h>

#include "lamina/arena.h"

namespace lamina {

// Waits on the doorbells of one's own arena while watching over the processes that ring them.
class ShmWaiter {
public:
    enum class Kind { Ready, Again, Expired, PeerGone };
    struct Outcome {
        Kind kind;
        std::size_t index = 0; // of the target that is ready, or of the peer that is gone
    };

    // `slice` is the longest sleep between checks of whether its peers are alive.
    explicit ShmWaiter(std::shared_ptr<Arena> own,
                       std::chrono::nanoseconds slice = std::chrono::milliseconds(20))
        : own_(std::move(own)), slice_(slice) {}

    Doorbells &doorbells() { return own_->doorbells(); }

    // Watches a peer from now on. The pidfd stays the caller's.
    void watch(std::shared_ptr<Arena> peer, int pidfd);
    // Forgets the peer at this index; later ones move down by one.
    void forget(std::size_t index);

    // Spins for at most `spin`, then sleeps once, for a slice at most. Again means: nothing yet, call
    // again.
    Outcome wait(std::span<const Target> targets, std::chrono::steady_clock::time_point deadline,
                 std::chrono::nanoseconds spin);

private:
    std::optional<std::size_t> find_gone();

    std::shared_ptr<Arena> own_;
    std::chrono::nanoseconds slice_;
    std::vector<std::shared_ptr<Arena>> peers_;
    std::vector<pollfd> pidfds_;
};

} // namespace lamina
