// Doorbells that the device waits on and rings, so that neither a kernel launch nor the host lies between a
// message's arrival and the attention over it: waits are launched ahead, and later work in the stream starts
// when they end.
//
// A doorbell is a 64-bit sequence number in device memory (a peer's: by CUDA IPC) or pinned host memory.
// Compiled for the current GPU by transport/device/polling.py, and by nvcc in tests: so it includes no
// headers.
//
// lamina_wait and lamina_ring know a doorbell alone; lamina_receive and its followers know messages in slots
// (transport/device/slots.py, dataplane/channel.py).

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

namespace {

constexpr int kSlots = 2;        // slots.SLOTS
constexpr int kHeaderWords = 8;  // slots.HEADER_WORDS
constexpr int kCreditWord = 6;   // slots.CREDIT_WORD
constexpr int kNumberShift = 48; // where the low bits of the doorbell's number are in a header's first word
constexpr int kPlaceShift = 16;  // slots.PLACE_SHIFT, of a byte
constexpr Word kInInbox = 2;     // slots.IN_INBOX

// slots.RECORD, and what lamina_receive leaves for the kernels behind it.
struct Record {
    Word header[kHeaderWords];
    Word number, slot, found_ns, done_ns;
};

// What a peer writes into host memory or an inbox must not come from a cache of this GPU.
__device__ uint4 load_peer(const uint4 *from) {
    uint4 value;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(from)
                 : "memory");
    return value;
}

__device__ Word nanoseconds() {
    Word value;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
    return value;
}

__device__ long long first_thread() {
    return static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
}

__device__ long long all_threads() {
    return static_cast<long long>(gridDim.x) * blockDim.x;
}

} // namespace

// Waits until one of two slots has the message `stamp`: the slot's doorbell is at its floor or above, and the
// first word of its header has the low bits of the doorbell's number, wherever its body is. So a message is
// not mistaken for another one of its slot, not even while that is being written. Leaves the header, the
// number and the slot in *found.
//
// Gives up when host[0], the abort flag, is set, or host[1] has not changed for `ticks` of the
// multiprocessor's clock. After that, all kernels here with this *failed do nothing. One thread.
extern "C" __global__ void lamina_receive(const Word *slot0, const Word *slot1, const Word *bell0,
                                          const Word *bell1, Word floor0, Word floor1, Word stamp,
                                          long long ticks, const unsigned *host, unsigned *failed,
                                          unsigned *outcome, Record *found) {
    if (*failed != kReady)
        return;
    const Word *slots[kSlots] = {slot0, slot1};
    const Word *bells[kSlots] = {bell0, bell1};
    const Word floors[kSlots] = {floor0, floor1};
    unsigned beat = load_acquire(host + 1);
    long long start = clock64();
    for (int look = 1;; ++look) {
        for (int slot = 0; slot < kSlots; ++slot) {
            const Word number = load_acquire(bells[slot]);
            if (number < floors[slot] || (load_acquire(slots[slot]) & ~(Word(0xff) << kPlaceShift)) !=
                                             (stamp | (number & 0xffff) << kNumberShift))
                continue;
            for (int word = 0; word < kHeaderWords; ++word)
                found->header[word] = load_acquire(slots[slot] + word);
            found->number = number;
            found->slot = slot;
            found->found_ns = nanoseconds();
            return;
        }
        if (look % kLooksPerAbort != 0)
            continue;
        if (load_acquire(host) != 0)
            return fail(failed, outcome, kAborted);
        if (const unsigned now = load_acquire(host + 1); now != beat) {
            beat = now;
            start = clock64();
        } else if (clock64() - start > ticks) {
            return fail(failed, outcome, kExpired);
        }
    }
}

// Copies `nbytes` of the body that belongs to the header that lamina_receive has found, and is behind it or
// in the inbox, to memory of this stream.
extern "C" __global__ void lamina_take_in(const char *slot0, const char *slot1, const char *inbox0,
                                          const char *inbox1, const Record *found, const unsigned *failed,
                                          char *to, long long nbytes) {
    if (*failed != kReady)
        return;
    const bool first = found->slot == 0, inside = (found->header[0] >> kPlaceShift & 0xff) == kInInbox;
    const char *from =
        inside ? (first ? inbox0 : inbox1) : (first ? slot0 : slot1) + sizeof(Word) * kHeaderWords;
    const long long vectors = nbytes / sizeof(uint4), done = vectors * sizeof(uint4);
    for (long long i = first_thread(); i < vectors; i += all_threads())
        reinterpret_cast<uint4 *>(to)[i] = load_peer(reinterpret_cast<const uint4 *>(from) + i);
    for (long long i = done + first_thread(); i < nbytes; i += all_threads())
        to[i] = *static_cast<const volatile char *>(from + i);
}

// Copies a part of an answer, `words` of 4 bytes, to a peer's slot or inbox.
extern "C" __global__ void lamina_give_out(const unsigned *from, unsigned *to, long long words,
                                           const unsigned *failed) {
    if (*failed != kReady)
        return;
    const bool aligned = (reinterpret_cast<Word>(from) | reinterpret_cast<Word>(to)) % sizeof(uint4) == 0;
    const long long vectors = aligned ? words / 4 : 0;
    for (long long i = first_thread(); i < vectors; i += all_threads())
        reinterpret_cast<uint4 *>(to)[i] = reinterpret_cast<const uint4 *>(from)[i];
    for (long long i = 4 * vectors + first_thread(); i < words; i += all_threads())
        to[i] = from[i];
}

// Writes an answer's header, which gives back the slot of the received message (a doorbell's number grows by
// `pieces` with each use of its slot); then the host's record, then the doorbell. One thread.
extern "C" __global__ void lamina_answer(const Record *found, Word word0, Word word1, Word word2, Word word3,
                                         Word word4, Word word5, Word *slot, Word *bell, Word number,
                                         Word pieces, const unsigned *failed, Record *record) {
    if (*failed != kReady)
        return;
    const Word header[kCreditWord] = {word0, word1, word2, word3, word4, word5};
    for (int word = 0; word < kCreditWord; ++word)
        slot[word] = header[word];
    for (int word = 0; word < kSlots; ++word)
        slot[kCreditWord + word] = 0; // an earlier number than the peer knows changes nothing
    slot[kCreditWord + found->slot] = (found->number - 1) / pieces + 1;
    for (int word = 0; word < kHeaderWords; ++word)
        record->header[word] = found->header[word];
    record->number = found->number;
    record->slot = found->slot;
    record->found_ns = found->found_ns;
    __threadfence_system();
    store_release(&record->done_ns, nanoseconds());
    store_release(bell, number);
}
