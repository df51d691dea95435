#include "lamina/connection.h"

#include <cerrno>

#include <sys/socket.h>
#include <unistd.h>

namespace lamina {
namespace {

bool would_block() {
    return errno == EAGAIN || errno == EWOULDBLOCK;
}

} // namespace

Connection::~Connection() {
    ::close(fd_);
}

void Connection::shut_down() {
    ::shutdown(fd_, SHUT_RDWR);
}

std::optional<std::size_t> Connection::send(Part bytes) {
    for (;;) {
        const ssize_t sent = ::send(fd_, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent >= 0)
            return static_cast<std::size_t>(sent);
        if (would_block())
            return 0;
        if (errno != EINTR)
            return std::nullopt;
    }
}

std::optional<std::size_t> Connection::receive(std::span<const iovec> pieces) {
    msghdr header{};
    header.msg_iov = const_cast<iovec *>(pieces.data()); // recvmsg only reads them
    header.msg_iovlen = pieces.size();
    for (;;) {
        const ssize_t got = ::recvmsg(fd_, &header, MSG_DONTWAIT);
        if (got > 0)
            return static_cast<std::size_t>(got);
        if (got < 0 && would_block())
            return 0;
        if (got == 0 || errno != EINTR)
            return std::nullopt;
    }
}

} // namespace lamina
