// A process-wide pool for short parallel loops: helpers spin briefly for the next loop, then sleep.
#pragma once

#include <cstdint>
#include <functional>

namespace lamina {

// Calls body(index) for every index in [0, count), each once, on up to `threads` threads including the
// caller's; returns when all are done. Loops from several callers run one after another. The body must not
// throw.
void parallel_for(int threads, int64_t count, const std::function<void(int64_t)> &body);

} // namespace lamina
