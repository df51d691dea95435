// Vector types and functions on compiler vector extensions. Included by one source file per instruction set;
// everything is in an anonymous namespace so that no two instruction sets share a function's code.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace lamina::attention {
namespace {

template <int W> struct Vectors {
    typedef float Floats __attribute__((vector_size(W * 4)));
    typedef int32_t Ints __attribute__((vector_size(W * 4)));
    typedef uint16_t Halves __attribute__((vector_size(W * 2)));
    typedef int8_t Bytes __attribute__((vector_size(W)));
    typedef uint64_t Counters __attribute__((vector_size(W * 8)));
};
template <int W> using Floats = typename Vectors<W>::Floats;
template <int W> using Ints = typename Vectors<W>::Ints;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <class V, class T> inline V load(const T *source) {
    V value;
    std::memcpy(&value, source, sizeof(V));
    return value;
}

template <class V, class T> inline void store(T *target, const V &value) {
    std::memcpy(target, &value, sizeof(V));
}

template <int W> inline Floats<W> broadcast(float value) {
    return value - Floats<W>{};
}

// Comparisons keep NaN in the first argument.
template <class V> inline V minimum(const V &value, const V &bound) {
    return bound < value ? bound : value;
}
template <class V> inline V maximum(const V &value, const V &bound) {
    return bound > value ? bound : value;
}

// Combines all elements by a butterfly of exchanges at distance S.
template <int W, int S, class Combine, int... I>
inline float reduce(Floats<W> value, Combine combine, std::integer_sequence<int, I...> lanes) {
    value = combine(value, __builtin_shufflevector(value, value, (I ^ S)...));
    if constexpr (S > 1)
        return reduce<W, S / 2>(value, combine, lanes);
    return value[0];
}

template <int W> inline float horizontal_sum(const Floats<W> &value) {
    return reduce<W, W / 2>(
        value, [](Floats<W> a, Floats<W> b) { return a + b; }, std::make_integer_sequence<int, W>{});
}

template <int W> inline float horizontal_maximum(const Floats<W> &value) {
    return reduce<W, W / 2>(
        value, [](Floats<W> a, Floats<W> b) { return maximum(a, b); }, std::make_integer_sequence<int, W>{});
}

// Whether any element of a comparison's result is set.
template <int W, class Mask> inline bool any(const Mask &mask) {
    uint64_t words[sizeof(Mask) / 8], seen = 0;
    std::memcpy(words, &mask, sizeof(Mask));
    for (const uint64_t word : words)
        seen |= word;
    return seen != 0;
}

// Whether all elements are at most `bound`.
template <int W> inline bool within(const Floats<W> &value, float bound) {
#ifdef __AVX512F__
    if constexpr (W == 16)
        return _mm512_cmp_ps_mask(value, _mm512_set1_ps(bound), _CMP_NLE_UQ) == 0;
#endif
    return horizontal_maximum<W>(value) <= bound;
}

constexpr float kLog2E = 1.44269504088896341f;

// 2^x to 3 ulp, in half the operations of e^x, for x < 128 (2^-126 or less below -126); NaN stays NaN.
template <int W> [[gnu::always_inline]] inline Floats<W> power_of_two(Floats<W> x) {
    using F = Floats<W>;
#ifdef __AVX512DQ__
    if constexpr (W == 16) { // scalef takes the part of x that reduce leaves, infinities included
        const F r = _mm512_maskz_reduce_ps(0xffff, x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
        F p = r * 1.867130050e-3f + 9.017030708e-3f;
        p = p * r + 5.579991266e-2f;
        p = p * r + 2.401644439e-1f;
        p = p * r + 6.931512952e-1f;
        p = p * r + 1.0f;
        return _mm512_maskz_scalef_ps(0xffff, p, x);
    }
#endif
    x = maximum(x, broadcast<W>(-126.0f));
    constexpr float magic = 12582912.0f; // 1.5 * 2^23: adding it rounds to an integer
    const F n = (x + magic) - magic;
    const F r = x - n;
    F p = r * 1.326472690e-3f + 9.671512661e-3f;
    p = p * r + 5.550733744e-2f;
    p = p * r + 2.402224208e-1f;
    p = p * r + 6.931469776e-1f;
    p = p * r + 1.0f;
    const Ints<W> exponent = __builtin_convertvector(n, Ints<W>) << 23;
    return reinterpret_cast<F>(reinterpret_cast<Ints<W>>(p) + exponent);
}

// e^x to 2 ulp for x <= 88 (0 below -87.3); NaN stays NaN.
template <int W> [[gnu::always_inline]] inline Floats<W> exponential(Floats<W> x) {
    using F = Floats<W>;
    const auto underflow = x < -87.3f;
    x = maximum(x, broadcast<W>(-87.3f));
    constexpr float magic = 12582912.0f; // 1.5 * 2^23: adding it rounds to an integer
    const F biased = x * 1.44269504088896341f + magic;
    const F n = biased - magic;
    const F r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    F p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const Ints<W> exponent = __builtin_convertvector(n, Ints<W>) << 23;
    const F result = reinterpret_cast<F>(reinterpret_cast<Ints<W>>(p) + exponent);
    return underflow ? F{} : result;
}

// tanh(x) to 3 ulp: a polynomial near 0, where 1 - 2 / (e^2x + 1) would cancel.
template <int W> inline Floats<W> hyperbolic_tangent(Floats<W> x) {
    using F = Floats<W>;
    const F magnitude = x < 0.0f ? -x : x;
    const F e = exponential<W>(-2.0f * magnitude);
    const F large = (1.0f - e) / (1.0f + e);
    const F z = x * x;
    F p = z * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    const F small = p * z * x + x;
    return magnitude < 0.625f ? small : (x < 0.0f ? -large : large);
}

// Swaps the off-diagonal blocks of size S of a pair of rows.
template <int W, int S, class V, int... I>
inline void exchange(V &a, V &b, std::integer_sequence<int, I...>) {
    const V low = __builtin_shufflevector(a, b, ((I & S) ? W + I - S : I)...);
    b = __builtin_shufflevector(a, b, ((I & S) ? W + I : I + S)...);
    a = low;
}

// Transposes a W x W block of 4-byte words in registers.
template <int W, int S = 1, class V> inline void transpose(V (&rows)[W]) {
    for (int i = 0; i < W; ++i)
        if (!(i & S))
            exchange<W, S>(rows[i], rows[i + S], std::make_integer_sequence<int, W>{});
    if constexpr (2 * S < W)
        transpose<W, 2 * S>(rows);
}

} // namespace
} // namespace lamina::attention
