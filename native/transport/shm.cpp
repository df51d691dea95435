#include "lamina/transport_shm.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace lamina {

void ShmWaiter::watch(std::shared_ptr<Arena> peer, int pidfd) {
    peers_.push_back(std::move(peer));
    pidfds_.push_back({.fd = pidfd, .events = POLLIN, .revents = 0});
}

void ShmWaiter::forget(std::size_t index) {
    if (index >= peers_.size())
        throw std::invalid_argument("peer " + std::to_string(index) + " does not exist");
    peers_.erase(peers_.begin() + static_cast<std::ptrdiff_t>(index));
    pidfds_.erase(pidfds_.begin() + static_cast<std::ptrdiff_t>(index));
}

std::optional<std::size_t> ShmWaiter::find_gone() {
    // A pidfd becomes readable when its process ends, whether or not it has been reaped.
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
    // Check the doorbells after finding a peer gone: those it rang before it ended still count.
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
