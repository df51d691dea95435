#include "lamina/transport_tcp.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

namespace lamina {
namespace {

static_assert(std::endian::native == std::endian::little, "frames are little-endian on the wire");

using Clock = std::chrono::steady_clock;

constexpr std::size_t kWindowNbytes = 4 << 20;    // of a stream that may be in flight
constexpr std::uint64_t kConfirmNbytes = 1 << 20; // a receiver confirms after so many
constexpr std::size_t kChunkNbytes = 64 * 1024;   // kept and sent while in the cache
constexpr int kReceivesPerTurn = 8;               // then other connections have their turn
constexpr auto kSlice = std::chrono::milliseconds(20);
constexpr auto kDrainTime = std::chrono::seconds(1); // for the last bytes of a lost peer
constexpr auto kReceiveInterval = std::chrono::milliseconds(1);
constexpr auto kResumeTime = std::chrono::minutes(10); // a stream without a connection is remembered for

} // namespace

// -- message

TcpMessage::TcpMessage(const TcpFrame &frame, std::span<const Part> parts)
    : frame_(frame), parts_(parts), rest_(std::as_bytes(std::span(&frame_, 1))), moved_at_(Clock::now()) {}

void TcpMessage::advance(std::size_t nbytes) {
    begun_ = true;
    rest_ = rest_.subspan(nbytes);
    while (rest_.empty() && next_ < parts_.size())
        rest_ = parts_[next_++];
}

void TcpMessage::note_progress(std::uint64_t progress) {
    if (std::exchange(progress_, progress) != progress)
        moved_at_ = Clock::now();
}

// -- sender

TcpSender::TcpSender(std::unique_ptr<Connection> connection, std::uint64_t identity, std::size_t arena_nbytes,
                     std::uint32_t doorbells)
    : connection_(std::move(connection)), identity_(identity), arena_nbytes_(arena_nbytes),
      doorbells_(doorbells), window_(std::make_unique_for_overwrite<std::byte[]>(kWindowNbytes)) {}

void TcpSender::reopen(std::unique_ptr<Connection> connection, std::uint64_t position) {
    if (position < confirmed_ || position > written_)
        throw std::invalid_argument("the receiver wants byte " + std::to_string(position) +
                                    " of the stream; kept are " + std::to_string(confirmed_) + " to " +
                                    std::to_string(written_));
    connection_ = std::move(connection);
    confirmed_ = sent_ = position;
    confirmation_nbytes_ = 0;
    state_ = State::Open;
    flush();
}

void TcpSender::lose() {
    if (state_ != State::Lost)
        lost_at_ = Clock::now();
    connection_.reset();
    fetcher_.close();
    state_ = State::Lost;
}

void TcpSender::close() {
    take_in(); // closing a socket with unread bytes resets the connection and loses bytes in flight
    lose();
}

void TcpSender::break_off() {
    connection_.reset();
    state_ = State::Broken;
}

std::size_t TcpSender::keep(Part bytes) {
    const std::size_t at = written_ % kWindowNbytes;
    const std::size_t room = kWindowNbytes - (written_ - confirmed_);
    const std::size_t nbytes = std::min({bytes.size(), room, kWindowNbytes - at, kChunkNbytes});
    std::memcpy(window_.get() + at, bytes.data(), nbytes);
    written_ += nbytes;
    return nbytes;
}

bool TcpSender::push(TcpMessage &message) {
    bool moved = false;
    while (!message.done()) {
        const std::size_t nbytes = keep(message.rest());
        if (nbytes == 0)
            break;
        message.advance(nbytes);
        moved = true;
        if (written_ - sent_ >= kChunkNbytes && !flush())
            break;
    }
    return flush() || moved;
}

bool TcpSender::flush() {
    bool moved = false;
    while (state_ == State::Open && sent_ < written_) {
        const std::size_t at = sent_ % kWindowNbytes;
        const std::size_t nbytes = std::min<std::size_t>(written_ - sent_, kWindowNbytes - at);
        const auto sent = connection_->send({window_.get() + at, nbytes});
        if (!sent)
            break_off();
        if (!sent || *sent == 0)
            break;
        sent_ += *sent;
        most_sent_ = std::max(most_sent_, sent_);
        moved = true;
    }
    return moved;
}

bool TcpSender::take_in() {
    bool moved = false;
    while (state_ == State::Open) {
        const iovec piece{confirmation_.data() + confirmation_nbytes_,
                          confirmation_.size() - confirmation_nbytes_};
        const auto got = connection_->receive({&piece, 1});
        if (!got)
            break_off();
        if (!got || *got == 0)
            break;
        confirmation_nbytes_ += *got;
        if (confirmation_nbytes_ < confirmation_.size())
            continue;
        confirmation_nbytes_ = 0;
        const auto position = std::bit_cast<std::uint64_t>(confirmation_);
        if (position < confirmed_ || position > sent_) {
            break_off();
            break;
        }
        confirmed_ = position;
        moved = true;
    }
    return moved;
}

// -- receiver

bool TcpReceiver::receive(Connection &connection, Arena &arena) {
    for (int turn = 0; turn < kReceivesPerTurn; ++turn) {
        const iovec pieces[] = {{missing_.data(), missing_.size()},
                                {staging_.data() + staged_, staging_.size() - staged_}};
        const auto got = connection.receive(pieces);
        if (!got)
            return false;
        if (*got == 0)
            return true;
        const bool all = *got < pieces[0].iov_len + pieces[1].iov_len;
        position_ += *got;
        if (!decode(*got, arena))
            return false;
        if (position_ - confirmed_ >= kConfirmNbytes) {
            confirmed_ = position_;
            if (connection.send(std::as_bytes(std::span(&confirmed_, 1))) != sizeof confirmed_)
                return false;
        }
        if (all)
            return true;
    }
    return true;
}

bool TcpReceiver::decode(std::size_t arrived, Arena &arena) {
    const std::size_t in_place = std::min(arrived, missing_.size());
    if (in_place > 0) {
        missing_ = missing_.subspan(in_place);
        finish(arena);
    }
    Part bytes(staging_.data(), staged_ + arrived - in_place);
    while (bytes.size() >= sizeof frame_) {
        std::memcpy(&frame_, bytes.data(), sizeof frame_);
        bytes = bytes.subspan(sizeof frame_);
        refusal_ = check(frame_, arena);
        if (!refusal_.empty())
            return false;
        const std::size_t here = std::min<std::size_t>(frame_.nbytes, bytes.size());
        missing_ = arena.data().subspan(frame_.offset, frame_.nbytes);
        std::copy_n(bytes.begin(), here, missing_.begin());
        missing_ = missing_.subspan(here);
        bytes = bytes.subspan(here);
        finish(arena);
    }
    std::memmove(staging_.data(), bytes.data(), bytes.size());
    staged_ = bytes.size();
    return true;
}

void TcpReceiver::finish(Arena &arena) {
    if (missing_.empty() && frame_.doorbell != kNoDoorbell)
        arena.doorbells().ring(frame_.doorbell, frame_.sequence);
}

std::string TcpReceiver::check(const TcpFrame &frame, const Arena &arena) {
    const std::size_t size = arena.data().size();
    if (frame.magic != kFrameMagic)
        return "the bytes that arrived are not a frame";
    if (frame.offset > size || frame.nbytes > size - frame.offset)
        return "a frame of " + std::to_string(frame.nbytes) + " bytes at offset " +
               std::to_string(frame.offset) + " lies outside the arena of " + std::to_string(size) + " bytes";
    if (frame.doorbell != kNoDoorbell && frame.doorbell >= arena.doorbells().size())
        return "a frame rings doorbell " + std::to_string(frame.doorbell) + " of " +
               std::to_string(arena.doorbells().size());
    return {};
}

// -- endpoint

TcpEndpoint::TcpEndpoint(std::shared_ptr<Arena> arena)
    : arena_(std::move(arena)), fetch_server_(arena_), news_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (news_ < 0)
        throw std::system_error(errno, std::generic_category(), "eventfd");
}

void TcpEndpoint::close() {
    receiving_ = {}; // stopped and joined
    for (const auto &sender : senders_)
        sender->close();
    senders_.clear();
    fetch_server_.close();
    const std::lock_guard lock(mutex_);
    incoming_.clear();
    if (news_ >= 0)
        ::close(std::exchange(news_, -1));
}

void TcpEndpoint::remove(const std::shared_ptr<TcpSender> &sender) {
    sender->close();
    std::erase(senders_, sender);
}

void TcpEndpoint::cut(const std::shared_ptr<TcpSender> &sender) {
    remove(sender);
    const std::lock_guard lock(mutex_);
    refused_.insert(sender->identity());
    std::erase_if(incoming_,
                  [&](const auto &item) { return item.second.receiver.identity() == sender->identity(); });
}

std::optional<TcpEndpoint::Expected> TcpEndpoint::expect(std::uint64_t stream, std::uint64_t identity,
                                                         bool is_new) {
    const std::lock_guard lock(mutex_);
    if (news_ < 0 || refused_.contains(identity) || (!is_new && !incoming_.contains(stream)))
        return std::nullopt;
    Incoming &incoming = incoming_.try_emplace(stream, identity).first->second;
    if (!incoming.receiver.refusal().empty())
        return std::nullopt;
    if (incoming.connection)
        incoming.connection->shut_down(); // the owner thread, which may be polling it, closes it
    incoming.next.reset();
    incoming.detached = true;
    incoming.closed_at = Clock::now();
    return Expected{incoming.receiver.position(), ++incoming.number};
}

void TcpEndpoint::accept(std::uint64_t stream, std::uint64_t number, std::unique_ptr<Connection> connection) {
    const std::lock_guard lock(mutex_);
    const auto found = incoming_.find(stream);
    if (found == incoming_.end() || found->second.number != number)
        return;
    found->second.next = std::move(connection);
    eventfd_write(news_, 1);
}

void TcpEndpoint::adopt(Incoming &incoming) {
    if (!incoming.detached)
        return;
    incoming.connection = std::move(incoming.next);
    if (!incoming.connection)
        return;
    incoming.detached = false;
    incoming.readable = true;
}

bool TcpEndpoint::receive(bool only_readable) {
    const std::lock_guard lock(mutex_);
    return receive_locked(only_readable);
}

bool TcpEndpoint::receive_locked(bool only_readable) {
    bool moved = false;
    for (auto &[stream, incoming] : incoming_) {
        adopt(incoming);
        if (!incoming.connection || (only_readable && !incoming.readable))
            continue;
        incoming.readable = false;
        const std::uint64_t before = incoming.receiver.position();
        if (!incoming.receiver.receive(*incoming.connection, *arena_)) {
            incoming.connection.reset();
            incoming.closed_at = Clock::now();
        }
        moved |= incoming.receiver.position() != before;
    }
    return moved;
}

void TcpEndpoint::receive_always() {
    if (receiving_.joinable())
        return;
    receiving_ = std::jthread([this](const std::stop_token &stop) {
        while (!stop.stop_requested()) {
            std::this_thread::sleep_for(kReceiveInterval);
            const std::lock_guard lock(mutex_);
            if (!owner_receives_) // nor polls connections, which this may close
                receive_locked(false);
        }
    });
}

TcpEndpoint::Receives::Receives(TcpEndpoint &endpoint) : endpoint_(endpoint) {
    const std::lock_guard lock(endpoint.mutex_);
    endpoint.owner_receives_ = true;
}

TcpEndpoint::Receives::~Receives() {
    const std::lock_guard lock(endpoint_.mutex_);
    endpoint_.owner_receives_ = false;
}

bool TcpEndpoint::fetch() {
    bool moved = false;
    for (const auto &sender : senders_)
        moved |= sender->fetcher().advance(*arena_);
    return moved;
}

bool TcpEndpoint::sleep(std::chrono::nanoseconds at_most) {
    const auto watched = [](const auto &way) -> pollfd {
        const int events = way.has_unsent() ? POLLIN | POLLOUT : POLLIN;
        return {.fd = way.fd(), .events = static_cast<short>(events), .revents = 0};
    };
    polled_.assign(1, {.fd = news_, .events = POLLIN, .revents = 0});
    for (const auto &sender : senders_) {
        polled_.push_back(watched(*sender));
        polled_.push_back(watched(sender->fetcher()));
    }
    polled_incoming_.clear();
    {
        const std::lock_guard lock(mutex_);
        const auto forgotten = Clock::now() - kResumeTime;
        std::erase_if(incoming_, [&](const auto &item) {
            const Incoming &incoming = item.second;
            return !incoming.connection && !incoming.next && incoming.closed_at < forgotten;
        });
        for (auto &[stream, incoming] : incoming_) {
            adopt(incoming);
            const int fd = incoming.connection ? incoming.connection->fd() : -1;
            if (incoming.connection && incoming.connection->has_pending()) {
                incoming.readable = true;
                at_most = at_most.zero();
            }
            polled_.push_back({.fd = fd, .events = POLLIN, .revents = 0});
            polled_incoming_.push_back(&incoming); // only this thread erases
        }
    }
    at_most = std::max(at_most, std::chrono::nanoseconds::zero());
    const timespec timeout{static_cast<time_t>(at_most.count() / 1'000'000'000),
                           static_cast<long>(at_most.count() % 1'000'000'000)};
    if (ppoll(polled_.data(), polled_.size(), &timeout, nullptr) <= 0)
        return false;
    eventfd_t ignored;
    if (polled_[0].revents != 0)
        eventfd_read(news_, &ignored);
    const pollfd *polled = polled_.data() + 1;
    for (const auto &sender : senders_) {
        const int events = polled++->revents;
        if ((events & ~POLLOUT) != 0)
            sender->take_in();
        if ((events & POLLOUT) != 0)
            sender->flush();
        if (polled++->revents != 0)
            sender->fetcher().advance(*arena_);
    }
    const std::lock_guard lock(mutex_);
    for (Incoming *incoming : polled_incoming_)
        incoming->readable |= polled++->revents != 0;
    return true;
}

bool TcpEndpoint::is_drained(const TcpSender &sender) {
    const std::lock_guard lock(mutex_);
    const bool open = std::ranges::any_of(incoming_, [&](const auto &item) {
        const Incoming &incoming = item.second;
        return incoming.receiver.identity() == sender.identity() && (incoming.connection || incoming.next);
    });
    return !open || Clock::now() - sender.lost_at() > kDrainTime;
}

std::optional<std::string> TcpEndpoint::new_refusal() {
    const std::lock_guard lock(mutex_);
    for (auto &[stream, incoming] : incoming_)
        if (!incoming.receiver.refusal().empty() && !std::exchange(incoming.refusal_is_known, true))
            return incoming.receiver.refusal();
    std::string refusal = fetch_server_.take_refusal();
    return refusal.empty() ? std::nullopt : std::optional(std::move(refusal));
}

std::optional<TcpEndpoint::Outcome> TcpEndpoint::trouble() {
    if (auto refusal = new_refusal())
        return Outcome{Kind::Refused, 0, nullptr, *std::move(refusal)};
    for (const auto &sender : senders_) {
        if (sender->state() == TcpSender::State::Broken ||
            (sender->state() == TcpSender::State::Open && sender->fetcher().is_broken()))
            return Outcome{Kind::Broken, 0, sender, {}};
        if (sender->state() == TcpSender::State::Lost && is_drained(*sender))
            return Outcome{Kind::Lost, 0, sender, {}};
    }
    return std::nullopt;
}

TcpEndpoint::Outcome TcpEndpoint::send(const std::shared_ptr<TcpSender> &sender, TcpMessage &message,
                                       std::chrono::nanoseconds stall, bool may_block) {
    const Receives receives(*this);
    for (;;) {
        switch (sender->state()) {
        case TcpSender::State::Broken:
            return {Kind::Broken, 0, sender, {}};
        case TcpSender::State::Lost:
            return {Kind::Lost, 0, sender, {}};
        case TcpSender::State::Open:
            break;
        }
        const bool pushed = sender->push(message);
        if (message.done() && !sender->has_unsent())
            return {Kind::Done, 0, nullptr, {}};
        const bool confirmed = sender->take_in();
        message.note_progress(sender->progress());
        if (pushed || confirmed || sender->state() != TcpSender::State::Open)
            continue;
        if (!may_block)
            return {Kind::Again, 0, nullptr, {}};
        if (Clock::now() - message.moved_at() >= stall)
            return {Kind::Expired, 0, sender, {}};
        // Receives meanwhile: the peer may be waiting for room here before it makes room there.
        if (!sleep(kSlice))
            return {Kind::Again, 0, nullptr, {}};
        receive(true);
    }
}

TcpEndpoint::Outcome TcpEndpoint::wait(std::span<const Target> targets, Time deadline,
                                       std::chrono::nanoseconds spin) {
    const Receives receives(*this);
    const Doorbells &bells = arena_->doorbells();
    bool awake = true;
    while (awake) {
        Time spin_until = std::min(Clock::now() + spin, deadline);
        do {
            if (receive(false) || fetch()) // more often follows
                spin_until = std::min(Clock::now() + spin, deadline);
            if (const auto index = bells.ready(targets))
                return {Kind::Ready, *index, nullptr, {}};
        } while (Clock::now() < spin_until);

        awake = sleep(std::min<std::chrono::nanoseconds>(deadline - Clock::now(), kSlice));
        receive(true);
        if (const auto index = bells.ready(targets))
            return {Kind::Ready, *index, nullptr, {}};
        if (auto found = trouble())
            return *std::move(found);
        if (Clock::now() >= deadline)
            return {Kind::Expired, 0, nullptr, {}};
    }
    return {Kind::Again, 0, nullptr, {}};
}

} // namespace lamina
