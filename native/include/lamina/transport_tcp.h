// Arenas that peers write into over TCP.
//
// A message is a frame: a header, with the destination of its bytes and the doorbell to ring, and the bytes,
// which the kernel copies straight to their destination. The frames from one endpoint to another are one
// stream, whose bytes both sides count. The sender keeps the newest bytes until the receiver confirms them.
// When a connection is lost, the receiver reports its position on the next one, and the sender continues from
// there: nothing is lost or duplicated, and no doorbell overtakes its data.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <poll.h>

#include "lamina/arena.h"
#include "lamina/connection.h"
#include "lamina/tcp_fetch.h"

namespace lamina {

// As on the wire, little-endian.
struct TcpFrame {
    std::uint64_t offset;
    std::uint64_t nbytes;
    std::uint64_t sequence;
    std::uint32_t doorbell; // kNoDoorbell: the frame only writes
    std::uint32_t magic;
};
inline constexpr std::uint32_t kNoDoorbell = 0xffffffff;
inline constexpr std::uint32_t kFrameMagic = 0x314d414c; // "LAM1"
static_assert(sizeof(TcpFrame) == 32);

// A frame on its way into a stream. Its parts must stay until it is done.
class TcpMessage {
public:
    TcpMessage(const TcpFrame &frame, std::span<const Part> parts);
    TcpMessage(const TcpMessage &) = delete;
    TcpMessage &operator=(const TcpMessage &) = delete;

    bool begun() const { return begun_; }
    bool done() const { return rest_.empty() && next_ == parts_.size(); }
    // The bytes to send next.
    Part rest() const { return rest_; }
    void advance(std::size_t nbytes);

    // When the stream it goes into last made progress, according to the numbers noted.
    std::chrono::steady_clock::time_point moved_at() const { return moved_at_; }
    void note_progress(std::uint64_t progress);

private:
    TcpFrame frame_;
    std::span<const Part> parts_;
    Part rest_;
    std::size_t next_ = 0;
    bool begun_ = false;
    std::uint64_t progress_ = 0;
    std::chrono::steady_clock::time_point moved_at_;
};

// The stream to one peer. Only the endpoint's thread uses it.
class TcpSender {
public:
    enum class State { Open, Broken, Lost };

    // `identity` is the peer's.
    TcpSender(std::unique_ptr<Connection> connection, std::uint64_t identity, std::size_t arena_nbytes,
              std::uint32_t doorbells);
    TcpSender(const TcpSender &) = delete;
    TcpSender &operator=(const TcpSender &) = delete;

    State state() const { return state_; }
    // -1 without a connection.
    int fd() const { return connection_ ? connection_->fd() : -1; }
    // The reads from the same peer.
    TcpFetcher &fetcher() { return fetcher_; }
    std::uint64_t identity() const { return identity_; }
    std::size_t arena_nbytes() const { return arena_nbytes_; }
    std::uint32_t doorbells() const { return doorbells_; }
    std::chrono::steady_clock::time_point lost_at() const { return lost_at_; }
    bool has_unsent() const { return sent_ < written_; }
    // Changes whenever the peer or its kernel has received more; not on reconnection.
    std::uint64_t progress() const { return written_ + most_sent_ + confirmed_; }

    // Continues over another connection, from the byte the receiver wants next. Throws std::invalid_argument
    // if that byte is no longer kept or not written yet.
    void reopen(std::unique_ptr<Connection> connection, std::uint64_t position);
    // The peer is gone for good.
    void lose();
    // Ends the stream once the kernel has delivered what it holds.
    void close();

    // Buffers as much of the message as there is room for and hands the kernel as much as it takes. True if
    // anything moved.
    bool push(TcpMessage &message);
    // Sends bytes that are kept and not sent yet. True if anything moved.
    bool flush();
    // Reads confirmations; finds out whether the connection is lost. True if anything was confirmed.
    bool take_in();

private:
    void break_off();
    std::size_t keep(Part bytes);

    std::unique_ptr<Connection> connection_;
    TcpFetcher fetcher_;
    State state_ = State::Open;
    std::uint64_t identity_;
    std::size_t arena_nbytes_;
    std::uint32_t doorbells_;
    std::chrono::steady_clock::time_point lost_at_{};
    std::unique_ptr<std::byte[]>
        window_; // stream bytes [confirmed_, written_), at their position modulo its size
    std::uint64_t confirmed_ = 0;
    std::uint64_t sent_ = 0;
    std::uint64_t most_sent_ = 0; // over any connection
    std::uint64_t written_ = 0;
    std::array<std::byte, 8> confirmation_{};
    std::size_t confirmation_nbytes_ = 0;
};

// The stream from one peer, decoded into the arena.
class TcpReceiver {
public:
    explicit TcpReceiver(std::uint64_t identity) : identity_(identity) {}

    std::uint64_t identity() const { return identity_; }
    std::uint64_t position() const { return position_; }
    // Why the stream is refused; empty if it is not.
    const std::string &refusal() const { return refusal_; }

    // Receives what has arrived, some megabytes at most. False once the connection is lost or the stream
    // refused.
    bool receive(Connection &connection, Arena &arena);

private:
    bool decode(std::size_t arrived, Arena &arena);
    void finish(Arena &arena);
    static std::string check(const TcpFrame &frame, const Arena &arena);

    static constexpr std::size_t kStagingNbytes = 16 * 1024;

    std::uint64_t identity_;
    std::uint64_t position_ = 0;  // bytes of the stream received
    std::uint64_t confirmed_ = 0; // of those, reported to the sender
    std::string refusal_;
    TcpFrame frame_{};
    std::span<std::byte> missing_; // the destination of the current frame's outstanding bytes
    std::array<std::byte, kStagingNbytes> staging_;
    std::size_t staged_ = 0; // bytes of a header that has not arrived completely
};

// The streams of one endpoint. One thread owns it; expect() and accept() are for any thread.
class TcpEndpoint {
public:
    using Time = std::chrono::steady_clock::time_point;

    enum class Kind { Ready, Done, Again, Expired, Broken, Lost, Refused };
    struct Outcome {
        Kind kind;
        std::size_t index = 0;             // Ready: of the target
        std::shared_ptr<TcpSender> sender; // Broken, Lost: which
        std::string refusal;               // Refused: why
    };
    struct Expected {
        std::uint64_t position; // the stream byte wanted next
        std::uint64_t number;   // of the connection, to hand to accept()
    };

    explicit TcpEndpoint(std::shared_ptr<Arena> arena);
    ~TcpEndpoint() { close(); }
    TcpEndpoint(const TcpEndpoint &) = delete;
    TcpEndpoint &operator=(const TcpEndpoint &) = delete;

    Arena &arena() { return *arena_; }

    void add(std::shared_ptr<TcpSender> sender) { senders_.push_back(std::move(sender)); }
    void remove(const std::shared_ptr<TcpSender> &sender);
    // Also closes what that peer sends to this endpoint, and refuses it from now on: bytes of it that
    // nobody has read yet never reach the arena.
    void cut(const std::shared_ptr<TcpSender> &sender);

    // Prepares for a connection that carries this stream from the peer of that identity: an earlier
    // connection delivers nothing more. nullopt if the stream is refused, or is neither new nor known.
    std::optional<Expected> expect(std::uint64_t stream, std::uint64_t identity, bool is_new);
    // Takes over a connection, or closes it if another connection of the stream is expected by now.
    void accept(std::uint64_t stream, std::uint64_t number, std::unique_ptr<Connection> connection);
    // Lets a peer read the arena over this connection.
    void serve(std::unique_ptr<Connection> connection) { fetch_server_.add(std::move(connection)); }

    // Continues to send, receiving meanwhile. Done, Again (call again), Broken, Lost; Expired if nothing
    // moved for `stall`. Unless it may block, it returns Again instead.
    Outcome send(const std::shared_ptr<TcpSender> &sender, TcpMessage &message,
                 std::chrono::nanoseconds stall, bool may_block);

    // Receives. Spins for at most `spin`, then sleeps once, for a slice at most. Again: nothing yet, call
    // again.
    Outcome wait(std::span<const Target> targets, Time deadline, std::chrono::nanoseconds spin);

    // From now on, a thread receives whenever the owner neither waits nor sends: peers can send although
    // the owner waits for a device.
    void receive_always();

    // Closes all sockets. Idempotent.
    void close();

private:
    struct Incoming {
        TcpReceiver receiver;
        std::unique_ptr<Connection> connection;
        std::unique_ptr<Connection> next; // to be adopted by the owner
        std::uint64_t number = 0;         // of the connection expected last
        bool detached = false;            // the connection delivers nothing more
        bool readable = false;            // according to poll
        bool refusal_is_known = false;    // the owner has been told
        Time closed_at{};
        explicit Incoming(std::uint64_t identity) : receiver(identity) {}
    };

    // Keeps the thread of receive_always() from taking what the owner sleeps for.
    class Receives {
    public:
        explicit Receives(TcpEndpoint &endpoint);
        ~Receives();
        Receives(const Receives &) = delete;
        Receives &operator=(const Receives &) = delete;

    private:
        TcpEndpoint &endpoint_;
    };

    bool receive(bool only_readable); // true if anything has arrived
    bool receive_locked(bool only_readable);
    bool fetch(); // likewise
    void adopt(Incoming &incoming);
    bool sleep(std::chrono::nanoseconds at_most); // false if nothing happened
    bool is_drained(const TcpSender &sender);
    std::optional<std::string> new_refusal();
    std::optional<Outcome> trouble();

    std::shared_ptr<Arena> arena_;
    TcpFetchServer fetch_server_;
    std::vector<std::shared_ptr<TcpSender>> senders_;
    std::vector<pollfd> polled_;
    std::vector<Incoming *> polled_incoming_;
    int news_;                                   // eventfd: incoming_ has changed
    std::mutex mutex_;                           // guards what follows
    std::map<std::uint64_t, Incoming> incoming_; // by stream
    std::set<std::uint64_t> refused_;            // identities of peers that were cut
    bool owner_receives_ = false;
    std::jthread receiving_;
};

} // namespace lamina
