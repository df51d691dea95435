// Two processes wake each other a great many times, with sleeps so long that a single lost wake fails the
// run. Prints how often each side slept.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <random>

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "lamina/transport_shm.h"

namespace {

using Clock = std::chrono::steady_clock;
using lamina::Arena;
using lamina::ShmWaiter;

constexpr std::uint64_t kRounds = 200000;
constexpr std::chrono::seconds kSleep(10);

std::shared_ptr<Arena> make_arena() {
    const int fd = memfd_create("stress", 0);
    if (ftruncate(fd, static_cast<off_t>(Arena::file_nbytes(64, 2))) != 0)
        std::exit(2);
    return Arena::create(fd, 64, 2, 1);
}

// Rings doorbell 0 with n once its own says n.
void ring_back(const std::shared_ptr<Arena> &own, Arena &sleeper) {
    std::minstd_rand random(1);
    for (std::uint64_t n = 1; n <= kRounds; ++n) {
        const lamina::Target target{0, n};
        if (!own->doorbells().spin({&target, 1}, Clock::now() + 2 * kSleep))
            std::exit(1);
        for (volatile unsigned left = random() % 1500; left > 0;)
            left = left - 1;
        if (random() % 4 == 0)
            sleeper.doorbells().ring(1, n); // not the one awaited
        sleeper.doorbells().ring(0, n);
    }
}

bool sleep_for_each(const std::shared_ptr<Arena> &own, Arena &ringer) {
    ShmWaiter waiter(own, kSleep);
    std::uint64_t sleeps = 0;
    for (std::uint64_t n = 1; n <= kRounds; ++n) {
        const lamina::Target target{0, n};
        ringer.doorbells().ring(0, n);
        const auto start = Clock::now();
        while (waiter.wait({&target, 1}, start + 2 * kSleep, {}).kind != ShmWaiter::Kind::Ready) {
            ++sleeps;
            if (Clock::now() - start >= kSleep) {
                std::printf("a wake was lost at message %llu\n", static_cast<unsigned long long>(n));
                return false;
            }
        }
    }
    std::printf("%llu sleeps in %llu waits\n", static_cast<unsigned long long>(sleeps),
                static_cast<unsigned long long>(kRounds));
    return true;
}

} // namespace

int main() {
    const auto here = make_arena();
    const auto there = make_arena();
    const pid_t child = fork();
    if (child == 0) {
        ring_back(there, *here);
        return 0;
    }
    const bool passed = sleep_for_each(here, *there);
    if (!passed)
        kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    return passed ? 0 : 1;
}
