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
        throw nb::python_error(); // no buffer at all
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
    constexpr double kLongest = 1e9; // 31 years: what a steady clock can surely hold
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

void write_part(Arena &arena, std::int64_t offset, nb::handle data) {
    raise_if_gone(arena);
    const HeldBuffer held(data);
    const Part part = held.part();
    copy(arena, offset, static_cast<std::int64_t>(part.size()), {&part, 1});
}

void ring_doorbell(Arena &arena, std::int64_t doorbell, std::uint64_t sequence) {
    raise_if_gone(arena);
    arena.doorbells().ring(checked_doorbell(doorbell, arena.doorbells().size()), sequence);
}

void post(Arena &arena, std::int64_t offset, std::int64_t nbytes, nb::sequence parts, std::int64_t doorbell,
          std::uint64_t sequence) {
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
    nb::class_<Arena>(module, "Arena", nb::type_slots(arena_slots))
        .def_static("file_nbytes", &Arena::file_nbytes, "nbytes"_a, "doorbells"_a)
        .def_static("create", &Arena::create, "fd"_a, "nbytes"_a, "doorbells"_a, "identity"_a)
        .def_static("open", &Arena::open, "fd"_a, "identity"_a)
        .def_prop_ro("nbytes", [](const Arena &arena) { return arena.data().size(); })
        .def_prop_ro("doorbells", [](Arena &arena) { return arena.doorbells().size(); })
        .def_prop_ro("gone", &Arena::gone)
        .def_prop_ro("data_address", [](const Arena &arena) { return address(arena.data().data()); })
        .def_prop_ro("doorbells_address",
                     [](const Arena &arena) { return address(arena.doorbells().first()); })
        .def("watch", &watch, "targets"_a, "timeout_s"_a, "spin_s"_a)
        .def("mark_gone", &Arena::mark_gone)
        .def("nudge", [](Arena &arena) { arena.doorbells().nudge(); })
        .def(
            "sequence",
            [](Arena &arena, std::int64_t doorbell) {
                return arena.doorbells().sequence(checked_doorbell(doorbell, arena.doorbells().size()));
            },
            "doorbell"_a)
        .def("write", &write_part, "offset"_a, "data"_a)
        .def("ring", &ring_doorbell, "doorbell"_a, "sequence"_a)
        .def("post", &post, "offset"_a, "nbytes"_a, "parts"_a, "doorbell"_a, "sequence"_a);

    module.attr("DOORBELL_NBYTES") = lamina::kCacheLine;

    nb::class_<ShmWaiter>(module, "ShmWaiter")
        .def(nb::init<std::shared_ptr<Arena>>(), "own"_a)
        .def("watch", &ShmWaiter::watch, "peer"_a, "pidfd"_a)
        .def("forget", &ShmWaiter::forget, "index"_a)
        .def("wait", &wait_for, "targets"_a, "timeout_s"_a, "spin_s"_a);
}
