// Reads from a peer's arena over TCP, on a connection of their own.
//
// The reader requests a range of the peer's arena and gets its bytes, in the order of the requests and with
// nothing between them. A dedicated thread at the peer answers, so that reading does not depend on a wait
// there and bulk bytes do not delay messages. A range may be requested again after a lost connection.
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
    // Requests a range of the peer's arena, to be copied to `to` of this one, where `doorbell` is then rung.
    void fetch(const FetchRequest &range, std::size_t to, std::uint32_t doorbell, std::uint64_t sequence);

    // True if requests are open and there is no connection.
    bool is_broken() const { return connection_ == nullptr && !asked_.empty(); }
    // Continues over another connection: requests not answered yet are sent again.
    void reopen(std::unique_ptr<Connection> connection);
    void close() { connection_.reset(); }

    // -1 without a connection.
    int fd() const { return connection_ ? connection_->fd() : -1; }
    bool has_unsent() const { return connection_ != nullptr && !unsent_.empty(); }
    // Sends without blocking, and receives until a request is complete. True if anything has arrived.
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
    // Why a connection was closed for an invalid request, once each; empty if none was.
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
    bool serve(Reader &reader); // false once the connection is useless
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
