// The yardstick of memory-bound kernels: how fast this machine reads memory when it does nothing else.
#pragma once

#include <cstdint>

namespace lamina {

// Reads `bytes` bytes on `threads` threads and returns the sum of their 8-byte words (a tail of under 1 KiB a
// thread is left out).
uint64_t read_memory(const void *memory, int64_t bytes, int threads);

} // namespace lamina
