// Two tiles of rows times two of outputs: 32 rows of x times a panel at once. A panel's pairs of bfloat16,
// and its quads of 8 bits, lie as a tile holds them; other codes are widened once for all rows of a call.
#include "codes_avx512.h"
#include "quads.h"
#include "tiles.h"

#include <memory>
#include <new>

namespace lamina::linear {
namespace {

constexpr int64_t kWord = 4;                   // bytes of a pair or a quad
constexpr int64_t kPanelWord = kPanel * kWord; // bytes of a panel's pairs or quads of the same inputs
constexpr int64_t kAhead = 16 * 1024;          // bytes of the weight prefetched before they are needed
constexpr int64_t kLine = 64;                  // bytes of a cache line
constexpr int kDense = 16;                     // bits of a weight that has no codes
using Sums = float[kTiledRows][kPanel];        // with quads, of int32

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

template <bool QUADS, int SUMS, int X, int WEIGHT> void multiply_tiles() {
    if constexpr (QUADS)
        asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(X), "i"(WEIGHT));
    else
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(X), "i"(WEIGHT));
}

// Prefetches what is read and written later, a part of it with each step.
struct Ahead {
    const uint8_t *weight, *weight_end; // `weight_end` advances
    int64_t weight_bytes;               // in each step
    const uint16_t *out;                // a row's results
    int64_t out_stride, out_rows;       // rows that are left
    int64_t out_each;                   // rows in each step
    void step() {
        for (weight_end += weight_bytes; weight < weight_end; weight += kLine)
            _mm_prefetch(reinterpret_cast<const char *>(weight), _MM_HINT_T1);
        for (int64_t i = 0; i < out_each && out_rows > 0; ++i, --out_rows, out += out_stride)
            asm volatile("prefetchw %0" ::"m"(*out));
    }
};

// Sums up `words` words of each row of x times those of a panel, of which next() returns `step` at a time.
template <bool QUADS, class Next>
void sum_words(const uint8_t *x, int64_t x_stride, int64_t rows, int64_t words, int64_t step, Next next,
               Ahead &ahead, Sums &sums) {
    const uint8_t *second = x + kTileRows * x_stride;
    const bool two = rows > kTileRows;
    _tile_zero(0);
    _tile_zero(1);
    if (two) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t w = 0; w < words; w += step, x += step * kWord, second += step * kWord) {
        ahead.step();
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

// Codes 0 to 15 less 8, in bfloat16, twice: bits above a code's four do not matter.
__m512i codes_less_eight() {
    alignas(64) uint16_t table[32];
    for (int code = 0; code < 32; ++code) {
        const auto number = static_cast<float>(code % 16 - 8);
        uint32_t bits;
        std::memcpy(&bits, &number, sizeof bits);
        table[code] = static_cast<uint16_t>(bits >> 16);
    }
    return _mm512_load_si512(table);
}

// Writes one word of each of a panel's outputs: codes of 8 bits, or of 4 bits less 8, as bfloat16; with
// quads, codes of 4 bits as bytes.
template <bool QUADS, int BITS>
[[gnu::always_inline]] inline void widen_word(const uint8_t *codes, __m512i table, uint8_t *words) {
    __m512i low, high;
    if constexpr (QUADS) {
        load_quads<BITS>(codes, low, high);
    } else if constexpr (BITS == 8) {
        __m512bh first, second;
        Pairs<8>::load(codes, first, second);
        low = reinterpret_cast<__m512i>(first);
        high = reinterpret_cast<__m512i>(second);
    } else {
        const auto *bytes = reinterpret_cast<const __m128i *>(codes);
        const __m512i first = _mm512_maskz_cvtepu8_epi32(0xffff, _mm_load_si128(bytes)),
                      second = _mm512_maskz_cvtepu8_epi32(0xffff, _mm_load_si128(bytes + 1)),
                      both = _mm512_or_si512(first, _mm512_maskz_slli_epi32(0xffff, second, 16));
        low = _mm512_maskz_permutexvar_epi16(~0u, both, table);
        high = _mm512_maskz_permutexvar_epi16(~0u, _mm512_maskz_srli_epi32(0xffff, both, 4), table);
    }
    _mm512_store_si512(words, low);
    _mm512_store_si512(words + kPanelWord / 2, high);
}

// A thread's memory for a panel's words.
uint8_t *words_buffer(int64_t bytes) {
    struct Free {
        void operator()(uint8_t *memory) const { ::operator delete(memory, std::align_val_t{kLine}); }
    };
    thread_local std::unique_ptr<uint8_t, Free> buffer;
    thread_local int64_t size = 0;
    if (size < bytes) {
        buffer.reset(
            static_cast<uint8_t *>(::operator new(static_cast<size_t>(bytes), std::align_val_t{kLine})));
        size = bytes;
    }
    return buffer.get();
}

// Some rows of x times panels of one weight.
template <bool QUADS, int BITS> class TiledRows {
public:
    TiledRows(const Linear &task, int64_t first_row, int64_t rows)
        : task_(task), first_row_(first_row), rows_(rows), size_(BITS == kDense ? task.inputs
                                                                 : QUADS        ? task.codes.x_group
                                                                                : task.codes.group),
          groups_(task.inputs / size_), words_(size_ / kInputs), step_(tile_step(words_)),
          stride_(QUADS ? task.byte_rows->stride : task.x_stride * int64_t{sizeof *task.x}),
          x_((QUADS ? reinterpret_cast<const uint8_t *>(task.byte_rows->values)
                    : reinterpret_cast<const uint8_t *>(task.x)) +
             first_row * stride_),
          sums_of_x_(!QUADS && task.codes.zeros ? sum_all_groups(task, first_row, rows) : nullptr) {}

    void multiply(int64_t panel) {
        const int64_t blocks = (rows_ + kTiledRows - 1) / kTiledRows;
        const uint8_t *weight = static_cast<const uint8_t *>(task_.packed) + panel * panel_bytes();
        if constexpr (kLiesAsTiles) {
            multiply_blocks(panel, weight + (blocks > 1 ? panel_bytes() : kAhead),
                            [&](int64_t word) { return weight + word * kPanelWord; });
        } else if (blocks > 1) {
            uint8_t *words = words_buffer(task_.inputs / kInputs * kPanelWord);
            for (int64_t word = 0; word < task_.inputs / kInputs; word += step_)
                widen(weight, word, words + word * kPanelWord);
            multiply_blocks(panel, weight + panel_bytes(),
                            [&](int64_t word) { return words + word * kPanelWord; });
        } else {
            multiply_blocks(panel, weight + kAhead,
                            [&](int64_t word) { return widen(weight, word, widened_); });
        }
    }

private:
    static constexpr bool kLiesAsTiles = BITS == kDense || (QUADS && BITS == 8);
    static constexpr int64_t kInputs = QUADS ? 4 : 2; // of a word

    // The products of rows [row, row + rows) of x_ with one group.
    struct Part {
        int64_t row, rows, group;
        Sums *sums;
    };

    int64_t panel_bytes() const { return kPanel * task_.inputs * BITS / 8; }

    // Writes the words of one step, which begins with `word`, to `to`.
    const uint8_t *widen(const uint8_t *weight, int64_t word, uint8_t *to) const {
        constexpr int64_t bytes = kPanel * kInputs * BITS / 8; // of a word's codes
        const uint8_t *codes = weight + word * bytes;
        for (int64_t w = 0; w < step_; ++w, codes += bytes)
            widen_word<QUADS, BITS>(codes, table_, to + w * kPanelWord);
        return to;
    }

    // words_at(word): the panel's words from there on. `next`: what is prefetched of the weight meanwhile.
    template <class WordsAt> void multiply_blocks(int64_t panel, const uint8_t *next, WordsAt words_at) {
        const int64_t blocks = (rows_ + kTiledRows - 1) / kTiledRows, steps = task_.inputs / kInputs / step_;
        Ahead ahead{next,          next, panel_bytes() / steps / blocks,  nullptr,
                    task_.outputs, 0,    (kTiledRows + steps - 1) / steps};
        Part last{}; // is scaled while tiles multiply the next one
        for (int64_t row = 0; row < rows_; row += kTiledRows) {
            const int64_t rows = std::min(rows_ - row, kTiledRows);
            if (rows != shaped_)
                set_shapes(shaped_ = rows, step_);
            ahead.out = task_.out + (first_row_ + row) * task_.outputs + panel * kPanel;
            ahead.out_rows = rows;
            int64_t word = 0;
            for (int64_t group = 0; group < groups_; ++group) {
                const Part part{row, rows, group, last.sums == &sums_[0] ? &sums_[1] : &sums_[0]};
                sum_words<QUADS>(
                    x_ + row * stride_ + word * kWord, stride_, rows, words_, step_,
                    [&] { return words_at(std::exchange(word, word + step_)); }, ahead, *part.sums);
                if (last.sums)
                    finish(panel, last);
                last = part;
            }
        }
        finish(panel, last);
    }

    void finish(int64_t panel, const Part &part) {
        if constexpr (BITS == kDense) {
            store_totals(task_, first_row_ + part.row, part.rows, panel, *part.sums);
        } else {
            if (part.group == 0)
                std::memset(totals_, 0, sizeof totals_);
            add_group(panel, part);
            if (part.group == groups_ - 1)
                store_totals(task_, first_row_ + part.row, part.rows, panel, totals_);
        }
    }

    // Adds the sums of one group of x, scaled, to totals_.
    void add_group(int64_t panel, const Part &part) {
        const Codes &codes = task_.codes;
        const int64_t first =
            (panel * (task_.inputs / codes.group) + part.group * size_ / codes.group) * kPanel;
        const int64_t place = part.row * groups_ + part.group, groups = groups_;
        __m512 scale[2], shift[2] = {};
        for (int half = 0; half < 2; ++half) {
            scale[half] = _mm512_loadu_ps(codes.scales + first + 16 * half);
            if (codes.zeros)
                shift[half] = _mm512_sub_ps(_mm512_loadu_ps(codes.zeros + first + 16 * half),
                                            _mm512_set1_ps(!QUADS && BITS == 4 ? 8 : 0));
        }
        const float *sums = (*part.sums)[0];
        float *totals = totals_[0], *const end = totals + part.rows * kPanel;
        if constexpr (QUADS) {
            const ByteRows &rows = *task_.byte_rows;
            const int32_t *whole = rows.sums + first_row_ * groups + place;
            const float *x_scale = rows.scales + first_row_ * groups + place;
            const int32_t offset = offset_of(codes);
            const bool shifts = codes.zeros;
            for (; totals < end; totals += kPanel, sums += kPanel, whole += groups, x_scale += groups) {
                const __m512i less = _mm512_set1_epi32(offset * *whole);
                const __m512 of_x = _mm512_set1_ps(*x_scale),
                             sum_of_x = _mm512_set1_ps(static_cast<float>(*whole));
#pragma GCC unroll 2
                for (int half = 0; half < 2; ++half) {
                    __m512 sum = _mm512_maskz_cvtepi32_ps(
                        0xffff, _mm512_sub_epi32(_mm512_load_si512(sums + 16 * half), less));
                    if (shifts)
                        sum = _mm512_fnmadd_ps(shift[half], sum_of_x, sum);
                    add_scaled(totals + 16 * half, _mm512_mul_ps(scale[half], of_x), sum);
                }
            }
        } else {
            const float *sum_of_x = codes.zeros ? sums_of_x_ + place : &kNothing;
            const int64_t stride = codes.zeros ? groups : 0;
            for (; totals < end; totals += kPanel, sums += kPanel, sum_of_x += stride) {
                const __m512 of_x = _mm512_set1_ps(*sum_of_x);
#pragma GCC unroll 2
                for (int half = 0; half < 2; ++half)
                    add_scaled(totals + 16 * half, scale[half],
                               _mm512_fnmadd_ps(shift[half], of_x, _mm512_load_ps(sums + 16 * half)));
            }
        }
    }

    static void add_scaled(float *total, __m512 scale, __m512 sum) {
        _mm512_store_ps(total, _mm512_fmadd_ps(scale, sum, _mm512_load_ps(total)));
    }

    static constexpr float kNothing = 0;

    const Linear &task_;
    const int64_t first_row_, rows_;
    const int64_t size_, groups_, words_, step_; // inputs and words of a group, and words of a tile
    const int64_t stride_;                       // bytes from row to row of x_
    const uint8_t *const x_;
    const float *const sums_of_x_; // [rows, groups] where zero points are subtracted, else null
    int64_t shaped_ = 0;           // rows of the tiles
    const __m512i table_ = codes_less_eight();
    alignas(64) uint8_t widened_[kTileWords * kPanelWord]; // one step's words
    alignas(64) Sums sums_[2];
    alignas(64) Sums totals_;
};

template <bool QUADS, int BITS>
void multiply_panels(const Linear &task, int64_t first_row, int64_t rows, int64_t first, int64_t last) {
    TiledRows<QUADS, BITS> tiled(task, first_row, rows);
    for (int64_t panel = first; panel < last; ++panel)
        tiled.multiply(panel);
    _tile_release();
}

} // namespace

void multiply_amx_tiles(const Linear &task, int64_t first_row, int64_t rows, int64_t first, int64_t last) {
    const bool quads = task.codes.x_group > 0, bytes = task.codes.bits == 8;
    const auto multiply = task.codes.bits == 0 ? multiply_panels<false, kDense>
                          : quads              ? (bytes ? multiply_panels<true, 8> : multiply_panels<true, 4>)
                          : bytes              ? multiply_panels<false, 8>
                                               : multiply_panels<false, 4>;
    multiply(task, first_row, rows, first, last);
}

} // namespace lamina::linear
