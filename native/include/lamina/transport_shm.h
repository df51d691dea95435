// Arenas in shared memory, mapped by their owner and by every peer that writes into them.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include <poll.h>

#include "lamina/doorbell.h"

namespace lamina {

struct ArenaHeader;

// One piece of a message, in this process's memory.
using Part = std::span<const std::byte>;

// A mapped arena: header, arrivals, doorbells, then data from a page boundary.
class ShmArena {
public:
    // Bytes of a file that holds `nbytes` of data and that many doorbells.
    static std::size_t file_nbytes(std::size_t nbytes, std::uint32_t doorbells);

    // Maps a new, zero-filled file and makes it an arena. Throws std::bad_alloc if it cannot be mapped.
    static std::shared_ptr<ShmArena> create(int fd, std::size_t nbytes, std::uint32_t doorbells,
                                            std::uint64_t identity);

    // Maps the arena another process made with that identity. Throws std::invalid_argument if the file is not
    // it.
    static std::shared_ptr<ShmArena> open(int fd, std::uint64_t identity);

    ~ShmArena();
    ShmArena(const ShmArena &) = delete;
    ShmArena &operator=(const ShmArena &) = delete;

    std::span<std::byte> data() const { return data_; }
    Doorbells &doorbells() { return doorbells_; }

    // True once the owner has closed its endpoint or has been found dead.
    bool gone() const;
    // Tells everybody who has mapped this arena that its owner is gone.
    void mark_gone();

    // Copies the parts one after another into [offset, offset + nbytes). Throws std::invalid_argument, before
    // it writes anything, if they are larger or lie outside the data.
    void write(std::int64_t offset, std::int64_t nbytes, std::span<const Part> parts);

private:
    ShmArena(std::byte *base, std::size_t mapped_nbytes);

    std::byte *base_;
    std::size_t mapped_nbytes_;
    ArenaHeader *header_;
    Doorbells doorbells_;
    std::span<std::byte> data_;
};

// Waits on the doorbells of one's own arena while watching over the processes that ring them.
class ShmWaiter {
public:
    enum class Kind { Ready, Again, Expired, PeerGone };
    struct Outcome {
        Kind kind;
        std::size_t index = 0; // of the target that is ready, or of the peer that is gone
    };

    // `slice` is the longest sleep before it looks whether its peers are still alive.
    explicit ShmWaiter(std::shared_ptr<ShmArena> own,
                       std::chrono::nanoseconds slice = std::chrono::milliseconds(20))
        : own_(std::move(own)), slice_(slice) {}

    Doorbells &doorbells() { return own_->doorbells(); }

    // Watches a peer from now on. The pidfd stays the caller's.
    void watch(std::shared_ptr<ShmArena> peer, int pidfd);
    // Forgets the peer at this index; later ones move down by one.
    void forget(std::size_t index);

    // Spins for at most `spin`, then sleeps once, for a slice at most. Again means: nothing yet, call once
    // more.
    Outcome wait(std::span<const Target> targets, std::chrono::steady_clock::time_point deadline,
                 std::chrono::nanoseconds spin);

private:
    std::optional<std::size_t> find_gone();

    std::shared_ptr<ShmArena> own_;
    std::chrono::nanoseconds slice_;
    std::vector<std::shared_ptr<ShmArena>> peers_;
    std::vector<pollfd> pidfds_;
};

} // namespace lamina
