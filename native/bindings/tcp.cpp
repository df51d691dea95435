// Bindings of the TCP streams of an endpoint.
#include "transport.h"

#include <algorithm>
#include <string>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "lamina/tls.h"
#include "lamina/transport_tcp.h"

namespace nb = nanobind;
using lamina::Connection;
using lamina::Part;
using lamina::TcpEndpoint;
using lamina::TcpMessage;
using lamina::TcpSender;
using Clock = std::chrono::steady_clock;

namespace {

// A connection until something takes it over.
struct Opened {
    std::unique_ptr<Connection> connection;
};

// Repairs a sender's connection when it is broken or lost, in the given seconds, or raises.
using Repair = nb::typed<nb::callable, void(std::shared_ptr<TcpSender>, double)>;
// Told why a stream was refused.
using Refused = nb::typed<nb::callable, void(std::string)>;

std::unique_ptr<Connection> take(Opened &opened) {
    if (!opened.connection)
        throw nb::value_error("this connection has already been taken over");
    return std::move(opened.connection);
}

Opened open_tls(int fd, nb::bytes key, bool listens, double timeout_s) {
    lamina::TlsKey shared;
    if (key.size() != shared.size())
        throw nb::value_error("a TLS key has 32 bytes");
    std::copy_n(static_cast<const unsigned char *>(key.data()), shared.size(), shared.begin());
    const auto deadline = Clock::now() + to_nanoseconds(timeout_s);
    const auto side =
        listens ? lamina::TlsConnection::Side::Listening : lamina::TlsConnection::Side::Connecting;
    nb::gil_scoped_release release;
    return {std::make_unique<lamina::TlsConnection>(fd, shared, side, deadline)};
}

void check_signals() {
    if (PyErr_CheckSignals() != 0) // Ctrl-C ends a wait
        throw nb::python_error();
}

// Sends, calling `repair(sender, seconds)` when the connection breaks.
void send(TcpEndpoint &endpoint, const std::shared_ptr<TcpSender> &sender, TcpMessage &message,
          std::size_t nbytes, double stall_s, const Repair &repair) {
    const auto stall = to_nanoseconds(stall_s);
    for (bool may_block = nbytes >= kReleaseNbytes;; may_block = true) {
        const TcpEndpoint::Outcome outcome = [&] {
            if (!may_block)
                return endpoint.send(sender, message, stall, false);
            nb::gil_scoped_release release;
            return endpoint.send(sender, message, stall, true);
        }();
        switch (outcome.kind) {
        case TcpEndpoint::Kind::Done:
            return;
        case TcpEndpoint::Kind::Again:
            check_signals();
            break;
        case TcpEndpoint::Kind::Broken:
        case TcpEndpoint::Kind::Lost:
            repair(sender, stall_s);
            break;
        case TcpEndpoint::Kind::Expired:
            PyErr_SetString(PyExc_TimeoutError, "the peer receives nothing");
            throw nb::python_error();
        case TcpEndpoint::Kind::Ready:
        case TcpEndpoint::Kind::Refused:
            throw std::logic_error("not an outcome of sending");
        }
    }
}

void send_parts(TcpEndpoint &endpoint, const std::shared_ptr<TcpSender> &sender, std::int64_t offset,
                std::size_t nbytes, std::span<const Part> parts, std::uint32_t doorbell,
                std::uint64_t sequence, double stall_s, const Repair &repair) {
    TcpMessage message({.offset = static_cast<std::uint64_t>(offset),
                        .nbytes = nbytes,
                        .sequence = sequence,
                        .doorbell = doorbell,
                        .magic = lamina::kFrameMagic},
                       parts);
    try {
        send(endpoint, sender, message, nbytes, stall_s, repair);
    } catch (...) {
        if (message.begun() && !message.done())
            sender->lose(); // nothing can follow half a frame
        throw;
    }
}

void write_part(TcpEndpoint &endpoint, const std::shared_ptr<TcpSender> &sender, std::int64_t offset,
                BufferHandle data, double stall_s, const Repair &repair) {
    const HeldBuffer held(data);
    const Part part = held.part();
    const auto nbytes = static_cast<std::int64_t>(part.size());
    lamina::check_message(offset, nbytes, {&part, 1}, sender->arena_nbytes());
    send_parts(endpoint, sender, offset, part.size(), {&part, 1}, lamina::kNoDoorbell, 0, stall_s, repair);
}

void ring(TcpEndpoint &endpoint, const std::shared_ptr<TcpSender> &sender, std::int64_t doorbell,
          std::uint64_t sequence, double stall_s, const Repair &repair) {
    const std::uint32_t index = checked_doorbell(doorbell, sender->doorbells());
    send_parts(endpoint, sender, 0, 0, {}, index, sequence, stall_s, repair);
}

void post(TcpEndpoint &endpoint, const std::shared_ptr<TcpSender> &sender, std::int64_t offset,
          std::int64_t nbytes, const BufferSequence &parts, std::int64_t doorbell, std::uint64_t sequence,
          double stall_s, const Repair &repair) {
    const std::uint32_t index = checked_doorbell(doorbell, sender->doorbells());
    const HeldParts held(parts);
    const std::size_t total = lamina::check_message(offset, nbytes, held.parts(), sender->arena_nbytes());
    send_parts(endpoint, sender, offset, total, held.parts(), index, sequence, stall_s, repair);
}

[[noreturn]] void raise_late() {
    PyErr_SetString(PyExc_TimeoutError, "no doorbell reached its sequence number");
    throw nb::python_error();
}

std::size_t wait_for(TcpEndpoint &endpoint, const std::vector<std::pair<std::int64_t, std::uint64_t>> &pairs,
                     double timeout_s, double spin_s, const Repair &repair, const Refused &refused) {
    const auto &bells = endpoint.arena().doorbells();
    const std::vector<lamina::Target> targets = to_targets(pairs, bells);
    const auto deadline = Clock::now() + to_nanoseconds(timeout_s);
    if (const auto index = bells.ready(targets))
        return *index; // without giving up the GIL

    const auto spin = to_nanoseconds(spin_s);
    for (;;) {
        const TcpEndpoint::Outcome outcome = [&] {
            nb::gil_scoped_release release;
            return endpoint.wait(targets, deadline, spin);
        }();
        switch (outcome.kind) {
        case TcpEndpoint::Kind::Ready:
            return outcome.index;
        case TcpEndpoint::Kind::Again:
            check_signals();
            break;
        case TcpEndpoint::Kind::Broken:
        case TcpEndpoint::Kind::Lost: {
            const std::chrono::duration<double> left = deadline - Clock::now();
            repair(outcome.sender, left.count());
            if (outcome.kind == TcpEndpoint::Kind::Broken && Clock::now() >= deadline)
                raise_late(); // otherwise an unreachable peer would prolong the wait until it counts as lost
            break;
        }
        case TcpEndpoint::Kind::Refused:
            refused(outcome.refusal);
            break;
        case TcpEndpoint::Kind::Expired:
            raise_late();
        case TcpEndpoint::Kind::Done:
            throw std::logic_error("not an outcome of waiting");
        }
    }
}

void fetch(TcpEndpoint &endpoint, TcpSender &sender, std::int64_t offset, std::int64_t nbytes,
           std::int64_t to, std::int64_t doorbell, std::uint64_t sequence) {
    lamina::check_message(offset, nbytes, {}, sender.arena_nbytes());
    lamina::check_message(to, nbytes, {}, endpoint.arena().data().size());
    if (nbytes == 0)
        throw nb::value_error("a fetch of 0 bytes is invalid");
    const std::uint32_t index = checked_doorbell(doorbell, endpoint.arena().doorbells().size());
    sender.fetcher().fetch({static_cast<std::uint64_t>(offset), static_cast<std::uint64_t>(nbytes)},
                           static_cast<std::size_t>(to), index, sequence);
}

std::optional<std::pair<std::uint64_t, std::uint64_t>> expect(TcpEndpoint &endpoint, std::uint64_t stream,
                                                              std::uint64_t identity, bool is_new) {
    const auto expected = endpoint.expect(stream, identity, is_new);
    if (!expected)
        return std::nullopt;
    return std::pair{expected->position, expected->number};
}

std::shared_ptr<TcpSender> connect(TcpEndpoint &endpoint, Opened &opened, std::uint64_t identity,
                                   std::size_t nbytes, std::uint32_t doorbells) {
    auto sender = std::make_shared<TcpSender>(take(opened), identity, nbytes, doorbells);
    endpoint.add(sender);
    return sender;
}

} // namespace

void register_tcp(nb::module_ &module) {
    using namespace nb::literals;
    using Unlocked = nb::call_guard<nb::gil_scoped_release>;
    module.def("tls_obstacle", &lamina::tls_obstacle,
               "Why TLS cannot be used in this process; empty if it can.");
    nb::class_<Opened>(module, "Connection", "A connected socket, owned until something takes it over.")
        .def_static("tls", &open_tls, "fd"_a, "key"_a, "listens"_a, "timeout_s"_a,
                    R"(
TLS 1.3 over a connected socket, which it takes over, with a key of 32 bytes that both sides have.

Releases the GIL. Raises RuntimeError if OpenSSL is missing or the handshake does not succeed in time,
ValueError for a key of another size.)")
        .def(
            "__init__", [](Opened *self, int fd) { new (self) Opened{std::make_unique<Connection>(fd)}; },
            "fd"_a, "Takes over a connected socket.");

    nb::class_<TcpSender>(module, "TcpSender", "The stream to one peer, and the reads from the same peer.")
        .def_prop_ro(
            "is_broken", [](const TcpSender &sender) { return sender.state() == TcpSender::State::Broken; },
            "True while the stream has no connection and may get another.")
        .def_prop_ro(
            "is_lost", [](const TcpSender &sender) { return sender.state() == TcpSender::State::Lost; },
            "True once nothing can be sent any more.")
        .def(
            "reopen",
            [](TcpSender &sender, Opened &opened, std::uint64_t position) {
                sender.reopen(take(opened), position);
            },
            "connection"_a, "position"_a,
            R"(
Continue over another connection, taking it over, from the byte that the receiver wants next.

Raises ValueError if that byte is no longer kept or not written yet.)")
        .def(
            "reopen_fetches",
            [](TcpSender &sender, Opened &opened) { sender.fetcher().reopen(take(opened)); }, "connection"_a,
            "Read from the peer over this connection, taking it over; requests not answered yet are sent "
            "again.")
        .def("lose", &TcpSender::lose, "Close the connection for good.");

    nb::class_<TcpEndpoint>(module, "TcpEndpoint",
                            R"(
The TCP streams of one endpoint. One thread owns it; expect() and accept() are for any thread.

Calls that take ``repair`` call it with a sender whose connection is broken or lost and the seconds left; it reopens
the sender or raises.)")
        .def(nb::init<std::shared_ptr<lamina::Arena>>(), "arena"_a)
        .def("connect", &connect, "connection"_a, "identity"_a, "nbytes"_a, "doorbells"_a,
             "The sender over a connection, which it takes over, to the peer of that identity and arena.")
        .def("disconnect", &TcpEndpoint::remove, "sender"_a, "Close a sender and forget it.")
        .def("cut", &TcpEndpoint::cut, "sender"_a,
             "Close a sender, and receive nothing from its peer from now on.")
        .def("expect", &expect, "stream"_a, "identity"_a, "is_new"_a, Unlocked(),
             R"(
Prepare for another connection of a stream: (its byte wanted next, number for accept()).

None if the stream was refused, or is neither new nor known.)")
        .def(
            "accept",
            [](TcpEndpoint &endpoint, std::uint64_t stream, std::uint64_t number, Opened &opened) {
                endpoint.accept(stream, number, take(opened));
            },
            "stream"_a, "number"_a, "connection"_a, Unlocked(),
            "Take over a connection that carries the stream; closes it if another is expected by now.")
        .def(
            "serve", [](TcpEndpoint &endpoint, Opened &opened) { endpoint.serve(take(opened)); },
            "connection"_a, Unlocked(),
            "Take over a connection over which a peer reads the arena, served in a thread without the GIL.")
        .def("fetch", &fetch, "sender"_a, "offset"_a, "nbytes"_a, "to"_a, "doorbell"_a, "sequence"_a,
             R"(
Request [offset, offset + nbytes) of the peer's arena: copied to ``to`` of this one, then a doorbell is rung.

Raises ValueError outside an arena or for 0 bytes.)")
        .def("write", &write_part, "sender"_a, "offset"_a, "data"_a, "stall_s"_a, "repair"_a,
             "Send a frame that only writes. Raises like post().")
        .def("ring", &ring, "sender"_a, "doorbell"_a, "sequence"_a, "stall_s"_a, "repair"_a,
             "Send a frame that only rings. Raises like post().")
        .def("post", &post, "sender"_a, "offset"_a, "nbytes"_a, "parts"_a, "doorbell"_a, "sequence"_a,
             "stall_s"_a, "repair"_a,
             R"(
Send a frame that writes C-contiguous parts, then rings.

Releases the GIL when it would block, and receives meanwhile. Raises ValueError, before anything is sent, if
they do not fit; TimeoutError if the peer takes in nothing for ``stall_s``; whatever ``repair`` raises.)")
        .def("wait", &wait_for, "targets"_a, "timeout_s"_a, "spin_s"_a, "repair"_a, "refused"_a,
             R"(
Receive until a target (doorbell, sequence) is reached; returns its index. Releases the GIL.

``refused`` is called with the reason when a stream is refused for one of its frames. Raises ValueError;
TimeoutError; whatever ``repair`` and ``refused`` raise.)")
        .def("receive_always", &TcpEndpoint::receive_always,
             "Receive in a thread, without the GIL, whenever the owner neither waits nor sends.")
        .def("close", &TcpEndpoint::close, Unlocked(), "Close all sockets. Idempotent.");
}
