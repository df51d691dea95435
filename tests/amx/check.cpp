// Compares matrix products by tiles with products in float64, and attention by tiles with portable attention.
// Runs in the emulated machine that run.sh starts, or on a processor with tiles.
//     check granted: tiles must multiply
//     check emulated: the same, without the negative bytes that Bochs takes for positive ones
//     check refused: makes the kernel refuse tiles; other kernels must multiply
#include "lamina/linear.h"

#include <bit>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <sched.h>
#include <string>
#include <vector>

using namespace lamina::linear;

namespace {

std::mt19937 source; // its numbers are the same everywhere, unlike those of std's distributions
int failures = 0, products = 0;
bool emulated = false;

float widen(uint16_t half) {
    return std::bit_cast<float>(static_cast<uint32_t>(half) << 16);
}

int64_t draw(int64_t least, int64_t most) {
    return least + static_cast<int64_t>(source() % static_cast<uint32_t>(most - least + 1));
}

// bfloat16 from -2 to 2.
std::vector<uint16_t> draw_halves(int64_t count) {
    std::vector<uint16_t> halves(static_cast<size_t>(count));
    for (uint16_t &half : halves)
        half = static_cast<uint16_t>(draw(0, 1) << 15 | draw(0x3c00, 0x4000));
    return halves;
}

template <class T> T *aligned(int64_t count) {
    return static_cast<T *>(std::aligned_alloc(64, (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64));
}

struct Shape {
    int64_t rows, inputs, outputs;
    int bits = 0;
    int64_t group = 0, x_group = 0;
    bool zeros = false;
};

// A product with a weight that is also known in float64 [outputs, inputs].
struct Product {
    Shape shape;
    int64_t stride = shape.inputs + 6;
    std::vector<uint16_t> x = draw_halves(shape.rows * stride), bias = draw_halves(shape.outputs), out;
    std::vector<double> weight, roughness; // roughness: of an element, what sums of codes add and subtract
    std::vector<float> scales, zeros;
    void *packed = nullptr;

    explicit Product(const Shape &given) : shape(given) {
        out.resize(static_cast<size_t>(shape.rows * shape.outputs));
        weight.resize(static_cast<size_t>(shape.outputs * shape.inputs));
        roughness.resize(weight.size());
        if (emulated && shape.x_group > 0) // Bochs 3.0 takes the signed bytes of x for unsigned ones
            for (uint16_t &half : x)
                half &= 0x7fff;
        shape.bits == 0 ? pack_halves() : pack_codes();
    }
    Product(const Product &) = delete;
    ~Product() { std::free(packed); }

    void pack_halves() {
        const auto halves = draw_halves(shape.outputs * shape.inputs);
        for (size_t i = 0; i < halves.size(); ++i)
            roughness[i] = std::abs(weight[i] = widen(halves[i]));
        auto *words = aligned<uint32_t>(packed_pairs(shape.outputs, shape.inputs));
        pack(halves.data(), shape.outputs, shape.inputs, words, 1);
        packed = words;
    }

    // See Codes in linear.h.
    void pack_codes() {
        const auto [rows, inputs, outputs, bits, group, x_group, has_zeros] = shape;
        const int64_t groups = inputs / group, panels = (outputs + kPanel - 1) / kPanel;
        scales.resize(static_cast<size_t>(panels * groups * kPanel), 1);
        zeros.resize(has_zeros ? scales.size() : 0);
        auto *bytes = aligned<uint8_t>(Codes::bytes(bits, outputs, inputs));
        std::memset(bytes, 0, static_cast<size_t>(Codes::bytes(bits, outputs, inputs)));
        for (int64_t output = 0; output < outputs; ++output)
            for (int64_t i = 0; i < inputs; ++i) {
                const int64_t panel = output / kPanel, column = output % kPanel;
                const auto at = static_cast<size_t>((panel * groups + i / group) * kPanel + column);
                if (i % group == 0) {
                    scales[at] = static_cast<float>(draw(1, 1000)) / 16000;
                    if (has_zeros)
                        zeros[at] = static_cast<float>(draw(0, 15));
                }
                const int64_t code = bits == 8 ? draw(-128, 127) : draw(0, 15);
                const double zero = has_zeros ? zeros[at] : bits == 8 ? 0 : 8;
                const auto place = static_cast<size_t>(output * inputs + i);
                weight[place] = (static_cast<double>(code) - zero) * scales[at];
                roughness[place] = std::abs(weight[place]) + 256.0 * scales[at];
                const int64_t width = bits == 8 ? kPanel : kPanel / 2, lane = column % width;
                const int64_t within = x_group > 0 ? (i / 4 * width + lane) * 4 + i % 4 : i * width + lane;
                const int64_t value = bits == 8 && x_group > 0 ? code + 128 : code;
                bytes[panel * inputs * width + within] |=
                    static_cast<uint8_t>(value << (column >= width ? 4 : 0));
            }
        packed = bytes;
    }

    // Rows [first, first + rows) into the same rows of `into`.
    void multiply_rows(int64_t first, int64_t rows, std::vector<uint16_t> &into, int threads) const {
        const Codes codes{shape.bits, shape.group, scales.data(), shape.zeros ? zeros.data() : nullptr,
                          shape.x_group};
        const Linear task{x.data() + first * stride,
                          stride,
                          packed,
                          bias.data(),
                          into.data() + first * shape.outputs,
                          rows,
                          shape.inputs,
                          shape.outputs,
                          codes};
        multiply({&task, 1}, threads);
    }

    // x, or what rounding to 8 bits makes of it, and half a step of that rounding.
    std::pair<double, double> element(int64_t row, int64_t i) const {
        const uint16_t *from = x.data() + row * stride;
        if (shape.x_group == 0)
            return {widen(from[i]), 0};
        float most = 0;
        for (int64_t k = i / shape.x_group * shape.x_group, n = 0; n < shape.x_group; ++n)
            most = std::max(most, std::abs(widen(from[k + n])));
        const float code = std::nearbyint(widen(from[i]) * (127 / most));
        return {double{code} * double{most / 127}, most / 254};
    }

    void compare() {
        for (int64_t row = 0; row < shape.rows; ++row) {
            std::vector<double> elements;
            for (int64_t i = 0; i < shape.inputs; ++i)
                elements.push_back(element(row, i).first);
            for (int64_t output = 0; output < shape.outputs; ++output) {
                double wanted = widen(bias[output]), terms = std::abs(wanted);
                for (int64_t i = 0; i < shape.inputs; ++i) {
                    wanted += elements[i] * weight[output * shape.inputs + i];
                    terms += std::abs(elements[i]) * roughness[output * shape.inputs + i];
                }
                const float got = widen(out[row * shape.outputs + output]);
                if (!(std::abs(got - wanted) <= std::abs(wanted) * 0x1p-8 + terms * 0x1p-20))
                    fail("row " + std::to_string(row) + ", output " + std::to_string(output) + ": " +
                         std::to_string(got) + " instead of " + std::to_string(wanted));
            }
        }
    }

    void fail(const std::string &what) const {
        if (++failures <= 20)
            std::printf("FAILED rows %ld inputs %ld outputs %ld bits %d group %ld x_group %ld zeros %d: %s\n",
                        shape.rows, shape.inputs, shape.outputs, shape.bits, shape.group, shape.x_group,
                        shape.zeros, what.c_str());
    }
};

void check(const Shape &shape, int threads) {
    Product product(shape);
    product.multiply_rows(0, shape.rows, product.out, threads);
    product.compare();
    ++products;
    // A row depends on no other; if x is rounded to 8 bits, not even on their number.
    const int64_t few = shape.x_group > 0 ? 15 : 16;
    if (shape.rows < few)
        return;
    auto other = product.out;
    product.multiply_rows(shape.rows - few, few, other, 1);
    if (other != product.out)
        product.fail("the last " + std::to_string(few) + " rows alone have other results");
}

void check_all(const std::vector<int64_t> &counts) {
    for (const int64_t rows : counts)
        for (const int64_t outputs : {1, 33, 72}) {
            const int threads = static_cast<int>(rows % 3) + 1;
            for (const int64_t inputs : {32, 74, 80, 288}) // 74: no tiles, because 37 pairs are prime
                check({rows, inputs, outputs}, threads);
            for (const int bits : {8, 4})
                for (const bool zeros : {false, true}) {
                    check({rows, 288, outputs, bits, 96, 0, zeros}, threads);
                    check({rows, 96, outputs, bits, 16, 0, zeros}, threads);
                    check({rows, 384, outputs, bits, 384, 128, zeros}, threads);
                    check({rows, 192, outputs, bits, 96, 48, zeros}, threads);
                    check({rows, 200, outputs, bits, 100, 100, zeros}, threads); // no tiles: 25 quads
                }
        }
    check({50, 4096, 40}, 3); // rows that are copied apart
    check({100, 1536, 70}, 3);
}

// Attention of one row or a chunk of rows, the last of a segment of bfloat16, with tiles and without.
void check_attention(const lamina::attention::Shape &shape, int32_t rows, int32_t tokens, int64_t window) {
    using namespace lamina::attention;
    const auto q = draw_halves(rows * shape.query_heads * shape.qk_dim),
               k = draw_halves(tokens * shape.kv_heads * shape.qk_dim),
               v = draw_halves(tokens * shape.kv_heads * shape.v_dim);
    std::vector<int32_t> slots;
    for (int32_t slot = tokens; slot-- > 0;)
        slots.push_back(slot);
    const int32_t query_offsets[] = {0, rows}, query_start[] = {tokens - rows}, kv_start[] = {0};
    const int64_t kv_offsets[] = {0, tokens};
    const auto heads = static_cast<size_t>(rows * shape.query_heads), size = static_cast<size_t>(shape.v_dim);
    std::vector<float> outs[2], lses[2];
    for (int tiles = 0; tiles < 2; ++tiles) {
        outs[tiles].resize(heads * size);
        lses[tiles].resize(heads);
        const Problem problem{shape,
                              {0.125f, window, 0, 0, nullptr},
                              {1, query_offsets, query_start, kv_offsets, kv_start, slots.data()},
                              ElementType::BFloat16,
                              ElementType::BFloat16,
                              q.data(),
                              k.data(),
                              v.data(),
                              nullptr,
                              nullptr,
                              outs[tiles].data(),
                              lses[tiles].data()};
        partial(problem, 1, tiles ? Path::Amx : Path::Portable);
    }
    ++products;
    for (size_t i = 0; i < outs[0].size(); ++i)
        if (!(std::abs(outs[1][i] - outs[0][i]) <= 0x1p-7) ||
            !(std::abs(lses[1][i / size] - lses[0][i / size]) <= 1e-4f)) {
            if (++failures <= 20)
                std::printf(
                    "FAILED attention of %d rows and %d tokens, heads of %ld and %ld: %f instead of %f\n",
                    rows, tokens, shape.qk_dim, shape.v_dim, outs[1][i], outs[0][i]);
            return;
        }
}

void check_attention() {
    for (const int64_t window : {0, 20})
        for (const int32_t rows : {2, 5, 40}) {
            check_attention({4, 2, 64, 64}, rows, rows + 90, window);
            check_attention({3, 1, 24, 40}, rows, rows, window);
            check_attention({8, 1, 128, 96}, rows, rows + 33, window);
        }
    for (const int32_t tokens : {1, 16, 17, 32, 33, 90})
        for (const int64_t window : {0, 20}) {
            check_attention({8, 2, 128, 64}, 1, tokens, window);
            check_attention({5, 1, 32, 96}, 1, tokens, window);
            check_attention({24, 3, 64, 64}, 1, tokens, window);
            check_attention({12, 1, 32, 32}, 1, tokens, window);
            check_attention({6, 1, 40, 24}, 1, tokens, window);
        }
}

// A signal stack too small for the state of tiles: the kernel then refuses them.
void take_small_signal_stack() {
    static char memory[8192];
    const stack_t stack{memory, 0, sizeof memory};
    if (sigaltstack(&stack, nullptr) != 0)
        std::perror("sigaltstack");
}

} // namespace

int main(int count, char **arguments) {
    const std::string mode = count > 1 ? arguments[1] : "";
    // The emulated processor cannot tell the kernel which threads use tiles: no thread may interrupt another.
    const sched_param priority{1};
    if (sched_setscheduler(0, SCHED_FIFO, &priority) != 0)
        std::perror("sched_setscheduler");
    if (mode == "refused")
        take_small_signal_stack();
    const auto error = lamina::attention::tiles_error();
    emulated = mode == "emulated";
    const bool granted = mode == "granted" || emulated;
    const bool expected = granted ? error == 0 : mode == "refused" ? error == ENOSPC : false;
    std::printf("tiles: %s\n", !error        ? "not in this processor"
                               : *error == 0 ? "granted"
                                             : std::strerror(*error));
    if (!expected)
        return 1;
    if (granted)
        check_attention();
    check_all(granted ? std::vector<int64_t>{1, 16, 17, 31, 32, 33, 40} : std::vector<int64_t>{17});
    std::printf("%s: %d products, %d failures\n", mode.c_str(), products, failures);
    return failures == 0 ? 0 : 1;
}
