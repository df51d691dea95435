// Bindings of arenas and of the wait on shared memory, and what the bindings of other transports share.
#include "transport.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <string>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>

#include "lamina/transport_shm.h"

namespace nb = nanobind;
using lamina::Arena;
using lamina::Part;
using lamina::ShmWaiter;
using lamina::Target;

HeldBuffer::HeldBuffer(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_C_CONTIGUOUS) == 0)
        return;
    if (PyErr_ExceptionMatches(PyExc_TypeError))
        throw nb::python_error(); // not a buffer
    PyErr_Clear();
    throw nb::value_error("a part is not C-contiguous; copy it first");
}

HeldParts::HeldParts(nb::sequence parts) {
    held_.reserve(nb::len(parts));
    pieces_.reserve(nb::len(parts));
    for (nb::handle part : parts) {
        held_.emplace_back(part);
        pieces_.push_back(held_.back().part());
    }
}

std::uint32_t checked_doorbell(std::int64_t doorbell, std::size_t count) {
    if (doorbell < 0 || doorbell >= static_cast<std::int64_t>(count)) {
        const std::string message = "doorbell " + std::to_string(doorbell) +
                                    " does not exist: the arena has " + std::to_string(count);
        throw nb::value_error(message.c_str());
    }
    return static_cast<std::uint32_t>(doorbell);
}

std::chrono::nanoseconds to_nanoseconds(double seconds) {
    constexpr double kLongest = 1e9; // 31 years: a steady clock can represent it
    if (!std::isfinite(seconds))
        throw nb::value_error("a wait needs a finite timeout");
    return std::chrono::nanoseconds(static_cast<std::int64_t>(std::clamp(seconds, 0.0, kLongest) * 1e9));
}

std::vector<Target> to_targets(const std::vector<std::pair<std::int64_t, std::uint64_t>> &pairs,
                               const lamina::Doorbells &doorbells) {
    if (pairs.empty())
        throw nb::value_error("a wait needs at least one doorbell");
    std::vector<Target> targets;
    targets.reserve(pairs.size());
    for (const auto &[doorbell, sequence] : pairs)
        targets.push_back({checked_doorbell(doorbell, doorbells.size()), sequence});
    return targets;
}

namespace {

void raise_if_gone(const Arena &arena) {
    if (arena.gone()) {
        PyErr_SetString(PyExc_ConnectionResetError, "the arena's owner is gone");
        throw nb::python_error();
    }
}

void copy(Arena &arena, std::int64_t offset, std::int64_t nbytes, std::span<const Part> parts) {
    std::size_t total = 0;
    for (const Part &part : parts)
        total += part.size();
    if (total < kReleaseNbytes) {
        arena.write(offset, nbytes, parts);
    } else {
        nb::gil_scoped_release release;
        arena.write(offset, nbytes, parts);
    }
}

void write_part(Arena &arena, std::int64_t offset, BufferHandle data) {
    raise_if_gone(arena);
    const HeldBuffer held(data);
    const Part part = held.part();
    copy(arena, offset, static_cast<std::int64_t>(part.size()), {&part, 1});
}

void ring_doorbell(Arena &arena, std::int64_t doorbell, std::uint64_t sequence) {
    raise_if_gone(arena);
    arena.doorbells().ring(checked_doorbell(doorbell, arena.doorbells().size()), sequence);
}

void post(Arena &arena, std::int64_t offset, std::int64_t nbytes, const BufferSequence &parts,
          std::int64_t doorbell, std::uint64_t sequence) {
    raise_if_gone(arena);
    const std::uint32_t index = checked_doorbell(doorbell, arena.doorbells().size());
    const HeldParts held(parts);
    copy(arena, offset, nbytes, held.parts());
    arena.doorbells().ring(index, sequence);
}

std::size_t wait_for(ShmWaiter &waiter, const std::vector<std::pair<std::int64_t, std::uint64_t>> &pairs,
                     double timeout_s, double spin_s) {
    const std::vector<Target> targets = to_targets(pairs, waiter.doorbells());
    const auto deadline = std::chrono::steady_clock::now() + to_nanoseconds(timeout_s);
    if (const auto index = waiter.doorbells().ready(targets))
        return *index; // without giving up the GIL

    for (auto spin = to_nanoseconds(spin_s);; spin = std::chrono::nanoseconds::zero()) {
        const ShmWaiter::Outcome outcome = [&] {
            nb::gil_scoped_release release;
            return waiter.wait(targets, deadline, spin);
        }();
        switch (outcome.kind) {
        case ShmWaiter::Kind::Ready:
            return outcome.index;
        case ShmWaiter::Kind::Again:
            if (PyErr_CheckSignals() != 0) // Ctrl-C ends a wait
                throw nb::python_error();
            break;
        case ShmWaiter::Kind::Expired:
            PyErr_SetString(PyExc_TimeoutError, "no doorbell reached its sequence number");
            throw nb::python_error();
        case ShmWaiter::Kind::PeerGone:
            PyErr_SetObject(PyExc_ConnectionResetError, nb::int_(outcome.index).ptr());
            throw nb::python_error();
        }
    }
}

std::optional<std::size_t> watch(Arena &arena,
                                 const std::vector<std::pair<std::int64_t, std::uint64_t>> &pairs,
                                 double timeout_s, double spin_s) {
    const std::vector<Target> targets = to_targets(pairs, arena.doorbells());
    const auto until = std::chrono::steady_clock::now() + to_nanoseconds(timeout_s);
    const auto spin = to_nanoseconds(spin_s);
    if (const auto index = arena.doorbells().ready(targets))
        return index; // without giving up the GIL
    nb::gil_scoped_release release;
    return arena.doorbells().watch(targets, until, spin);
}

template <typename T> std::uintptr_t address(const T *pointer) {
    return reinterpret_cast<std::uintptr_t>(pointer);
}

// Python's buffer protocol over the data, so that views keep the mapping alive after close().
int get_buffer(PyObject *self, Py_buffer *view, int flags) {
    const auto data = nb::inst_ptr<Arena>(self)->data();
    return PyBuffer_FillInfo(view, self, data.data(), static_cast<Py_ssize_t>(data.size()), 0, flags);
}

PyType_Slot arena_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void *>(get_buffer)}, {0, nullptr}};

} // namespace

void register_transport(nb::module_ &module) {
    using namespace nb::literals;
    nb::class_<Arena>(module, "Arena", nb::type_slots(arena_slots),
                      R"(
Memory with doorbells, mapped into this process, that peers may write into. Exports its data as a writable buffer.

A doorbell holds a sequence number that one process rings and another waits for.)")
        .def_static("file_nbytes", &Arena::file_nbytes, "nbytes"_a, "doorbells"_a,
                    "Bytes of a file that holds ``nbytes`` of data and that many doorbells.")
        .def_static("create", &Arena::create, "fd"_a, "nbytes"_a, "doorbells"_a, "identity"_a,
                    "Map a new, zero-filled file and make it an arena; the fd stays the caller's. Raises "
                    "MemoryError.")
        .def_static("open", &Arena::open, "fd"_a, "identity"_a,
                    R"(
Map the arena that another process made with that identity; the fd stays the caller's.

Raises ValueError if the file is not that arena, MemoryError.)")
        .def_prop_ro(
            "nbytes", [](const Arena &arena) { return arena.data().size(); }, "Bytes of data.")
        .def_prop_ro(
            "doorbells", [](Arena &arena) { return arena.doorbells().size(); }, "Number of doorbells.")
        .def_prop_ro("gone", &Arena::gone,
                     "True once the owner has closed its endpoint or has been found dead.")
        .def_prop_ro(
            "data_address", [](const Arena &arena) { return address(arena.data().data()); },
            "Address of the data in this process's memory; behind the doorbells.")
        .def_prop_ro(
            "doorbells_address", [](const Arena &arena) { return address(arena.doorbells().first()); },
            "Address of the doorbells in this process's memory, DOORBELL_NBYTES apart, each an 8-byte "
            "number.")
        .def("watch", &watch, "targets"_a, "timeout_s"_a, "spin_s"_a,
             R"(
Poll doorbells that hardware writes until a target (doorbell, sequence) is reached; None after ``timeout_s``.

Returns the target's index. Polls without pause for ``spin_s``, then between short naps. Releases the GIL.
Raises ValueError.)")
        .def("mark_gone", &Arena::mark_gone,
             "Tell every process that has mapped this arena that its owner is gone.")
        .def(
            "nudge", [](Arena &arena) { arena.doorbells().nudge(); },
            "Wake the owner's wait without a message, so that it checks its peers.")
        .def(
            "sequence",
            [](Arena &arena, std::int64_t doorbell) {
                return arena.doorbells().sequence(checked_doorbell(doorbell, arena.doorbells().size()));
            },
            "doorbell"_a, "The doorbell's sequence number. Raises ValueError if it does not exist.")
        .def(
            "reset",
            [](Arena &arena, std::int64_t doorbell) {
                arena.doorbells().ring(checked_doorbell(doorbell, arena.doorbells().size()), 0);
            },
            "doorbell"_a,
            "Set a doorbell back to 0, for another peer. Raises ValueError if it does not exist.")
        .def("write", &write_part, "offset"_a, "data"_a,
             R"(
Copy C-contiguous ``data`` to ``offset``.

Raises ValueError outside the arena, ConnectionResetError if the owner is gone.)")
        .def("ring", &ring_doorbell, "doorbell"_a, "sequence"_a,
             R"(
Set a doorbell after all earlier writes and wake its waiter.

Raises ValueError if it does not exist, ConnectionResetError if the owner is gone.)")
        .def("post", &post, "offset"_a, "nbytes"_a, "parts"_a, "doorbell"_a, "sequence"_a,
             R"(
Copy C-contiguous parts one after another into [offset, offset + nbytes), then ring.

Raises ValueError, before anything is written, if they do not fit; ConnectionResetError if the owner is gone.)");

    module.attr("DOORBELL_NBYTES") = lamina::kCacheLine;

    nb::class_<ShmWaiter>(
        module, "ShmWaiter",
        "Waits on the doorbells of this process's own arena while watching its peers. One thread at a time.")
        .def(nb::init<std::shared_ptr<Arena>>(), "own"_a)
        .def("watch", &ShmWaiter::watch, "peer"_a, "pidfd"_a,
             "Watch a peer's process and arena from now on; the pidfd stays the caller's.")
        .def("forget", &ShmWaiter::forget, "index"_a,
             "Forget the peer at this index; later ones move down by one.")
        .def("wait", &wait_for, "targets"_a, "timeout_s"_a, "spin_s"_a,
             R"(
Wait until a target (doorbell, sequence) is reached; returns its index.

Spins for ``spin_s``, then sleeps. Releases the GIL. Raises ValueError; TimeoutError; ConnectionResetError(index
of the peer) if nothing is ready and a peer is gone.)");
}
