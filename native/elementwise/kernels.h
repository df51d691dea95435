// Kernels over a range of rows, for one vector width. Included by one source file per instruction set.
#pragma once

#include "../attention/vector_math.h"
#include "lamina/elementwise.h"

#include <cmath>

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace lamina::elementwise {

// One instruction set's kernels for one element type, over rows [begin, end).
struct Kernels {
    void (*rms_norm)(const RmsNorm &task, int64_t begin, int64_t end);
    void (*rotate)(const Rotation &task, int64_t begin, int64_t end);
    void (*gate)(const Gate &task, int64_t begin, int64_t end);
    void (*largest)(const Largest &task, int64_t begin, int64_t end);
    void (*mask)(const Masking &task, int64_t begin, int64_t end);
    void (*draw)(const Draw &task, int64_t begin, int64_t end);
};

Kernels portable_kernels(ElementType type);
Kernels avx2_kernels(ElementType type);
Kernels avx512_kernels(ElementType type);

namespace {

using namespace attention;

template <int W> struct Float32 {
    using Stored = float;
    static Floats<W> widen(const Stored *source) { return load<Floats<W>>(source); }
    static void narrow(Stored *target, Floats<W> value) { store(target, value); }
};

template <int W> struct BFloat16 {
    using Stored = uint16_t;
    using Halves = typename Vectors<W>::Halves;
    typedef uint32_t Words __attribute__((vector_size(W * 4)));

    static Floats<W> widen(const Stored *source) {
#ifdef __AVX512F__
        if constexpr (W == 16)
            return reinterpret_cast<Floats<W>>(
                reinterpret_cast<Words>(_mm512_maskz_cvtepu16_epi32(0xffff, load<__m256i>(source))) << 16);
#endif
        return reinterpret_cast<Floats<W>>(__builtin_convertvector(load<Halves>(source), Words) << 16);
    }
    static void narrow(Stored *target, Floats<W> value) {
#ifdef __AVX512BF16__
        if constexpr (W == 16)
            return store(target, _mm512_cvtneps_pbh(value));
#endif
        const Words bits = reinterpret_cast<Words>(value);
        const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        const Words nan = bits >> 16 | 0x40; // keep NaN a NaN
        store(target, __builtin_convertvector(value == value ? rounded : nan, Halves));
    }
};

template <int W> struct Float16 {
    using Stored = _Float16;
    static Floats<W> widen(const Stored *source) {
#ifdef __AVX512F__
        if constexpr (W == 16)
            return _mm512_maskz_cvtph_ps(0xffff, load<__m256i>(source));
#endif
#ifdef __F16C__
        if constexpr (W == 8)
            return _mm256_cvtph_ps(load<__m128i>(source));
#endif
        Floats<W> value;
        for (int i = 0; i < W; ++i)
            value[i] = static_cast<float>(source[i]);
        return value;
    }
    static void narrow(Stored *target, Floats<W> value) {
#ifdef __AVX512F__
        if constexpr (W == 16)
            return store(target, _mm512_maskz_cvtps_ph(0xffff, value, _MM_FROUND_TO_NEAREST_INT));
#endif
#ifdef __F16C__
        if constexpr (W == 8)
            return store(target, _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
#endif
        for (int i = 0; i < W; ++i)
            target[i] = static_cast<_Float16>(value[i]);
    }
};

// Reads, writes and rounds W elements, or the first `count` of them.
template <int W, template <int> class Element> struct Access {
    using Stored = typename Element<W>::Stored;
    using F = Floats<W>;

    [[gnu::always_inline]] static F read(const Stored *source, int64_t count) {
        if (count == W)
            return Element<W>::widen(source);
        Stored some[W] = {};
        std::memcpy(some, source, count * sizeof(Stored));
        return Element<W>::widen(some);
    }
    [[gnu::always_inline]] static void write(Stored *target, F value, int64_t count) {
        if (count == W)
            return Element<W>::narrow(target, value);
        Stored some[W];
        Element<W>::narrow(some, value);
        std::memcpy(target, some, count * sizeof(Stored));
    }
    [[gnu::always_inline]] static F round(F value) {
        if constexpr (sizeof(Stored) == 4)
            return value;
        Stored some[W];
        Element<W>::narrow(some, value);
        return Element<W>::widen(some);
    }
};

// Calls body(index, W) along `size` elements, and body(index, rest) for the remainder.
template <int W, class Body> [[gnu::always_inline]] inline void for_vectors(int64_t size, Body body) {
    int64_t place = 0;
    for (; place + W <= size; place += W)
        body(place, std::integral_constant<int64_t, W>{});
    if (place < size)
        body(place, size - place);
}

template <int W, template <int> class Element>
void norm_rows(const RmsNorm &task, int64_t begin, int64_t end) {
    using A = Access<W, Element>;
    using Stored = typename A::Stored;
    const auto *weight = static_cast<const Stored *>(task.weight);
    for (int64_t row = begin; row < end; ++row) {
        const int64_t at = row * task.width;
        const Stored *x = static_cast<const Stored *>(task.x) + at;
        Stored *out = static_cast<Stored *>(task.out) + at;
        Floats<W> squares{};
        if (task.residual) {
            const Stored *residual = static_cast<const Stored *>(task.residual) + at;
            Stored *sum = static_cast<Stored *>(task.sum) + at;
            for_vectors<W>(task.width, [&](int64_t i, auto count) {
                const Floats<W> value = A::round(A::read(x + i, count) + A::read(residual + i, count));
                A::write(sum + i, value, count);
                squares += value * value;
            });
            x = sum;
        } else {
            for_vectors<W>(task.width, [&](int64_t i, auto count) {
                const Floats<W> value = A::read(x + i, count);
                squares += value * value;
            });
        }
        const float mean = horizontal_sum<W>(squares) / static_cast<float>(task.width);
        const float scale = 1.0f / std::sqrt(mean + task.epsilon);
        for_vectors<W>(task.width, [&](int64_t i, auto count) {
            Floats<W> value = A::read(x + i, count) * scale;
            if (task.round_before_weight)
                value = A::round(value);
            A::write(out + i, value * (A::read(weight + i, count) + task.offset), count);
        });
    }
}

template <int W, template <int> class Element>
void rotate_rows(const Rotation &task, int64_t begin, int64_t end) {
    using A = Access<W, Element>;
    using Stored = typename A::Stored;
    const int64_t half = task.rotary_dim / 2;
    for (int64_t row = begin; row < end; ++row) {
        const Stored *cosines = static_cast<const Stored *>(task.cosines) + row * task.rotary_dim;
        const Stored *sines = static_cast<const Stored *>(task.sines) + row * task.rotary_dim;
        for (int64_t head = 0; head < task.heads; ++head) {
            const Stored *x =
                static_cast<const Stored *>(task.x) + row * task.row_stride + head * task.head_stride;
            Stored *out = static_cast<Stored *>(task.out) + (row * task.heads + head) * task.dim;
            for_vectors<W>(half, [&](int64_t i, auto count) {
                const int64_t j = i + half;
                const Floats<W> a = A::read(x + i, count), b = A::read(x + j, count);
                const Floats<W> low =
                    A::round(a * A::read(cosines + i, count)) - A::round(b * A::read(sines + i, count));
                const Floats<W> high =
                    A::round(b * A::read(cosines + j, count)) + A::round(a * A::read(sines + j, count));
                A::write(out + i, low, count);
                A::write(out + j, high, count);
            });
            std::memcpy(out + task.rotary_dim, x + task.rotary_dim,
                        (task.dim - task.rotary_dim) * sizeof(Stored));
        }
    }
}

template <int W> [[gnu::always_inline]] inline Floats<W> silu(Floats<W> x) {
    return x / (1.0f + exponential<W>(minimum(-x, broadcast<W>(88.0f))));
}

template <int W> [[gnu::always_inline]] inline Floats<W> gelu_tanh(Floats<W> x) {
    return 0.5f * x * (1.0f + hyperbolic_tangent<W>(0.7978845608f * (x + 0.044715f * x * x * x)));
}

template <int W, template <int> class Element> void gate_rows(const Gate &task, int64_t begin, int64_t end) {
    using A = Access<W, Element>;
    using Stored = typename A::Stored;
    const auto each_row = [&](auto activate) {
        for (int64_t row = begin; row < end; ++row) {
            const Stored *gate = static_cast<const Stored *>(task.gate) + row * task.gate_stride;
            const Stored *up = static_cast<const Stored *>(task.up) + row * task.up_stride;
            Stored *out = static_cast<Stored *>(task.out) + row * task.width;
            for_vectors<W>(task.width, [&](int64_t i, auto count) {
                const Floats<W> activated = A::round(activate(A::read(gate + i, count)));
                A::write(out + i, activated * A::read(up + i, count), count);
            });
        }
    };
    if (task.activation == Activation::Silu)
        each_row([](Floats<W> x) { return silu<W>(x); });
    else
        each_row([](Floats<W> x) { return gelu_tanh<W>(x); });
}

// Two passes over a row, which the cache holds: its largest value, then the first index of it.
template <int W, template <int> class Element>
void largest_rows(const Largest &task, int64_t begin, int64_t end) {
    using A = Access<W, Element>;
    using Stored = typename A::Stored;
    const int64_t whole = task.width / W * W;
    for (int64_t row = begin; row < end; ++row) {
        const Stored *x = static_cast<const Stored *>(task.x) + row * task.stride;
        const auto one = [&](int64_t i) { return A::read(x + i, 1)[0]; };
        Floats<W> most = broadcast<W>(-kInfinity), sum{};
        for (int64_t i = 0; i < whole; i += W) {
            const Floats<W> value = A::read(x + i, W);
            most = maximum(most, value);
            sum += value == value ? Floats<W>{} : value;
        }
        float largest = horizontal_maximum<W>(most), nan = horizontal_sum<W>(sum);
        for (int64_t i = whole; i < task.width; ++i) {
            largest = std::max(largest, one(i));
            nan += one(i) == one(i) ? 0.0f : one(i);
        }
        int64_t first = 0;
        while (first < whole && !any<W>(A::read(x + first, W) == largest))
            first += W;
        while (first < task.width - 1 && one(first) != largest)
            ++first;
        task.values[row] = nan == nan ? largest : nan;
        task.indices[row] = std::min(first, task.width - 1); // where a NaN hides the largest, any index
    }
}

template <int W, template <int> class Element>
void mask_rows(const Masking &task, int64_t begin, int64_t end) {
    using Stored = typename Element<W>::Stored;
    constexpr int64_t kWord = 32;
    Stored least[W];
    Element<W>::narrow(least, broadcast<W>(-kInfinity));
    for (int64_t row = begin; row < end; ++row) {
        const Stored *x = static_cast<const Stored *>(task.x) + row * task.stride;
        const uint32_t *bits = task.bits + row * ((task.width + kWord - 1) / kWord);
        Stored *out = static_cast<Stored *>(task.out) + row * task.width;
        for (int64_t i = 0; i < task.width; i += kWord, ++bits) {
            const int64_t count = std::min(kWord, task.width - i);
            if (*bits == 0)
                std::fill_n(out + i, count, least[0]);
            else
                for (int64_t lane = 0; lane < count; ++lane)
                    out[i + lane] = *bits >> lane & 1 ? x[i + lane] : least[0];
        }
    }
}

// The step of splitmix64's counter, and 32 bits of its output in place of the counter, or of each in a
// vector.
constexpr uint64_t kGolden = 0x9e3779b97f4a7c15;
template <class Counter> [[gnu::always_inline]] inline void hash(Counter &z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    z = (z ^ (z >> 31)) >> 32;
}

constexpr double kMostNoise = 22.9; // of h = 0

inline double gumbel(uint64_t h) {
    return -std::log(-std::log1p(-(static_cast<double>(h) + 0.5) * 0x1p-32));
}

// Only tokens that may win get exact noise. -log(1 - u) >= u, so a token whose u exceeds
// e^(its score without noise - the best score) loses; a few tokens of a row pass, whatever the distribution.
template <int W, template <int> class Element> void draw_rows(const Draw &task, int64_t begin, int64_t end) {
    using A = Access<W, Element>;
    using Stored = typename A::Stored;
    using Counters = typename Vectors<W>::Counters;
    constexpr float kSlack = 1.001f; // beyond the rounding of the exponential and of its argument
    Counters lanes;
    for (int lane = 0; lane < W; ++lane)
        lanes[lane] = (lane + 1) * kGolden;
    for (int64_t row = begin; row < end; ++row) {
        const Stored *logits = static_cast<const Stored *>(task.logits) + task.places[row] * task.stride;
        const float highest = task.highest[row], least = task.least[row];
        const double temperature = task.temperature[row];
        const float inverse = 1.0f / task.temperature[row];
        const uint64_t key = task.keys[row];
        int64_t &token = task.tokens[row];
        uint64_t first = key + (token + 1) * kGolden;
        hash(first);
        double best = gumbel(first);
        float floor = least, best_float = 0;
        const auto found = [&] {
            best_float = static_cast<float>(best);
            const double bound = highest + temperature * (best - kMostNoise);
            floor = std::max(least, std::nextafter(static_cast<float>(bound), -kInfinity));
        };
        found();
        for_vectors<W>(task.width, [&](int64_t i, auto count) {
            const Floats<W> logit = A::read(logits + i, count);
            if (!any<W>(logit >= floor))
                return;
            Counters h = lanes + (key + i * kGolden);
            hash(h);
            const Ints<W> coarse = __builtin_convertvector(h >> 8, Ints<W>);
            const Floats<W> u = __builtin_convertvector(coarse, Floats<W>) * 0x1p-24f; // rounded down
            const Floats<W> most = kSlack * exponential<W>((logit - highest) * inverse - best_float);
            if (!any<W>(u <= most))
                return;
            for (int64_t lane = 0; lane < count; ++lane) {
                if (u[lane] > most[lane] || logit[lane] < least)
                    continue;
                const double score =
                    (static_cast<double>(logit[lane]) - highest) / temperature + gumbel(h[lane]);
                if (score > best || (score == best && i + lane < token)) {
                    best = score;
                    token = i + lane;
                    found();
                }
            }
        });
    }
}

template <int W, template <int> class Element> Kernels kernels_of() {
    return {norm_rows<W, Element>,    rotate_rows<W, Element>, gate_rows<W, Element>,
            largest_rows<W, Element>, mask_rows<W, Element>,   draw_rows<W, Element>};
}

template <int W> Kernels kernels(ElementType type) {
    switch (type) {
    case ElementType::Float32:
        return kernels_of<W, Float32>();
    case ElementType::Float16:
        return kernels_of<W, Float16>();
    case ElementType::BFloat16:
        return kernels_of<W, BFloat16>();
    case ElementType::Int8: // codes are only of K and V
    case ElementType::Fp8:
        break;
    }
    __builtin_unreachable();
}

} // namespace
} // namespace lamina::elementwise
