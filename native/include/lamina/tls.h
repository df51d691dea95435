// TLS 1.3 over a connected socket, by OpenSSL.
//
// Both sides prove that they have the same key (a pre-shared key, RFC 8446, section 2.2: no certificates),
// and agree on fresh keys by Diffie-Hellman, so that learning the key later does not decrypt recorded
// traffic. OpenSSL is loaded at first use: neither building nor running Lamina without TLS needs it.
#pragma once

#include <array>
#include <chrono>
#include <string>

#include "lamina/connection.h"

namespace lamina {

using TlsKey = std::array<unsigned char, 32>;

// Why TLS cannot be used in this process; empty if it can.
std::string tls_obstacle();

class TlsConnection final : public Connection {
public:
    enum class Side { Connecting, Listening };

    // Takes over the socket and shakes hands. Throws std::runtime_error if OpenSSL is missing, or the
    // handshake fails or does not end by the deadline.
    TlsConnection(int fd, const TlsKey &key, Side side, std::chrono::steady_clock::time_point deadline);
    ~TlsConnection() override;

    std::optional<std::size_t> send(Part bytes) override;
    std::optional<std::size_t> receive(std::span<const iovec> pieces) override;
    bool has_pending() const override;

private:
    void shake_hands(std::chrono::steady_clock::time_point deadline);

    TlsKey key_; // OpenSSL asks for it in the handshake
    void *ssl_;
};

} // namespace lamina
