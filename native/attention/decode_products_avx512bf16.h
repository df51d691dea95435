// Values of codes weighed for many queries at once, in a form whose sums GCC keeps in registers.
//
// An array is in registers only if every index is a constant before loops are optimised, so loops over sums
// are templates. Multiplications are assembly, which ties each sum to one register: otherwise GCC copies
// sums, and spills some between two multiplications.
#pragma once

#include "decode_words_avx512bf16.h"

namespace lamina::attention {
namespace {

constexpr int64_t kDecodeTokens = 16; // of a tile

// Calls `body` with the constants 0 to COUNT - 1.
template <int COUNT, class Body> [[gnu::always_inline]] inline void unrolled(const Body &body) {
    [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
        (body(std::integral_constant<int, I>{}), ...);
    }(std::make_integer_sequence<int, COUNT>{});
}

// Adds to sums a and b the products of x and y with one word in memory.
[[gnu::always_inline]] inline void dot_word(Floats<16> &a, Floats<16> &b, const Floats<16> &x,
                                            const Floats<16> &y, const uint32_t *word) {
    Floats<16> broadcast;
    asm volatile("vpbroadcastd %5, %2\n\tvdpbf16ps %2, %3, %0\n\tvdpbf16ps %2, %4, %1"
                 : "+v"(a), "+v"(b), "=&v"(broadcast)
                 : "v"(x), "v"(y), "m"(*word));
}

// Adds a tile's values, from `offset` in each row on, to `sums` [QUERIES][2] vectors: vectors FROM and
// FROM + 1 of words, weighed by `pairs` [QUERIES][kDecodeTokens / 2] of probabilities. Not inlined: among
// more variables, registers do not suffice.
template <class Stored, int QUERIES, int FROM, bool HALF, class Ahead>
[[gnu::noinline]] void add_two_vectors(const typename Stored::Kv *const *values, int64_t offset,
                                       const uint32_t *pairs, float *sums, Ahead &ahead) {
    using F = Floats<16>;
    constexpr int kWordsPerAsk = HALF ? 4 : 2;
    F added[QUERIES][2];
    unrolled<QUERIES>([&](auto q) __attribute__((always_inline)) {
        added[q][0] = load<F>(sums + q * 32);
        added[q][1] = load<F>(sums + q * 32 + 16);
    });
    unrolled<kDecodeTokens / 2>([&](auto w) __attribute__((always_inline)) {
        F words[2];
        interleave_values<Stored>(values[2 * w] + offset, values[2 * w + 1] + offset, FROM, HALF, words, 0);
        if (w % kWordsPerAsk == 0)
            ahead.ask_for_two();
        unrolled<QUERIES>([&](auto q) __attribute__((always_inline)) {
            dot_word(added[q][0], added[q][1], words[0], words[1], pairs + q * (kDecodeTokens / 2) + w);
        });
    });
    unrolled<QUERIES>([&](auto q) __attribute__((always_inline)) {
        store(sums + q * 32, added[q][0]);
        store(sums + q * 32 + 16, added[q][1]);
    });
}

} // namespace
} // namespace lamina::attention
