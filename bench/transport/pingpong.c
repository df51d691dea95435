// The least that a TCP round trip costs: one process answers every message of another. Prints microseconds per
// round trip: median and 99th percentile.
//
//     pingpong NBYTES ROUNDS SPIN NEAR_CORE FAR_CORE       SPIN is 0 (sleep in recv) or 1 (never sleep)
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void check(int good, const char *what) {
    if (!good) {
        perror(what);
        exit(1);
    }
}

static void pin(int core) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
    check(sched_setaffinity(0, sizeof cores, &cores) == 0, "sched_setaffinity");
}

static void send_all(int fd, const char *data, size_t nbytes) {
    while (nbytes > 0) {
        const ssize_t sent = send(fd, data, nbytes, 0);
        check(sent > 0, "send");
        data += sent;
        nbytes -= (size_t)sent;
    }
}

static void receive_all(int fd, char *data, size_t nbytes, int spin) {
    while (nbytes > 0) {
        const ssize_t got = recv(fd, data, nbytes, spin ? MSG_DONTWAIT : 0);
        if (got < 0 && errno == EAGAIN)
            continue;
        check(got > 0, "recv");
        data += got;
        nbytes -= (size_t)got;
    }
}

static double now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec * 1e-3;
}

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    if (argc != 6) {
        fprintf(stderr, "usage: %s NBYTES ROUNDS SPIN NEAR_CORE FAR_CORE\n", argv[0]);
        return 2;
    }
    const size_t nbytes = strtoul(argv[1], NULL, 10);
    const int rounds = atoi(argv[2]), spin = atoi(argv[3]), one = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    check(bind(listener, (struct sockaddr *)&address, length) == 0, "bind");
    check(listen(listener, 1) == 0, "listen");
    check(getsockname(listener, (struct sockaddr *)&address, &length) == 0, "getsockname");
    char *message = calloc(1, nbytes);
    double *times = calloc((size_t)rounds, sizeof *times);
    const pid_t far = fork();
    check(far >= 0, "fork");
    if (far == 0) {
        pin(atoi(argv[5]));
        const int fd = accept(listener, NULL, NULL);
        check(fd >= 0, "accept");
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        for (int i = 0; i < rounds; ++i) {
            receive_all(fd, message, nbytes, spin);
            send_all(fd, message, nbytes);
        }
        return 0;
    }
    pin(atoi(argv[4]));
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    check(connect(fd, (struct sockaddr *)&address, length) == 0, "connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    for (int i = 0; i < rounds; ++i) {
        const double start = now_us();
        send_all(fd, message, nbytes);
        receive_all(fd, message, nbytes, spin);
        times[i] = now_us() - start;
    }
    waitpid(far, NULL, 0);
    const int warm = rounds / 10;
    qsort(times + warm, (size_t)(rounds - warm), sizeof *times, ascending);
    printf("%.3f %.3f\n", times[warm + (rounds - warm) / 2], times[warm + (int)((rounds - warm) * 0.99)]);
    return 0;
}
