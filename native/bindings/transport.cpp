// Bindings of shared-memory arenas and of the wait on their doorbells.
#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include "lamina/transport_shm.h"

namespace nb = nanobind;
using lamina::Part;
using lamina::ShmArena;
using lamina::ShmWaiter;
using lamina::Target;

namespace {

// Copies of at least this size let other Python threads run; below it, giving up the GIL costs more than it
// gives.
constexpr std::size_t kReleaseNbytes = 256 * 1024;

// A Python buffer, held while it is read.
class HeldBuffer {
public:
    explicit HeldBuffer(nb::handle object) {
        if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_C_CONTIGUOUS) == 0)
            return;
        if (PyErr_ExceptionMatches(PyExc_TypeError))
            throw nb::python_error(); // no buffer at all
        PyErr_Clear();
        throw nb::value_error("a part is not C-contiguous; copy it first");
    }
    ~HeldBuffer() { PyBuffer_Release(&buffer_); } // does nothing once moved from
    HeldBuffer(HeldBuffer &&other) noexcept : buffer_(std::exchange(other.buffer_, Py_buffer{})) {}
    HeldBuffer &operator=(HeldBuffer &&) = delete;

    Part part() const {
        return {static_cast<const std::byte *>(buffer_.buf), static_cast<std::size_t>(buffer_.len)};
    }

private:
    Py_buffer buffer_{};
};

void raise_if_gone(const ShmArena &arena) {
    if (arena.gone()) {
        PyErr_SetString(PyExc_ConnectionResetError, "the arena's owner is gone");
        throw nb::python_error();
    }
}

// The doorbell's index, once it is known to exist.
std::uint32_t checked(const lamina::Doorbells &doorbells, std::int64_t doorbell) {
    if (doorbell < 0 || doorbell >= static_cast<std::int64_t>(doorbells.size())) {
        const std::string message = "doorbell " + std::to_string(doorbell) +
                                    " does not exist: the arena has " + std::to_string(doorbells.size());
        throw nb::value_error(message.c_str());
    }
    return static_cast<std::uint32_t>(doorbell);
}

void copy(ShmArena &arena, std::int64_t offset, std::int64_t nbytes, std::span<const Part> parts) {
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

void write_part(ShmArena &arena, std::int64_t offset, nb::handle data) {
    raise_if_gone(arena);
    const HeldBuffer held(data);
    const Part part = held.part();
    copy(arena, offset, static_cast<std::int64_t>(part.size()), {&part, 1});
}

void ring_doorbell(ShmArena &arena, std::int64_t doorbell, std::uint64_t sequence) {
    raise_if_gone(arena);
    arena.doorbells().ring(checked(arena.doorbells(), doorbell), sequence);
}

void post(ShmArena &arena, std::int64_t offset, std::int64_t nbytes, nb::sequence parts,
          std::int64_t doorbell, std::uint64_t sequence) {
    raise_if_gone(arena);
    const std::uint32_t index = checked(arena.doorbells(), doorbell);
    std::vector<HeldBuffer> held;
    std::vector<Part> pieces;
    held.reserve(nb::len(parts));
    pieces.reserve(nb::len(parts));
    for (nb::handle part : parts) {
        held.emplace_back(part);
        pieces.push_back(held.back().part());
    }
    copy(arena, offset, nbytes, pieces);
    arena.doorbells().ring(index, sequence);
}

// Negative times count as 0.
std::chrono::nanoseconds nanoseconds(double seconds) {
    constexpr double kLongest = 1e9; // 31 years: what a steady clock can surely hold
    if (!std::isfinite(seconds))
        throw nb::value_error("a wait needs a finite timeout");
    return std::chrono::nanoseconds(static_cast<std::int64_t>(std::clamp(seconds, 0.0, kLongest) * 1e9));
}

std::size_t wait_for(ShmWaiter &waiter, const std::vector<std::pair<std::int64_t, std::uint64_t>> &pairs,
                     double timeout_s, double spin_s) {
    if (pairs.empty())
        throw nb::value_error("a wait needs at least one doorbell");
    std::vector<Target> targets;
    targets.reserve(pairs.size());
    for (const auto &[doorbell, sequence] : pairs)
        targets.push_back({checked(waiter.doorbells(), doorbell), sequence});
    const auto deadline = std::chrono::steady_clock::now() + nanoseconds(timeout_s);
    if (const auto index = waiter.doorbells().ready(targets))
        return *index; // without giving up the GIL

    for (auto spin = nanoseconds(spin_s);; spin = std::chrono::nanoseconds::zero()) {
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

// Python's buffer protocol over the data, so that views keep the mapping alive after close().
int get_buffer(PyObject *self, Py_buffer *view, int flags) {
    const auto data = nb::inst_ptr<ShmArena>(self)->data();
    return PyBuffer_FillInfo(view, self, data.data(), static_cast<Py_ssize_t>(data.size()), 0, flags);
}

PyType_Slot arena_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void *>(get_buffer)}, {0, nullptr}};

} // namespace

void register_transport(nb::module_ &module) {
    using namespace nb::literals;
    nb::class_<ShmArena>(module, "ShmArena", nb::type_slots(arena_slots))
        .def_static("file_nbytes", &ShmArena::file_nbytes, "nbytes"_a, "doorbells"_a)
        .def_static("create", &ShmArena::create, "fd"_a, "nbytes"_a, "doorbells"_a, "identity"_a)
        .def_static("open", &ShmArena::open, "fd"_a, "identity"_a)
        .def_prop_ro("nbytes", [](const ShmArena &arena) { return arena.data().size(); })
        .def_prop_ro("doorbells", [](ShmArena &arena) { return arena.doorbells().size(); })
        .def_prop_ro("gone", &ShmArena::gone)
        .def("mark_gone", &ShmArena::mark_gone)
        .def("nudge", [](ShmArena &arena) { arena.doorbells().nudge(); })
        .def(
            "sequence",
            [](ShmArena &arena, std::int64_t doorbell) {
                return arena.doorbells().sequence(checked(arena.doorbells(), doorbell));
            },
            "doorbell"_a)
        .def("write", &write_part, "offset"_a, "data"_a)
        .def("ring", &ring_doorbell, "doorbell"_a, "sequence"_a)
        .def("post", &post, "offset"_a, "nbytes"_a, "parts"_a, "doorbell"_a, "sequence"_a);

    nb::class_<ShmWaiter>(module, "ShmWaiter")
        .def(nb::init<std::shared_ptr<ShmArena>>(), "own"_a)
        .def("watch", &ShmWaiter::watch, "peer"_a, "pidfd"_a)
        .def("forget", &ShmWaiter::forget, "index"_a)
        .def("wait", &wait_for, "targets"_a, "timeout_s"_a, "spin_s"_a);
}
