// Two tiles of rows times two of outputs: up to 32 rows of x times a panel. A panel's pairs of bfloat16, and
// its quads of 8 bits, lie as a tile holds them; other codes are widened a step at a time.
#include "codes_avx512.h"
#include "quads.h"
#include "tiles.h"

namespace lamina::linear {
namespace {

constexpr int64_t kMostRows = 2 * kTileRows;
constexpr int64_t kDenseRows = 256;         // of x, whose sums are kept while parts of a panel pass
constexpr int64_t kPartWords = 128;         // of a panel, which stay in a core's first cache while rows pass
constexpr int64_t kPartedWords = 512;       // of a panel at most, whose sums cost less than reading it again
constexpr int64_t kDenseBytes = 768 * 1024; // of x, for which reading a panel again costs less
constexpr int64_t kWord = 4;                // bytes of a pair or a quad
constexpr int64_t kPanelWord = kPanel * kWord; // bytes of a panel's pairs or quads of the same inputs
using Sums = float[kMostRows][kPanel];         // with quads, of int32
using Step = uint32_t[kTileWords][kPanel];

// Tiles 0 to 3 hold sums, 4 and 5 rows of x, 6 and 7 the halves of a panel.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// The compiler must know that these read memory, which GCC 12 does not know of its intrinsics.
void set_shapes(int64_t rows, int64_t words) {
    const int64_t first = std::min(rows, kTileRows), second = rows - first, whole = kTileRows * kWord;
    TileShapes shapes;
    const auto shape = [&](int tile, int64_t tile_rows, int64_t bytes) {
        shapes.rows[tile] = static_cast<uint8_t>(tile_rows);
        shapes.row_bytes[tile] = static_cast<uint16_t>(tile_rows > 0 ? bytes : 0);
    };
    for (int half = 0; half < 2; ++half) {
        shape(half, first, whole);
        shape(2 + half, second, whole);
        shape(6 + half, words, whole);
    }
    shape(4, first, words * kWord);
    shape(5, second, words * kWord);
    asm volatile("ldtilecfg %0" ::"m"(shapes));
}

template <int TILE> void load_tile(const uint8_t *from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
}

// Loads a row of tiles of sums.
template <int FIRST> void load_sums(const float *sums) {
    load_tile<FIRST>(reinterpret_cast<const uint8_t *>(sums), kPanelWord);
    load_tile<FIRST + 1>(reinterpret_cast<const uint8_t *>(sums + kPanel / 2), kPanelWord);
}

template <bool QUADS, int SUMS, int X, int WEIGHT> void multiply_tiles() {
    if constexpr (QUADS)
        asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(X), "i"(WEIGHT));
    else
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(X), "i"(WEIGHT));
}

// Sums up `words` words of each row of x times those of a panel, of which next() returns `step` at a time.
// `adds`: to what the sums are.
template <bool QUADS, class Next>
void sum_words(const uint8_t *x, int64_t x_stride, int64_t rows, int64_t words, int64_t step, Next next,
               float (*sums)[kPanel], bool adds = false) {
    const uint8_t *second = x + kTileRows * x_stride;
    const bool two = rows > kTileRows;
    if (adds) {
        load_sums<0>(sums[0]);
        if (two)
            load_sums<2>(sums[kTileRows]);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        if (two) {
            _tile_zero(2);
            _tile_zero(3);
        }
    }
    for (int64_t w = 0; w < words; w += step, x += step * kWord, second += step * kWord) {
        const uint8_t *weight = next();
        load_tile<6>(weight, kPanelWord);
        load_tile<7>(weight + kPanelWord / 2, kPanelWord);
        load_tile<4>(x, x_stride);
        multiply_tiles<QUADS, 0, 4, 6>();
        multiply_tiles<QUADS, 1, 4, 7>();
        if (two) {
            load_tile<5>(second, x_stride);
            multiply_tiles<QUADS, 2, 5, 6>();
            multiply_tiles<QUADS, 3, 5, 7>();
        }
    }
    _tile_stored(0, sums[0], kPanelWord);
    _tile_stored(1, sums[0] + kPanel / 2, kPanelWord);
    if (two) {
        _tile_stored(2, sums[kTileRows], kPanelWord);
        _tile_stored(3, sums[kTileRows] + kPanel / 2, kPanelWord);
    }
}

void multiply_pairs(const Linear &task, int64_t first_row, int64_t rows, int64_t panel) {
    const int64_t words = task.inputs / 2, step = tile_step(words),
                  part = rows > kMostRows && words <= kPartedWords ? kPartWords / step * step : words,
                  x_stride = task.x_stride * int64_t{sizeof *task.x};
    const uint8_t *weights = static_cast<const uint8_t *>(task.packed) + panel * words * kPanelWord;
    const auto *x = reinterpret_cast<const uint8_t *>(task.x + first_row * task.x_stride);
    alignas(64) float sums[kDenseRows][kPanel];
    int64_t shaped = 0;
    for (int64_t word = 0; word < words; word += part)
        for (int64_t row = 0; row < rows; row += kMostRows) {
            const int64_t some = std::min(kMostRows, rows - row);
            if (std::exchange(shaped, some) != some)
                set_shapes(some, step);
            const uint8_t *weight = weights + word * kPanelWord;
            const auto next = [&] { return std::exchange(weight, weight + step * kPanelWord); };
            sum_words<false>(x + row * x_stride + word * kWord, x_stride, some, std::min(part, words - word),
                             step, next, sums + row, word > 0);
        }
    _tile_release();
    store_totals(task, first_row, rows, panel, sums);
}

// Bytes of a panel's codes of one pair or quad of inputs.
template <bool QUADS> constexpr int64_t word_bytes(int bits) {
    return kPanel * (QUADS ? 4 : 2) * bits / 8;
}

// Widens the codes of `step` words.
template <bool QUADS, int BITS> const uint8_t *widen_step(const uint8_t *codes, int64_t step, Step &words) {
    for (int64_t w = 0; w < step; ++w, codes += word_bytes<QUADS>(BITS)) {
        __m512i low, high;
        if constexpr (QUADS) {
            load_quads<BITS>(codes, low, high);
        } else {
            __m512bh first, second;
            Pairs<BITS>::load(codes, first, second);
            low = reinterpret_cast<__m512i>(first);
            high = reinterpret_cast<__m512i>(second);
        }
        _mm512_store_si512(words[w], low);
        _mm512_store_si512(words[w] + kPanel / 2, high);
    }
    return reinterpret_cast<const uint8_t *>(words);
}

// Adds the sums of group number `group` of x, scaled, to totals. sums_of_x: null where nothing is subtracted.
template <bool QUADS, int BITS>
void add_group(const Linear &task, int64_t first_row, int64_t rows, int64_t panel, int64_t group,
               const float *sums_of_x, const Sums &sums, Sums &totals) {
    const Codes &codes = task.codes;
    const int64_t groups = task.inputs / (QUADS ? codes.x_group : codes.group);
    const int64_t of_scale = panel * (task.inputs / codes.group) + group * task.inputs / groups / codes.group;
    for (int64_t half = 0; half < kPanel; half += kPanel / 2) {
        const int64_t at = of_scale * kPanel + half;
        const __m512 scale = _mm512_loadu_ps(codes.scales + at);
        __m512 shift = _mm512_set1_ps(QUADS ? 0 : Pairs<BITS>::kDefaultZero);
        if (codes.zeros)
            shift = _mm512_loadu_ps(codes.zeros + at);
        if (!QUADS)
            shift = _mm512_add_ps(shift, _mm512_set1_ps(Pairs<BITS>::kOffset));
        for (int64_t row = 0; row < rows; ++row) {
            __m512 by = scale, sum = _mm512_load_ps(sums[row] + half);
            float sum_of_x = sums_of_x ? sums_of_x[row * groups + group] : 0;
            if constexpr (QUADS) {
                const int64_t place = (first_row + row) * groups + group;
                const int32_t whole = task.byte_rows->sums[place];
                const __m512i offset = _mm512_set1_epi32(offset_of(codes) * whole);
                sum = _mm512_maskz_cvtepi32_ps(0xffff,
                                               _mm512_sub_epi32(_mm512_load_si512(sums[row] + half), offset));
                sum_of_x = static_cast<float>(whole);
                by = _mm512_mul_ps(scale, _mm512_set1_ps(task.byte_rows->scales[place]));
            }
            sum = _mm512_fnmadd_ps(shift, _mm512_set1_ps(sum_of_x), sum);
            float *total = totals[row] + half;
            _mm512_store_ps(total, _mm512_fmadd_ps(by, sum, _mm512_load_ps(total)));
        }
    }
}

template <bool QUADS, int BITS>
void multiply_codes(const Linear &task, int64_t first_row, int64_t rows, int64_t panel) {
    const Codes &codes = task.codes;
    const int64_t size = QUADS ? codes.x_group : codes.group, words = size / (QUADS ? 4 : 2),
                  step = tile_step(words), step_bytes = step * word_bytes<QUADS>(BITS);
    const uint8_t *weight =
        static_cast<const uint8_t *>(task.packed) + panel * Codes::bytes(BITS, kPanel, task.inputs);
    const uint8_t *x = QUADS ? reinterpret_cast<const uint8_t *>(task.byte_rows->values)
                             : reinterpret_cast<const uint8_t *>(task.x);
    const int64_t x_stride = QUADS ? task.byte_rows->stride : task.x_stride * int64_t{sizeof *task.x};
    const float *sums_of_x =
        !QUADS && (codes.zeros || BITS == 4) ? sum_all_groups(task, first_row, rows) : nullptr;
    alignas(64) Step widened;
    alignas(64) Sums sums, totals = {};
    const auto next = [&] {
        const uint8_t *from = std::exchange(weight, weight + step_bytes);
        return QUADS && BITS == 8 ? from : widen_step<QUADS, BITS>(from, step, widened);
    };
    set_shapes(rows, step);
    x += first_row * x_stride;
    for (int64_t group = 0; group * size < task.inputs; ++group, x += words * kWord) {
        sum_words<QUADS>(x, x_stride, rows, words, step, next, sums);
        add_group<QUADS, BITS>(task, first_row, rows, panel, group, sums_of_x, sums, totals);
    }
    _tile_release();
    store_totals(task, first_row, rows, panel, totals);
}

void multiply_panel(const Linear &task, int64_t first_row, int64_t rows, int64_t panel) {
    const bool quads = task.codes.x_group > 0, bytes = task.codes.bits == 8;
    const auto multiply = task.codes.bits == 0 ? multiply_pairs
                          : quads              ? (bytes ? multiply_codes<true, 8> : multiply_codes<true, 4>)
                          : bytes              ? multiply_codes<false, 8>
                                               : multiply_codes<false, 4>;
    multiply(task, first_row, rows, panel);
}

} // namespace

PanelKernel amx_tiles(bool dense) {
    if (dense)
        return {kDenseRows, kDenseRows, multiply_panel, kMostRows, kDenseBytes, 2048};
    return {kMostRows, kMostRows, multiply_panel};
}

} // namespace lamina::linear
