// Arenas: memory with doorbells, mapped from a file, that peers may write into.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "lamina/doorbell.h"

namespace lamina {

struct ArenaHeader;

// One piece of a message, in this process's memory.
using Part = std::span<const std::byte>;

// Throws std::invalid_argument unless [offset, offset + nbytes) lies inside an arena of `arena_nbytes` and
// holds all the parts. Returns the bytes of the parts.
std::size_t check_message(std::int64_t offset, std::int64_t nbytes, std::span<const Part> parts,
                          std::size_t arena_nbytes);

// A mapped arena: header, arrivals, doorbells, then data from a page boundary.
class Arena {
public:
    // Bytes of a file that holds `nbytes` of data and that many doorbells.
    static std::size_t file_nbytes(std::size_t nbytes, std::uint32_t doorbells);

    // Maps a new, zero-filled file and makes it an arena. Throws std::bad_alloc if it cannot be mapped.
    static std::shared_ptr<Arena> create(int fd, std::size_t nbytes, std::uint32_t doorbells,
                                         std::uint64_t identity);

    // Maps the arena that another process made with that identity. Throws std::invalid_argument for another
    // file.
    static std::shared_ptr<Arena> open(int fd, std::uint64_t identity);

    ~Arena();
    Arena(const Arena &) = delete;
    Arena &operator=(const Arena &) = delete;

    std::span<std::byte> data() const { return data_; }
    Doorbells &doorbells() { return doorbells_; }
    const Doorbells &doorbells() const { return doorbells_; }

    // True once the owner has closed its endpoint or has been found dead.
    bool gone() const;
    // Tells every process that has mapped this arena that its owner is gone.
    void mark_gone();

    // Copies the parts one after another into [offset, offset + nbytes). Throws like check_message, before it
    // writes anything.
    void write(std::int64_t offset, std::int64_t nbytes, std::span<const Part> parts);

private:
    Arena(std::byte *base, std::size_t mapped_nbytes);

    std::byte *base_;
    std::size_t mapped_nbytes_;
    ArenaHeader *header_;
    Doorbells doorbells_;
    std::span<std::byte> data_;
};

} // namespace lamina
