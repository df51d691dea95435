#include "lamina/tcp_fetch.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

namespace lamina {
namespace {

constexpr std::size_t kTurnNbytes = 256 * 1024; // then other readers have their turn

iovec to_iovec(std::span<std::byte> bytes) {
    return {bytes.data(), bytes.size()};
}

} // namespace

// -- reading

void TcpFetcher::fetch(const FetchRequest &range, std::size_t to, std::uint32_t doorbell,
                       std::uint64_t sequence) {
    asked_.push_back({range, to, doorbell, sequence});
    ask(range);
    flush();
}

void TcpFetcher::reopen(std::unique_ptr<Connection> connection) {
    connection_ = std::move(connection);
    unsent_.clear();
    arrived_ = 0;
    for (const Asked &asked : asked_)
        ask(asked.range);
    flush();
}

void TcpFetcher::ask(const FetchRequest &range) {
    const auto bytes = std::as_bytes(std::span(&range, 1));
    unsent_.insert(unsent_.end(), bytes.begin(), bytes.end());
}

void TcpFetcher::flush() {
    while (has_unsent()) {
        const auto sent = connection_->send(unsent_);
        if (!sent)
            close();
        if (!sent || *sent == 0)
            return;
        unsent_.erase(unsent_.begin(), unsent_.begin() + static_cast<std::ptrdiff_t>(*sent));
    }
}

bool TcpFetcher::advance(Arena &arena) {
    bool moved = false;
    flush();
    while (connection_ != nullptr) {
        std::byte nothing_is_due{};
        const bool due = !asked_.empty();
        iovec piece = due ? to_iovec(arena.data().subspan(asked_.front().to + arrived_,
                                                          asked_.front().range.nbytes - arrived_))
                          : iovec{&nothing_is_due, 1};
        const auto got = connection_->receive({&piece, 1});
        if (!got || (*got > 0 && !due))
            close();
        if (!got || *got == 0 || !due)
            break;
        moved = true;
        arrived_ += *got;
        if (arrived_ < asked_.front().range.nbytes)
            continue;
        const Asked done = asked_.front();
        asked_.pop_front();
        arrived_ = 0;
        arena.doorbells().ring(done.doorbell, done.sequence);
        break; // messages have priority over other arrivals
    }
    return moved;
}

// -- being read

void TcpFetchServer::add(std::unique_ptr<Connection> connection) {
    const std::lock_guard lock(mutex_);
    if (closing_)
        return;
    if (news_ < 0) {
        news_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (news_ < 0)
            throw std::system_error(errno, std::generic_category(), "eventfd");
        thread_ = std::thread(&TcpFetchServer::run, this);
    }
    new_.push_back(std::move(connection));
    eventfd_write(news_, 1);
}

std::string TcpFetchServer::take_refusal() {
    const std::lock_guard lock(mutex_);
    if (refusals_.empty())
        return {};
    std::string refusal = std::move(refusals_.back());
    refusals_.pop_back();
    return refusal;
}

void TcpFetchServer::close() {
    {
        const std::lock_guard lock(mutex_);
        closing_ = true;
        if (news_ >= 0)
            eventfd_write(news_, 1);
    }
    if (thread_.joinable())
        thread_.join();
    if (news_ >= 0)
        ::close(std::exchange(news_, -1));
}

void TcpFetchServer::run() {
    std::vector<Reader> readers;
    std::vector<pollfd> polled;
    for (;;) {
        polled.assign(1, {.fd = news_, .events = POLLIN, .revents = 0});
        for (const Reader &reader : readers) {
            const short events = reader.rest.empty() ? POLLIN : POLLOUT;
            polled.push_back({.fd = reader.connection->fd(), .events = events, .revents = 0});
        }
        if (::poll(polled.data(), polled.size(), -1) < 0)
            continue; // a signal
        for (std::size_t i = readers.size(); i-- > 0;)
            if (polled[i + 1].revents != 0 && !serve(readers[i]))
                readers.erase(readers.begin() + static_cast<std::ptrdiff_t>(i));
        if (polled[0].revents == 0)
            continue;
        eventfd_t ignored;
        eventfd_read(news_, &ignored);
        const std::lock_guard lock(mutex_);
        if (closing_)
            return;
        for (auto &connection : new_)
            readers.push_back({.connection = std::move(connection)});
        new_.clear();
    }
}

bool TcpFetchServer::serve(Reader &reader) {
    for (std::size_t left = kTurnNbytes;;) {
        if (reader.rest.empty()) {
            if (!read_request(reader))
                return false;
            if (reader.rest.empty())
                return true; // no further request yet
        }
        if (left == 0)
            return true;
        const auto sent = reader.connection->send(reader.rest.first(std::min(left, reader.rest.size())));
        if (!sent)
            return false;
        if (*sent == 0)
            return true;
        reader.rest = reader.rest.subspan(*sent);
        left -= *sent;
    }
    return true;
}

bool TcpFetchServer::read_request(Reader &reader) {
    const auto bytes = std::as_writable_bytes(std::span(&reader.range, 1));
    iovec piece = to_iovec(bytes.subspan(reader.range_nbytes));
    const auto got = reader.connection->receive({&piece, 1});
    if (!got)
        return false;
    reader.range_nbytes += *got;
    if (reader.range_nbytes < sizeof reader.range)
        return true;
    reader.range_nbytes = 0;
    const auto [offset, nbytes] = reader.range;
    const std::size_t size = arena_->data().size();
    if (nbytes > 0 && offset <= size && nbytes <= size - offset) {
        reader.rest = arena_->data().subspan(offset, nbytes);
        return true;
    }
    const std::lock_guard lock(mutex_);
    refusals_.push_back("a read of " + std::to_string(nbytes) + " bytes at offset " + std::to_string(offset) +
                        " lies outside the arena of " + std::to_string(size) + " bytes");
    return false;
}

} // namespace lamina
