// A connected socket, carrying plain bytes or TLS 1.3.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>

#include <sys/uio.h>

#include "lamina/arena.h"

namespace lamina {

// Owns a connected socket. send() and receive() never block and return nullopt once the connection is lost.
class Connection {
public:
    // Takes over the socket.
    explicit Connection(int fd) : fd_(fd) {}
    virtual ~Connection();
    Connection(const Connection &) = delete;
    Connection &operator=(const Connection &) = delete;

    int fd() const { return fd_; }

    // Bytes taken, 0 if there is no room now. The rest must be offered again, unchanged.
    virtual std::optional<std::size_t> send(Part bytes);
    // Bytes received into the pieces, one after another; fewer than they hold only if no more has arrived.
    virtual std::optional<std::size_t> receive(std::span<const iovec> pieces);

    // True if there is data to receive that polling the socket does not report.
    virtual bool has_pending() const { return false; }

    // Ends the connection for both sides; another thread may be polling the socket.
    void shut_down();

private:
    int fd_;
};

} // namespace lamina
