// The reference for memory-bound kernels: how fast this machine reads memory when it does nothing else.
#pragma once

#include <cstdint>

namespace lamina {

// Reads `bytes` bytes on `threads` threads and returns the sum of their 8-byte words (a tail of under 1 KiB a
// thread is left out).
uint64_t read_memory(const void *memory, int64_t bytes, int threads);

// Reads row slots[i] of `memory` for i in [0, count), prefetching rows, and returns the sum of their
// 8-byte words. Rows are row_bytes apart, a multiple of 64.
uint64_t read_rows(const void *memory, int64_t row_bytes, const int32_t *slots, int64_t count, int threads);

} // namespace lamina
