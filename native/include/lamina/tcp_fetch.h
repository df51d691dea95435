// Reads from a peer's arena over TCP, on a connection of their own.
//
// The reader asks for a range of the peer's arena and gets its bytes, in the order of asking and with nothing
// between them. At the peer a thread of its own answers, so that reading needs nobody who waits there, and
// bulk bytes hold up no message. A range may be asked for again when a connection was lost.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "lamina/arena.h"
#include "lamina/connection.h"

namespace lamina {

// As on the wire, little-endian.
struct FetchRequest {
    std::uint64_t offset;
    std::uint64_t nbytes;
};
static_assert(sizeof(FetchRequest) == 16);

// The reading side. One thread owns it.
class TcpFetcher {
public:
    // Asks for a range of the peer's arena, to lie at `to` of one's own, where `doorbell` is rung then.
    void fetch(const FetchRequest &range, std::size_t to, std::uint32_t doorbell, std::uint64_t sequence);

    // True if something has been asked for and there is no connection.
    bool is_broken() const { return connection_ == nullptr && !asked_.empty(); }
    // Goes on over another connection: what has not arrived is asked for again.
    void reopen(std::unique_ptr<Connection> connection);
    void close() { connection_.reset(); }

    // -1 without a connection.
    int fd() const { return connection_ ? connection_->fd() : -1; }
    bool has_unsent() const { return connection_ != nullptr && !unsent_.empty(); }
    // Sends what can be, and receives until something asked for is complete. True if anything has arrived.
    bool advance(Arena &arena);

private:
    struct Asked {
        FetchRequest range;
        std::size_t to;
        std::uint32_t doorbell;
        std::uint64_t sequence;
    };

    void ask(const FetchRequest &range);
    void flush();

    std::unique_ptr<Connection> connection_;
    std::deque<Asked> asked_;
    std::vector<std::byte> unsent_; // of requests
    std::size_t arrived_ = 0;       // of the first
};

// The side that is read. Serves in a thread of its own, which starts with the first connection.
class TcpFetchServer {
public:
    explicit TcpFetchServer(std::shared_ptr<Arena> arena) : arena_(std::move(arena)) {}
    ~TcpFetchServer() { close(); }
    TcpFetchServer(const TcpFetchServer &) = delete;
    TcpFetchServer &operator=(const TcpFetchServer &) = delete;

    // Serves another connection. For any thread.
    void add(std::unique_ptr<Connection> connection);
    // Why a connection was closed for what it asked for, once each; empty if there is nothing to say.
    std::string take_refusal();
    // Closes all connections and ends the thread. Idempotent.
    void close();

private:
    struct Reader {
        std::unique_ptr<Connection> connection;
        FetchRequest range{};
        std::size_t range_nbytes = 0; // of `range` that have arrived
        Part rest{};                  // of the arena, still to be sent
    };

    void run();
    bool serve(Reader &reader); // false once the connection is of no more use
    bool read_request(Reader &reader);

    std::shared_ptr<Arena> arena_;
    std::thread thread_;
    std::mutex mutex_; // guards what follows
    int news_ = -1;    // eventfd: something below has changed
    bool closing_ = false;
    std::vector<std::unique_ptr<Connection>> new_;
    std::vector<std::string> refusals_;
};

} // namespace lamina
