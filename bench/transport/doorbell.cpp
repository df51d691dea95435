// Round trips over two doorbells between two processes, in native code alone: what Python adds is the rest.
//
//     c++ -std=c++20 -O2 -I native/include bench/transport/doorbell.cpp native/transport/doorbell.cpp -o doorbell
//     ./doorbell ROUNDS NBYTES SPIN_NS NEAR_CORE FAR_CORE     prints p50 and p99 in nanoseconds
//
// A round trip is NBYTES copied into the other's memory and a ring, both ways.
#include "lamina/doorbell.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

namespace {

using Clock = std::chrono::steady_clock;

struct Side {
    lamina::Arrivals *arrivals;
    lamina::Doorbell *bell;
    char *arena;
    lamina::Doorbells doorbells() const { return {arrivals, {bell, 1}}; }
};

Side side(char *memory) {
    auto *arrivals = reinterpret_cast<lamina::Arrivals *>(memory);
    auto *bell = reinterpret_cast<lamina::Doorbell *>(arrivals + 1);
    return {arrivals, bell, reinterpret_cast<char *>(bell + 1)};
}

void pin(int core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    sched_setaffinity(0, sizeof set, &set);
}

void wait(const Side &own, std::uint64_t sequence, std::chrono::nanoseconds spin) {
    lamina::Doorbells bells = own.doorbells();
    const lamina::Target target{0, sequence};
    if (bells.spin({&target, 1}, Clock::now() + spin))
        return;
    for (;;) {
        const auto seen = bells.arrivals();
        if (bells.ready({&target, 1}))
            return;
        bells.sleep(seen, std::chrono::seconds(1));
    }
}

void send(const Side &own, const Side &peer, std::size_t nbytes, std::uint64_t sequence) {
    std::memcpy(peer.arena, own.arena, nbytes);
    peer.doorbells().ring(0, sequence);
}

} // namespace

int main(int argc, char **argv) {
    if (argc != 6)
        return 2;
    const auto rounds = std::strtoull(argv[1], nullptr, 10), nbytes = std::strtoull(argv[2], nullptr, 10);
    const std::chrono::nanoseconds spin(std::strtoll(argv[3], nullptr, 10));
    const std::size_t part =
        (sizeof(lamina::Arrivals) + sizeof(lamina::Doorbell) + nbytes + 4095) / 4096 * 4096;
    void *memory = mmap(nullptr, 2 * part, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return 1;
    const Side near = side(static_cast<char *>(memory)), far = side(static_cast<char *>(memory) + part);
    const pid_t child = fork();
    if (child < 0)
        return 1;
    pin(std::atoi(argv[child ? 4 : 5]));
    if (child == 0) {
        for (std::uint64_t i = 1; i <= rounds; ++i) {
            wait(far, i, spin);
            send(far, near, nbytes, i);
        }
        return 0;
    }
    std::vector<std::int64_t> times(rounds);
    for (std::uint64_t i = 1; i <= rounds; ++i) {
        const auto start = Clock::now();
        send(near, far, nbytes, i);
        wait(near, i, spin);
        times[i - 1] = std::chrono::nanoseconds(Clock::now() - start).count();
    }
    waitpid(child, nullptr, 0);
    times.erase(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(rounds / 10));
    std::sort(times.begin(), times.end());
    std::printf("%lld %lld\n", static_cast<long long>(times[times.size() / 2]),
                static_cast<long long>(times[times.size() * 99 / 100]));
}
