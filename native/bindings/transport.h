// What the bindings of all transports share.
#pragma once

#include <chrono>
#include <cstdint>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "lamina/arena.h"

// Copies of at least this size let other Python threads run; below it, releasing the GIL costs more than it
// gains.
inline constexpr std::size_t kReleaseNbytes = 256 * 1024;

// For signatures alone: any object that exports the buffer protocol. Type checkers know that of NumPy arrays
// only from Python 3.12 on.
struct Buffer;
using BufferHandle = nanobind::typed<nanobind::handle, Buffer>;
using BufferSequence = nanobind::typed<nanobind::sequence, BufferHandle>;

template <> struct nanobind::detail::type_caster<Buffer> {
    static constexpr auto Name = const_name("typing_extensions.Buffer | ndarray[dtype=generic]");
};

// A Python buffer, held while it is read.
class HeldBuffer {
public:
    // Raises TypeError if it is not a buffer, ValueError if it is not C-contiguous.
    explicit HeldBuffer(nanobind::handle object);
    ~HeldBuffer() { PyBuffer_Release(&buffer_); } // does nothing once moved from
    HeldBuffer(HeldBuffer &&other) noexcept : buffer_(std::exchange(other.buffer_, Py_buffer{})) {}
    HeldBuffer &operator=(HeldBuffer &&) = delete;

    lamina::Part part() const {
        return {static_cast<const std::byte *>(buffer_.buf), static_cast<std::size_t>(buffer_.len)};
    }

private:
    Py_buffer buffer_{};
};

// The parts of a message, held while they are read.
class HeldParts {
public:
    explicit HeldParts(nanobind::sequence parts);
    std::span<const lamina::Part> parts() const { return pieces_; }

private:
    std::vector<HeldBuffer> held_;
    std::vector<lamina::Part> pieces_;
};

// The doorbell's index, once it is known to be one of `count`. Raises ValueError.
std::uint32_t checked_doorbell(std::int64_t doorbell, std::size_t count);

// Negative times count as 0. Raises ValueError unless finite.
std::chrono::nanoseconds to_nanoseconds(double seconds);

// The targets of a wait, checked. Raises ValueError.
std::vector<lamina::Target> to_targets(const std::vector<std::pair<std::int64_t, std::uint64_t>> &pairs,
                                       const lamina::Doorbells &doorbells);
