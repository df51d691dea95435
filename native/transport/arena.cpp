#include "lamina/arena.h"

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>

#include <sys/mman.h>
#include <sys/stat.h>

namespace lamina {

// All-zero bytes except the fields that create() sets. `magic` carries the layout's version: change it with
// the layout.
struct alignas(kCacheLine) ArenaHeader {
    std::uint64_t magic;
    std::uint64_t identity;
    std::uint64_t nbytes;
    std::uint32_t doorbells;
    std::atomic<std::uint32_t> gone;
};

namespace {

constexpr std::uint64_t kMagic = 0x316d68732d6d616c; // "lam-shm1"
constexpr std::size_t kPage = 4096;

std::size_t data_offset(std::uint32_t doorbells) {
    const std::size_t end =
        sizeof(ArenaHeader) + sizeof(Arrivals) + std::size_t{doorbells} * sizeof(Doorbell);
    return (end + kPage - 1) / kPage * kPage;
}

std::byte *map(int fd, std::size_t nbytes) {
    void *base = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED)
        throw std::bad_alloc();
    return static_cast<std::byte *>(base);
}

Doorbells doorbells_at(std::byte *base) {
    const auto *header = reinterpret_cast<ArenaHeader *>(base);
    auto *arrivals = reinterpret_cast<Arrivals *>(base + sizeof(ArenaHeader));
    return Doorbells(arrivals, {reinterpret_cast<Doorbell *>(arrivals + 1), header->doorbells});
}

} // namespace

std::size_t check_message(std::int64_t offset, std::int64_t nbytes, std::span<const Part> parts,
                          std::size_t arena_nbytes) {
    const auto size = static_cast<std::int64_t>(arena_nbytes);
    if (offset < 0 || nbytes < 0 || offset > size || nbytes > size - offset)
        throw std::invalid_argument(std::to_string(nbytes) + " bytes at offset " + std::to_string(offset) +
                                    " lie outside an arena of " + std::to_string(size) + " bytes");
    std::size_t total = 0;
    for (const Part &part : parts)
        total += part.size();
    if (total > static_cast<std::size_t>(nbytes))
        throw std::invalid_argument("a message of " + std::to_string(total) + " bytes does not fit into " +
                                    std::to_string(nbytes) + " bytes");
    return total;
}

std::size_t Arena::file_nbytes(std::size_t nbytes, std::uint32_t doorbells) {
    return data_offset(doorbells) + nbytes;
}

std::shared_ptr<Arena> Arena::create(int fd, std::size_t nbytes, std::uint32_t doorbells,
                                     std::uint64_t identity) {
    const std::size_t total = file_nbytes(nbytes, doorbells);
    std::byte *base = map(fd, total);
    auto *header = reinterpret_cast<ArenaHeader *>(base);
    header->identity = identity;
    header->nbytes = nbytes;
    header->doorbells = doorbells;
    header->magic = kMagic;
    return std::shared_ptr<Arena>(new Arena(base, total));
}

std::shared_ptr<Arena> Arena::open(int fd, std::uint64_t identity) {
    struct stat status{};
    if (fstat(fd, &status) != 0 || static_cast<std::size_t>(status.st_size) < kPage)
        throw std::invalid_argument("the file is too small for an arena");
    const auto total = static_cast<std::size_t>(status.st_size);
    std::byte *base = map(fd, total);
    const auto *header = reinterpret_cast<ArenaHeader *>(base);
    if (header->magic != kMagic || header->identity != identity ||
        file_nbytes(header->nbytes, header->doorbells) != total) {
        munmap(base, total);
        throw std::invalid_argument("the file is not the arena of the expected identity");
    }
    return std::shared_ptr<Arena>(new Arena(base, total));
}

Arena::Arena(std::byte *base, std::size_t mapped_nbytes)
    : base_(base), mapped_nbytes_(mapped_nbytes), header_(reinterpret_cast<ArenaHeader *>(base)),
      doorbells_(doorbells_at(base)), data_(base + data_offset(header_->doorbells), header_->nbytes) {}

Arena::~Arena() {
    munmap(base_, mapped_nbytes_);
}

bool Arena::gone() const {
    return header_->gone.load(std::memory_order_acquire) != 0;
}

void Arena::mark_gone() {
    header_->gone.store(1, std::memory_order_release);
}

void Arena::write(std::int64_t offset, std::int64_t nbytes, std::span<const Part> parts) {
    check_message(offset, nbytes, parts, data_.size());
    std::byte *to = data_.data() + offset;
    for (const Part &part : parts)
        to = std::copy(part.begin(), part.end(), to);
}

} // namespace lamina
