#include "lamina/transport_shm.h"

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>

#include <sys/mman.h>
#include <sys/stat.h>

namespace lamina {

// All-zero bytes but for what create() sets. `magic` carries the layout's version: change it with the layout.
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

std::size_t ShmArena::file_nbytes(std::size_t nbytes, std::uint32_t doorbells) {
    return data_offset(doorbells) + nbytes;
}

std::shared_ptr<ShmArena> ShmArena::create(int fd, std::size_t nbytes, std::uint32_t doorbells,
                                           std::uint64_t identity) {
    const std::size_t total = file_nbytes(nbytes, doorbells);
    std::byte *base = map(fd, total);
    auto *header = reinterpret_cast<ArenaHeader *>(base);
    header->identity = identity;
    header->nbytes = nbytes;
    header->doorbells = doorbells;
    header->magic = kMagic;
    return std::shared_ptr<ShmArena>(new ShmArena(base, total));
}

std::shared_ptr<ShmArena> ShmArena::open(int fd, std::uint64_t identity) {
    struct stat status{};
    if (fstat(fd, &status) != 0 || static_cast<std::size_t>(status.st_size) < kPage)
        throw std::invalid_argument("the file is too small for an arena");
    const auto total = static_cast<std::size_t>(status.st_size);
    std::byte *base = map(fd, total);
    const auto *header = reinterpret_cast<ArenaHeader *>(base);
    if (header->magic != kMagic || header->identity != identity ||
        file_nbytes(header->nbytes, header->doorbells) != total) {
        munmap(base, total);
        throw std::invalid_argument("the file is not the arena meant");
    }
    return std::shared_ptr<ShmArena>(new ShmArena(base, total));
}

ShmArena::ShmArena(std::byte *base, std::size_t mapped_nbytes)
    : base_(base), mapped_nbytes_(mapped_nbytes), header_(reinterpret_cast<ArenaHeader *>(base)),
      doorbells_(doorbells_at(base)), data_(base + data_offset(header_->doorbells), header_->nbytes) {}

ShmArena::~ShmArena() {
    munmap(base_, mapped_nbytes_);
}

bool ShmArena::gone() const {
    return header_->gone.load(std::memory_order_acquire) != 0;
}

void ShmArena::mark_gone() {
    header_->gone.store(1, std::memory_order_release);
}

void ShmArena::write(std::int64_t offset, std::int64_t nbytes, std::span<const Part> parts) {
    const auto size = static_cast<std::int64_t>(data_.size());
    if (offset < 0 || nbytes < 0 || offset > size || nbytes > size - offset)
        throw std::invalid_argument(std::to_string(nbytes) + " bytes at offset " + std::to_string(offset) +
                                    " lie outside an arena of " + std::to_string(size) + " bytes");
    std::int64_t total = 0;
    for (const Part &part : parts)
        total += static_cast<std::int64_t>(part.size());
    if (total > nbytes)
        throw std::invalid_argument("a message of " + std::to_string(total) + " bytes does not fit into " +
                                    std::to_string(nbytes) + " bytes");
    std::byte *to = data_.data() + offset;
    for (const Part &part : parts)
        to = std::copy(part.begin(), part.end(), to);
}

void ShmWaiter::watch(std::shared_ptr<ShmArena> peer, int pidfd) {
    peers_.push_back(std::move(peer));
    pidfds_.push_back({.fd = pidfd, .events = POLLIN, .revents = 0});
}

void ShmWaiter::forget(std::size_t index) {
    if (index >= peers_.size())
        throw std::invalid_argument("no peer " + std::to_string(index));
    peers_.erase(peers_.begin() + static_cast<std::ptrdiff_t>(index));
    pidfds_.erase(pidfds_.begin() + static_cast<std::ptrdiff_t>(index));
}

std::optional<std::size_t> ShmWaiter::find_gone() {
    // A pidfd becomes readable when its process ends, whether or not somebody has reaped it.
    if (poll(pidfds_.data(), pidfds_.size(), 0) > 0)
        for (std::size_t i = 0; i < peers_.size(); ++i)
            if (pidfds_[i].revents != 0)
                peers_[i]->mark_gone();
    for (std::size_t i = 0; i < peers_.size(); ++i)
        if (peers_[i]->gone())
            return i;
    return std::nullopt;
}

ShmWaiter::Outcome ShmWaiter::wait(std::span<const Target> targets,
                                   std::chrono::steady_clock::time_point deadline,
                                   std::chrono::nanoseconds spin) {
    Doorbells &bells = own_->doorbells();
    const auto now = std::chrono::steady_clock::now();
    if (const auto index = bells.spin(targets, std::min(now + spin, deadline)))
        return {Kind::Ready, *index};

    const std::uint32_t seen = bells.arrivals();
    const auto gone = find_gone();
    // Look after finding a peer gone: what it rang before it ended still counts.
    if (const auto index = bells.ready(targets))
        return {Kind::Ready, *index};
    if (gone)
        return {Kind::PeerGone, *gone};
    const std::chrono::nanoseconds left = deadline - std::chrono::steady_clock::now();
    if (left <= std::chrono::nanoseconds::zero())
        return {Kind::Expired};
    bells.sleep(seen, std::min(left, slice_));
    return {Kind::Again};
}

} // namespace lamina
