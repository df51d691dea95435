// Doorbells that the device waits on and rings, so that neither a kernel launch nor the host lies between a
// message's arrival and the attention over it: waits are launched ahead, and later work in the stream starts
// when they end.
//
// A doorbell is a 64-bit sequence number in device memory (a peer's: by CUDA IPC) or pinned host memory.
// Compiled for the current GPU by transport/device/polling.py, and by nvcc in tests: so it includes no
// headers.

namespace {

using Word = unsigned long long;

// lamina.transport.device.polling.Outcome has the same numbers.
enum Outcome : unsigned { kReady = 0, kExpired = 1, kAborted = 2 };

// Acquire and release at system scope: they pair with hosts, NICs and other GPUs.
__device__ Word load_acquire(const Word *word) {
    Word value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

__device__ unsigned load_acquire(const unsigned *word) {
    unsigned value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

__device__ void store_release(Word *word, Word value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ void store_release(unsigned *word, unsigned value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

constexpr int kLooksPerAbort = 64; // the abort flag is in host memory: reading it costs a bus round trip

// Later kernels read the GPU's own word, the host its pinned one.
__device__ void fail(unsigned *failed, unsigned *outcome, Outcome why) {
    *failed = why;
    store_release(outcome, why);
}

} // namespace

// Waits until *bell is *sequence + 1 or more and then increments *sequence. Gives up after `ticks` of the
// multiprocessor's clock or when *abort is set, and writes the reason to *failed and *outcome; after that
// every wait and ring with this *failed does nothing. One thread.
extern "C" __global__ void lamina_wait(const Word *bell, Word *sequence, long long ticks,
                                       const unsigned *abort, unsigned *failed, unsigned *outcome) {
    if (*failed != kReady)
        return;
    const Word wanted = *sequence + 1;
    const long long start = clock64();
    for (int look = 1; load_acquire(bell) < wanted; ++look) {
        if (clock64() - start > ticks)
            return fail(failed, outcome, kExpired);
        if (look % kLooksPerAbort == 0 && load_acquire(abort) != 0)
            return fail(failed, outcome, kAborted);
    }
    *sequence = wanted;
}

// Increments *sequence and writes it to *bell, after all writes of earlier kernels of the stream. One thread.
extern "C" __global__ void lamina_ring(Word *bell, Word *sequence, const unsigned *failed) {
    if (*failed != kReady)
        return;
    *sequence += 1;
    __threadfence_system();
    store_release(bell, *sequence);
}
