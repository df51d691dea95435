// Two processes wake each other a great many times, with sleeps so long that a single lost wake fails the
// run. Prints how often each side really slept.
#include <cstdio>
#include <cstdlib>
#include <random>

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "lamina/doorbell.h"

namespace {

constexpr std::uint64_t kRounds = 30000;
constexpr std::chrono::seconds kSleep(10);

struct Side {
    lamina::Arrivals arrivals;
    lamina::Doorbell bells[2]; // the second rings at random: arrivals that are not the awaited one
};

lamina::Doorbells doorbells(Side &side) {
    return {&side.arrivals, side.bells};
}

void await(lamina::Doorbells bells, std::uint64_t sequence, long &slept) {
    const lamina::Target target{0, sequence};
    for (;;) {
        const std::uint32_t seen = bells.arrivals();
        if (bells.ready({&target, 1}))
            return;
        const auto start = std::chrono::steady_clock::now();
        bells.sleep(seen, kSleep);
        ++slept;
        if (std::chrono::steady_clock::now() - start >= kSleep) {
            std::printf("a wake was lost at message %llu\n", static_cast<unsigned long long>(sequence));
            std::exit(1);
        }
    }
}

void play(Side &own, Side &peer, unsigned seed, bool serves) {
    std::minstd_rand random(seed);
    const auto pause = [&random] { // so that the two meet at every point of ring and wait
        for (volatile unsigned left = random() % 20000; left > 0;)
            left = left - 1;
    };
    long slept = 0;
    for (std::uint64_t n = 1; n <= kRounds; ++n) {
        if (!serves)
            await(doorbells(own), n, slept);
        if (random() % 4 == 0)
            doorbells(peer).ring(1, n);
        pause();
        doorbells(peer).ring(0, n);
        pause();
        if (serves)
            await(doorbells(own), n, slept);
    }
    std::printf("slept %ld times in %llu waits\n", slept, static_cast<unsigned long long>(kRounds));
}

} // namespace

int main() {
    void *shared = mmap(nullptr, 2 * sizeof(Side), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        return 2;
    auto *sides = static_cast<Side *>(shared);
    const pid_t child = fork();
    if (child == 0) {
        play(sides[1], sides[0], 2, false);
        return 0;
    }
    play(sides[0], sides[1], 1, true);
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
