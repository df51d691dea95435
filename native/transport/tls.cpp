#include "lamina/tls.h"

#include <algorithm>
#include <climits>
#include <cstring>
#include <stdexcept>

#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>

namespace lamina {
namespace {

// The part of OpenSSL 3's binary interface used here; numbers are from its headers.
constexpr const char *kLibrary = "libssl.so.3";
constexpr int kCtrlMode = 33;
constexpr int kCtrlMinVersion = 123;
constexpr long kTls13 = 0x0304;
constexpr long kPartialWrites = 1;
constexpr long kMovingBuffer = 2;
constexpr int kVerifyPeer = 1;
constexpr int kWantRead = 2;
constexpr int kWantWrite = 3;
constexpr int kAppData = 0;
constexpr const char *kSuite = "TLS_AES_128_GCM_SHA256"; // pre-shared keys are used with SHA-256
constexpr const char *kIdentity = "lamina";

using ClientCallback = unsigned (*)(void *, const char *, char *, unsigned, unsigned char *, unsigned);
using ServerCallback = unsigned (*)(void *, const char *, unsigned char *, unsigned);

struct OpenSsl {
    void *(*TLS_method)();
    void *(*SSL_CTX_new)(void *);
    long (*SSL_CTX_ctrl)(void *, int, long, void *);
    int (*SSL_CTX_set_ciphersuites)(void *, const char *);
    int (*SSL_CTX_set_num_tickets)(void *, std::size_t);
    void (*SSL_CTX_set_psk_client_callback)(void *, ClientCallback);
    void (*SSL_CTX_set_psk_server_callback)(void *, ServerCallback);
    void *(*SSL_new)(void *);
    void (*SSL_free)(void *);
    int (*SSL_set_fd)(void *, int);
    int (*SSL_set_ex_data)(void *, int, void *);
    void *(*SSL_get_ex_data)(void *, int);
    void (*SSL_set_verify)(void *, int, void *);
    void (*SSL_set_connect_state)(void *);
    void (*SSL_set_accept_state)(void *);
    int (*SSL_do_handshake)(void *);
    int (*SSL_read)(void *, void *, int);
    int (*SSL_write)(void *, const void *, int);
    int (*SSL_pending)(const void *);
    int (*SSL_get_error)(const void *, int);
    void (*ERR_clear_error)();
    unsigned long (*ERR_get_error)();
    void (*ERR_error_string_n)(unsigned long, char *, std::size_t);

    void *context;
};

template <typename Function> void find(void *library, const char *name, Function &function) {
    function = reinterpret_cast<Function>(::dlsym(library, name));
    if (function == nullptr)
        throw std::runtime_error(std::string(kLibrary) + " has no " + name);
}

unsigned give_key(void *ssl, unsigned char *key, unsigned room);

unsigned client_key(void *ssl, const char *, char *identity, unsigned identity_room, unsigned char *key,
                    unsigned room) {
    if (identity_room <= std::strlen(kIdentity))
        return 0;
    std::strcpy(identity, kIdentity);
    return give_key(ssl, key, room);
}

unsigned server_key(void *ssl, const char *identity, unsigned char *key, unsigned room) {
    return std::strcmp(identity, kIdentity) == 0 ? give_key(ssl, key, room) : 0;
}

OpenSsl open_library() {
    void *library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr)
        throw std::runtime_error(std::string("OpenSSL 3 cannot be opened (") + ::dlerror() +
                                 "): install it (Debian: apt-get install libssl3)");
    OpenSsl found{};
    find(library, "TLS_method", found.TLS_method);
    find(library, "SSL_CTX_new", found.SSL_CTX_new);
    find(library, "SSL_CTX_ctrl", found.SSL_CTX_ctrl);
    find(library, "SSL_CTX_set_ciphersuites", found.SSL_CTX_set_ciphersuites);
    find(library, "SSL_CTX_set_num_tickets", found.SSL_CTX_set_num_tickets);
    find(library, "SSL_CTX_set_psk_client_callback", found.SSL_CTX_set_psk_client_callback);
    find(library, "SSL_CTX_set_psk_server_callback", found.SSL_CTX_set_psk_server_callback);
    find(library, "SSL_new", found.SSL_new);
    find(library, "SSL_free", found.SSL_free);
    find(library, "SSL_set_fd", found.SSL_set_fd);
    find(library, "SSL_set_ex_data", found.SSL_set_ex_data);
    find(library, "SSL_get_ex_data", found.SSL_get_ex_data);
    find(library, "SSL_set_verify", found.SSL_set_verify);
    find(library, "SSL_set_connect_state", found.SSL_set_connect_state);
    find(library, "SSL_set_accept_state", found.SSL_set_accept_state);
    find(library, "SSL_do_handshake", found.SSL_do_handshake);
    find(library, "SSL_read", found.SSL_read);
    find(library, "SSL_write", found.SSL_write);
    find(library, "SSL_pending", found.SSL_pending);
    find(library, "SSL_get_error", found.SSL_get_error);
    find(library, "ERR_clear_error", found.ERR_clear_error);
    find(library, "ERR_get_error", found.ERR_get_error);
    find(library, "ERR_error_string_n", found.ERR_error_string_n);

    found.context = found.SSL_CTX_new(found.TLS_method());
    if (found.context == nullptr ||
        found.SSL_CTX_ctrl(found.context, kCtrlMinVersion, kTls13, nullptr) != 1 ||
        found.SSL_CTX_set_ciphersuites(found.context, kSuite) != 1)
        throw std::runtime_error("this OpenSSL cannot do TLS 1.3 with " + std::string(kSuite));
    found.SSL_CTX_ctrl(found.context, kCtrlMode, kPartialWrites | kMovingBuffer, nullptr);
    found.SSL_CTX_set_num_tickets(found.context, 0); // no session is ever resumed
    found.SSL_CTX_set_psk_client_callback(found.context, client_key);
    found.SSL_CTX_set_psk_server_callback(found.context, server_key);
    return found;
}

const OpenSsl &openssl() {
    static const OpenSsl opened = open_library();
    return opened;
}

unsigned give_key(void *ssl, unsigned char *key, unsigned room) {
    const auto *own = static_cast<const TlsKey *>(openssl().SSL_get_ex_data(ssl, kAppData));
    if (own == nullptr || room < own->size())
        return 0;
    std::ranges::copy(*own, key);
    return own->size();
}

std::string last_error() {
    const unsigned long code = openssl().ERR_get_error();
    if (code == 0)
        return "the connection was closed";
    std::array<char, 256> text{};
    openssl().ERR_error_string_n(code, text.data(), text.size());
    return text.data();
}

} // namespace

std::string tls_obstacle() {
    try {
        openssl();
        return {};
    } catch (const std::runtime_error &error) {
        return error.what();
    }
}

TlsConnection::TlsConnection(int fd, const TlsKey &key, Side side,
                             std::chrono::steady_clock::time_point deadline)
    : Connection(fd), key_(key), ssl_(openssl().SSL_new(openssl().context)) {
    const OpenSsl &library = openssl();
    if (ssl_ == nullptr)
        throw std::runtime_error("out of memory for a TLS connection");
    ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
    library.SSL_set_fd(ssl_, fd);
    library.SSL_set_ex_data(ssl_, kAppData, &key_);
    if (side == Side::Connecting) {
        // There are no authorities to trust: a peer with a certificate instead of the key is refused.
        library.SSL_set_verify(ssl_, kVerifyPeer, nullptr);
        library.SSL_set_connect_state(ssl_);
    } else {
        library.SSL_set_accept_state(ssl_);
    }
    try {
        shake_hands(deadline);
    } catch (...) {
        library.SSL_free(ssl_);
        throw;
    }
}

TlsConnection::~TlsConnection() {
    openssl().SSL_free(ssl_);
}

void TlsConnection::shake_hands(std::chrono::steady_clock::time_point deadline) {
    const OpenSsl &library = openssl();
    for (;;) {
        library.ERR_clear_error();
        const int result = library.SSL_do_handshake(ssl_);
        if (result == 1)
            return;
        const int error = library.SSL_get_error(ssl_, result);
        if (error != kWantRead && error != kWantWrite)
            throw std::runtime_error("no TLS with the peer: " + last_error());
        const auto left =
            std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
        if (left.count() <= 0)
            throw std::runtime_error("no TLS with the peer: it did not answer in time");
        const short events = error == kWantRead ? POLLIN : POLLOUT;
        pollfd polled{.fd = fd(), .events = events, .revents = 0};
        ::poll(&polled, 1, static_cast<int>(std::min<long>(left.count(), INT_MAX)));
    }
}

std::optional<std::size_t> TlsConnection::send(Part bytes) {
    const OpenSsl &library = openssl();
    library.ERR_clear_error();
    const int most = static_cast<int>(std::min<std::size_t>(bytes.size(), INT_MAX));
    const int sent = library.SSL_write(ssl_, bytes.data(), most);
    if (sent > 0)
        return static_cast<std::size_t>(sent);
    const int error = library.SSL_get_error(ssl_, sent);
    return error == kWantRead || error == kWantWrite ? std::optional<std::size_t>(0) : std::nullopt;
}

std::optional<std::size_t> TlsConnection::receive(std::span<const iovec> pieces) {
    const OpenSsl &library = openssl();
    std::size_t total = 0;
    for (const iovec &piece : pieces) {
        for (std::size_t at = 0; at < piece.iov_len;) {
            library.ERR_clear_error();
            const int most = static_cast<int>(std::min<std::size_t>(piece.iov_len - at, INT_MAX));
            const int got = library.SSL_read(ssl_, static_cast<std::byte *>(piece.iov_base) + at, most);
            if (got <= 0) {
                const int error = library.SSL_get_error(ssl_, got);
                const bool lost = error != kWantRead && error != kWantWrite;
                return lost && total == 0 ? std::nullopt : std::optional(total);
            }
            at += static_cast<std::size_t>(got);
            total += static_cast<std::size_t>(got);
        }
    }
    return total;
}

bool TlsConnection::has_pending() const {
    return openssl().SSL_pending(ssl_) > 0;
}

} // namespace lamina
