// Bindings of shared-memory arenas and of the wait on their doorbells.
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
        if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_C_CONTIGUOUS) != 0)
            throw nb::python_error();
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

void check_doorbell(ShmArena &arena, std::size_t doorbell) {
    if (doorbell >= arena.doorbells().size())
        throw nb::value_error(("doorbell " + std::to_string(doorbell) + " of an arena with " +
                               std::to_string(arena.doorbells().size()))
                                  .c_str());
}

void write_parts(ShmArena &arena, std::size_t offset, std::size_t nbytes, nb::sequence parts) {
    raise_if_gone(arena);
    std::vector<HeldBuffer> held;
    std::vector<Part> pieces;
    std::size_t total = 0;
    for (nb::handle part : parts) {
        held.emplace_back(part);
        pieces.push_back(held.back().part());
        total += pieces.back().size();
    }
    if (total < kReleaseNbytes) {
        arena.write(offset, nbytes, pieces);
    } else {
        nb::gil_scoped_release release;
        arena.write(offset, nbytes, pieces);
    }
}

void ring_doorbell(ShmArena &arena, std::size_t doorbell, std::uint64_t sequence) {
    raise_if_gone(arena);
    check_doorbell(arena, doorbell);
    arena.doorbells().ring(doorbell, sequence);
}

void post(ShmArena &arena, std::size_t offset, std::size_t nbytes, nb::sequence parts, std::size_t doorbell,
          std::uint64_t sequence) {
    check_doorbell(arena, doorbell);
    write_parts(arena, offset, nbytes, parts);
    arena.doorbells().ring(doorbell, sequence);
}

std::chrono::nanoseconds nanoseconds(double seconds) {
    constexpr double kLongest = 1e9; // 31 years: what a steady clock can surely hold
    if (!(seconds >= 0 && seconds <= kLongest))
        throw nb::value_error("give a time from 0 to 1e9 seconds");
    return std::chrono::nanoseconds(static_cast<std::int64_t>(seconds * 1e9));
}

std::size_t wait_for(ShmWaiter &waiter, const std::vector<std::pair<std::uint32_t, std::uint64_t>> &pairs,
                     double timeout_s, double spin_s) {
    std::vector<Target> targets;
    targets.reserve(pairs.size());
    for (const auto &[doorbell, sequence] : pairs) {
        if (doorbell >= waiter.doorbells().size())
            throw nb::value_error(("no doorbell " + std::to_string(doorbell)).c_str());
        targets.push_back({doorbell, sequence});
    }
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
        .def_static("create", &ShmArena::create, "fd"_a, "nbytes"_a, "doorbells"_a)
        .def_static("open", &ShmArena::open, "fd"_a)
        .def_prop_ro("nbytes", [](const ShmArena &arena) { return arena.data().size(); })
        .def_prop_ro("doorbells", [](ShmArena &arena) { return arena.doorbells().size(); })
        .def_prop_ro("gone", &ShmArena::gone)
        .def("mark_gone", &ShmArena::mark_gone)
        .def("nudge", [](ShmArena &arena) { arena.doorbells().nudge(); })
        .def(
            "sequence",
            [](ShmArena &arena, std::size_t doorbell) {
                check_doorbell(arena, doorbell);
                return arena.doorbells().sequence(doorbell);
            },
            "doorbell"_a)
        .def("write", &write_parts, "offset"_a, "nbytes"_a, "parts"_a)
        .def("ring", &ring_doorbell, "doorbell"_a, "sequence"_a)
        .def("post", &post, "offset"_a, "nbytes"_a, "parts"_a, "doorbell"_a, "sequence"_a);

    nb::class_<ShmWaiter>(module, "ShmWaiter")
        .def(nb::init<std::shared_ptr<ShmArena>>(), "own"_a)
        .def("watch", &ShmWaiter::watch, "peer"_a, "pidfd"_a)
        .def("forget", &ShmWaiter::forget, "index"_a)
        .def("wait", &wait_for, "targets"_a, "timeout_s"_a, "spin_s"_a);
}
