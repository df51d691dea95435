// lamina._native: attention_partial, attention_append, attention_merge. Checks every shape, type and bound
// before the kernels, which trust their arguments, run without the GIL.
#include "lamina/attention.h"
#include "lamina/read_memory.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace nb = nanobind;
using namespace lamina::attention;

namespace {

using Array = nb::ndarray<nb::ro, nb::device::cpu>;
using OutArray = nb::ndarray<nb::device::cpu>;

// An argument that accepts any array A and that signatures show as an array of T; void: of any elements. The
// checks below enforce T, with errors that name the argument.
template <class A, class T> struct Shown : A {
    Shown() = default;
    Shown(A &&array) : A(std::move(array)) {}
};
template <class T> constexpr auto element_name = nb::detail::dtype_traits<T>::name;
template <> constexpr auto element_name<void> = nb::detail::const_name("generic");

using Any = Shown<Array, void>;
using Bytes = Shown<Array, uint8_t>;
using Int32s = Shown<Array, int32_t>;
using Int64s = Shown<Array, int64_t>;
using Floats = Shown<Array, float>;
using OutAny = Shown<OutArray, void>;
using OutFloats = Shown<OutArray, float>;

template <class... Parts> [[noreturn]] void fail(const Parts &...parts) {
    std::ostringstream text;
    (text << ... << parts);
    throw nb::value_error(text.str().c_str());
}

template <class A> std::string shape_text(const A &array) {
    std::ostringstream text;
    text << "[";
    for (size_t i = 0; i < array.ndim(); ++i)
        text << (i ? ", " : "") << array.shape(i);
    text << "]";
    return text.str();
}

// Checks C order and the shape; a wanted size of -1 is free.
template <class A> void check_shape(const char *name, const A &array, const std::vector<int64_t> &wanted) {
    bool right = array.ndim() == wanted.size();
    for (size_t i = 0; right && i < wanted.size(); ++i)
        right = wanted[i] < 0 || static_cast<int64_t>(array.shape(i)) == wanted[i];
    if (!right) {
        std::ostringstream text;
        for (size_t i = 0; i < wanted.size(); ++i)
            text << (i ? ", " : "") << (wanted[i] < 0 ? std::string("any") : std::to_string(wanted[i]));
        fail(name, " has shape ", shape_text(array), "; expected [", text.str(), "]");
    }
    int64_t stride = 1;
    for (size_t i = wanted.size(); i-- > 0;) {
        if (array.size() > 0 && array.shape(i) > 1 && array.stride(i) != stride)
            fail(name, " of shape ", shape_text(array), " is not C-contiguous; pass numpy.ascontiguousarray(",
                 name, ")");
        stride *= static_cast<int64_t>(array.shape(i));
    }
}

template <class T, class A> void check_type(const char *name, const A &array, const char *expected) {
    if (array.dtype() != nb::dtype<T>())
        fail(name, " must hold ", expected, " elements");
}

// Of an array that does not hold codes.
template <class A> ElementType element_type(const char *name, const A &array) {
    const nb::dlpack::dtype type = array.dtype();
    if (type == nb::dtype<float>())
        return ElementType::Float32;
    if (type == nb::dtype<uint16_t>())
        return ElementType::BFloat16;
    if (type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Float) && type.bits == 16 &&
        type.lanes == 1)
        return ElementType::Float16;
    fail(name, " must hold float32, float16 or uint16 (bfloat16 bits) elements");
}

template <class A> ElementType slab_type(const char *name, const A &array) {
    if (array.dtype() == nb::dtype<int8_t>())
        return ElementType::Int8;
    if (array.dtype() == nb::dtype<uint8_t>())
        return ElementType::Fp8;
    return element_type(name, array);
}

// Codes, and nothing else, have scales [slots, heads].
template <class A>
auto check_scales(const char *name, const std::optional<A> &scales, const char *slab, ElementType type,
                  int64_t slots, int64_t heads) -> decltype(scales->data()) {
    if (is_code(type) != scales.has_value())
        fail(slab,
             is_code(type) ? " holds codes (int8, or uint8 for e4m3); give " : " holds no codes; leave out ",
             name);
    if (!scales)
        return nullptr;
    check_shape(name, *scales, {slots, heads});
    check_type<float>(name, *scales, "float32");
    return scales->data();
}

void check_source_type(const char *name, ElementType type, const char *slab, ElementType slab_type) {
    if (is_code(slab_type))
        return;
    if (type != ElementType::Float32 && type != slab_type)
        fail(name, " must hold float32 elements or the element type of ", slab);
}

void check_slots(const int32_t *slots, int64_t count, int64_t capacity) {
    uint32_t most = 0; // a negative slot is a huge unsigned one
    for (int64_t i = 0; i < count; ++i)
        most = std::max(most, static_cast<uint32_t>(slots[i]));
    if (count > 0 && most >= capacity)
        fail("slots holds ", static_cast<int32_t>(most), "; the slab has slots 0 to ", capacity - 1);
}

template <class T> void check_offsets(const char *name, const T *offsets, int64_t count, int64_t end) {
    if (offsets[0] != 0 || offsets[count] != end)
        fail(name, " spans ", offsets[0], " to ", offsets[count], "; expected 0 to ", end);
    for (int64_t i = 0; i < count; ++i)
        if (offsets[i] > offsets[i + 1])
            fail(name, " decreases from ", offsets[i], " to ", offsets[i + 1], " at pair ", i);
}

template <class T> const T *data(const Array &array) {
    return static_cast<const T *>(array.data());
}

void check_threads(int threads) {
    if (threads < 1)
        fail("threads is ", threads, "; give at least 1");
}

Segments make_segments(const Array &query_offsets, const Array &query_start, const Array &kv_offsets,
                       const Array &kv_start, const Array &slots, int64_t rows, int64_t capacity) {
    check_shape("query_start", query_start, {-1});
    const auto count = static_cast<int64_t>(query_start.shape(0));
    check_shape("query_offsets", query_offsets, {count + 1});
    check_shape("kv_offsets", kv_offsets, {count + 1});
    check_shape("kv_start", kv_start, {count});
    check_shape("slots", slots, {-1});
    check_type<int32_t>("query_offsets", query_offsets, "int32");
    check_type<int32_t>("query_start", query_start, "int32");
    check_type<int64_t>("kv_offsets", kv_offsets, "int64");
    check_type<int32_t>("kv_start", kv_start, "int32");
    check_type<int32_t>("slots", slots, "int32");
    const auto tokens = static_cast<int64_t>(slots.shape(0));
    check_offsets("query_offsets", data<int32_t>(query_offsets), count, rows);
    check_offsets("kv_offsets", data<int64_t>(kv_offsets), count, tokens);
    check_slots(data<int32_t>(slots), tokens, capacity);
    return {count,
            data<int32_t>(query_offsets),
            data<int32_t>(query_start),
            data<int64_t>(kv_offsets),
            data<int32_t>(kv_start),
            data<int32_t>(slots)};
}

void check_heads(int64_t query_heads, int64_t kv_heads) {
    if (kv_heads <= 0 || query_heads <= 0 || query_heads % kv_heads != 0)
        fail("q has ", query_heads, " heads; expected a positive multiple of the ", kv_heads,
             " heads of k and v");
}

// The arguments of attention, checked.
Problem make_problem(const Any &q, const Any &k, const Any &v, const Int32s &query_offsets,
                     const Int32s &query_start, const Int64s &kv_offsets, const Int32s &kv_start,
                     const Int32s &slots, const OutFloats &out, const OutFloats &lse, float scale,
                     int64_t window, int64_t chunk, float softcap, const std::optional<Floats> &alibi_slopes,
                     const std::optional<Floats> &k_scales, const std::optional<Floats> &v_scales,
                     int threads, Path path) {
    check_shape("q", q, {-1, -1, -1});
    check_shape("k", k, {-1, -1, static_cast<int64_t>(q.shape(2))});
    check_shape("v", v, {static_cast<int64_t>(k.shape(0)), static_cast<int64_t>(k.shape(1)), -1});
    const auto rows = static_cast<int64_t>(q.shape(0));
    const Shape shape{static_cast<int64_t>(q.shape(1)), static_cast<int64_t>(k.shape(1)),
                      static_cast<int64_t>(q.shape(2)), static_cast<int64_t>(v.shape(2))};
    check_heads(shape.query_heads, shape.kv_heads);
    check_shape("out", out, {rows, shape.query_heads, shape.v_dim});
    check_shape("lse", lse, {rows, shape.query_heads});
    check_type<float>("out", out, "float32");
    check_type<float>("lse", lse, "float32");
    const ElementType kv_type = slab_type("k", k), q_type = element_type("q", q);
    if (slab_type("v", v) != kv_type)
        fail("v must hold the element type of k");
    check_source_type("q", q_type, "k", kv_type);
    if (alibi_slopes) {
        check_shape("alibi_slopes", *alibi_slopes, {shape.query_heads});
        check_type<float>("alibi_slopes", *alibi_slopes, "float32");
    }
    check_threads(threads);
    const std::vector<Path> available = available_paths();
    if (std::find(available.begin(), available.end(), path) == available.end())
        fail("this processor cannot run the given attention path; choose one of attention_paths()");
    const Segments segments = make_segments(query_offsets, query_start, kv_offsets, kv_start, slots, rows,
                                            static_cast<int64_t>(k.shape(0)));
    const auto capacity = static_cast<int64_t>(k.shape(0));
    const void *key_scales = check_scales("k_scales", k_scales, "k", kv_type, capacity, shape.kv_heads);
    const void *value_scales = check_scales("v_scales", v_scales, "v", kv_type, capacity, shape.kv_heads);
    const Scoring scoring{scale, window, chunk, softcap, alibi_slopes ? data<float>(*alibi_slopes) : nullptr};
    return {shape,
            scoring,
            segments,
            q_type,
            kv_type,
            q.data(),
            k.data(),
            v.data(),
            static_cast<const float *>(key_scales),
            static_cast<const float *>(value_scales),
            static_cast<float *>(out.data()),
            static_cast<float *>(lse.data())};
}

void partial_binding(const Any &q, const Any &k, const Any &v, const Int32s &query_offsets,
                     const Int32s &query_start, const Int64s &kv_offsets, const Int32s &kv_start,
                     const Int32s &slots, const OutFloats &out, const OutFloats &lse, float scale,
                     int64_t window, int64_t chunk, float softcap, const std::optional<Floats> &alibi_slopes,
                     const std::optional<Floats> &k_scales, const std::optional<Floats> &v_scales,
                     int threads, Path path) {
    const Problem problem =
        make_problem(q, k, v, query_offsets, query_start, kv_offsets, kv_start, slots, out, lse, scale,
                     window, chunk, softcap, alibi_slopes, k_scales, v_scales, threads, path);
    nb::gil_scoped_release release;
    partial(problem, threads, path);
}

void partial_tasks_binding(const Any &q, const Any &k, const Any &v, const Int32s &query_offsets,
                           const Int32s &query_start, const Int64s &kv_offsets, const Int32s &kv_start,
                           const Int32s &slots, const OutFloats &out, const OutFloats &lse, float scale,
                           int64_t window, int64_t chunk, float softcap,
                           const std::optional<Floats> &alibi_slopes, const std::optional<Floats> &k_scales,
                           const std::optional<Floats> &v_scales, int threads, Path path, int64_t first,
                           int64_t last, bool adds) {
    const Problem problem =
        make_problem(q, k, v, query_offsets, query_start, kv_offsets, kv_start, slots, out, lse, scale,
                     window, chunk, softcap, alibi_slopes, k_scales, v_scales, threads, path);
    const int64_t count = count_tasks(problem.shape, problem.segments);
    if (first < 0 || first > last || last > count)
        fail("tasks ", first, " to ", last, " are not among the ", count, " of this attention");
    nb::gil_scoped_release release;
    partial_tasks(problem, first, last, adds, threads, path);
}

int64_t count_tasks_binding(const Int32s &query_offsets, int64_t query_heads, int64_t kv_heads) {
    check_shape("query_offsets", query_offsets, {-1});
    check_type<int32_t>("query_offsets", query_offsets, "int32");
    if (query_offsets.shape(0) == 0)
        fail("query_offsets is empty; give one more than there are pairs");
    check_heads(query_heads, kv_heads);
    const auto pairs = static_cast<int64_t>(query_offsets.shape(0)) - 1;
    check_offsets("query_offsets", data<int32_t>(query_offsets), pairs, data<int32_t>(query_offsets)[pairs]);
    return count_tasks({query_heads, kv_heads, 0, 0},
                       {pairs, data<int32_t>(query_offsets), nullptr, nullptr, nullptr, nullptr});
}

void append_binding(const OutAny &slab, const Any &rows, const Int32s &slots, int threads,
                    const std::optional<OutFloats> &scales) {
    check_shape("slab", slab, {-1, -1, -1});
    check_shape("slots", slots, {-1});
    check_type<int32_t>("slots", slots, "int32");
    const auto count = static_cast<int64_t>(slots.shape(0));
    const auto heads = static_cast<int64_t>(slab.shape(1)), dim = static_cast<int64_t>(slab.shape(2));
    check_shape("rows", rows, {count, heads, dim});
    const ElementType kept_type = slab_type("slab", slab), row_type = element_type("rows", rows);
    check_source_type("rows", row_type, "slab", kept_type);
    void *kept_scales =
        check_scales("scales", scales, "slab", kept_type, static_cast<int64_t>(slab.shape(0)), heads);
    check_slots(data<int32_t>(slots), count, static_cast<int64_t>(slab.shape(0)));
    check_threads(threads);
    nb::gil_scoped_release release;
    if (is_code(kept_type))
        append_codes(slab.data(), kept_type, static_cast<float *>(kept_scales), rows.data(), row_type,
                     data<int32_t>(slots), count, heads, dim, threads);
    else
        append(slab.data(), kept_type, rows.data(), row_type, data<int32_t>(slots), count, heads * dim,
               threads);
}

void merge_binding(const std::vector<Floats> &outs, const std::vector<Floats> &lses,
                   const std::optional<Floats> &sinks, const OutAny &out, const std::optional<OutFloats> &lse,
                   int threads) {
    check_shape("out", out, {-1, -1, -1});
    const ElementType out_type = element_type("out", out);
    check_threads(threads);
    const auto rows = static_cast<int64_t>(out.shape(0)), heads = static_cast<int64_t>(out.shape(1)),
               v_dim = static_cast<int64_t>(out.shape(2));
    if (outs.empty() || outs.size() != lses.size())
        fail("merge got ", outs.size(), " outs and ", lses.size(),
             " lses; give one lse for each of at least one out");
    std::vector<const float *> out_data, lse_data;
    for (size_t i = 0; i < outs.size(); ++i) {
        check_shape("outs", outs[i], {rows, heads, v_dim});
        check_shape("lses", lses[i], {rows, heads});
        check_type<float>("outs", outs[i], "float32");
        check_type<float>("lses", lses[i], "float32");
        out_data.push_back(data<float>(outs[i]));
        lse_data.push_back(data<float>(lses[i]));
    }
    if (sinks) {
        check_shape("sinks", *sinks, {heads});
        check_type<float>("sinks", *sinks, "float32");
    }
    if (lse) {
        check_shape("lse", *lse, {rows, heads});
        check_type<float>("lse", *lse, "float32");
    }
    nb::gil_scoped_release release;
    merge({.outs = out_data.data(),
           .lses = lse_data.data(),
           .count = static_cast<int64_t>(outs.size()),
           .rows = rows,
           .heads = heads,
           .v_dim = v_dim,
           .sinks = sinks ? data<float>(*sinks) : nullptr,
           .out = out.data(),
           .out_type = out_type,
           .lse = lse ? static_cast<float *>(lse->data()) : nullptr},
          threads);
}

uint64_t
read_memory_binding(const nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> &memory,
                    int threads) {
    check_threads(threads);
    nb::gil_scoped_release release;
    return lamina::read_memory(memory.data(), static_cast<int64_t>(memory.size()), threads);
}

uint64_t read_rows_binding(const Bytes &rows, const Int32s &slots, int threads) {
    check_shape("rows", rows, {-1, -1});
    check_type<uint8_t>("rows", rows, "uint8");
    check_shape("slots", slots, {-1});
    check_type<int32_t>("slots", slots, "int32");
    const auto row_bytes = static_cast<int64_t>(rows.shape(1)), count = static_cast<int64_t>(slots.shape(0));
    if (row_bytes == 0 || row_bytes % 64 != 0)
        fail("rows have ", row_bytes, " bytes; give a positive multiple of 64");
    check_slots(data<int32_t>(slots), count, static_cast<int64_t>(rows.shape(0)));
    check_threads(threads);
    nb::gil_scoped_release release;
    return lamina::read_rows(rows.data(), row_bytes, data<int32_t>(slots), count, threads);
}

} // namespace

template <class A, class T> struct nb::detail::type_caster<Shown<A, T>> : type_caster<A> {
    static constexpr auto Name = const_name("ndarray[dtype=") + element_name<T> + const_name("]");
    template <class> using Cast = Shown<A, T>;
    operator Shown<A, T>() { return std::move(this->value); }
};

void register_attention(nb::module_ &module) {
    using namespace nb::literals;
    nb::enum_<Path>(module, "AttentionPath", "Instruction sets with attention kernels of their own.")
        .value("PORTABLE", Path::Portable)
        .value("AVX2", Path::Avx2)
        .value("AVX512_BF16", Path::Avx512Bf16)
        .value("AMX", Path::Amx);
    module.def("attention_paths", &available_paths, "Paths that this processor can run, slowest first.");
    module.def("attention_partial", &partial_binding, "q"_a, "k"_a, "v"_a, "query_offsets"_a, "query_start"_a,
               "kv_offsets"_a, "kv_start"_a, "slots"_a, "out"_a, "lse"_a, nb::kw_only(), "scale"_a,
               "window"_a, "chunk"_a, "softcap"_a, "alibi_slopes"_a.none(), "k_scales"_a.none(),
               "v_scales"_a.none(), "threads"_a, "path"_a,
               R"(
Attention of every query row over its pair's segment of a KV slab, without sinks; writes ``out`` and ``lse``.

Arrays are C-contiguous; uint16 means bfloat16 bits. R query rows, Hq query heads, Hkv key/value heads, D and Dv
head sizes, S (sequence, segment) pairs, N their tokens:

q [R, Hq, D] float32 or the element type of k; k [slots, Hkv, D] and v [slots, Hkv, Dv] float32, float16 or uint16;
or k and v codes in int8, or uint8 for e4m3, with k_scales and v_scales [slots, Hkv], and q of any of the former;
query_offsets [S + 1], query_start [S], kv_offsets [S + 1], kv_start [S], slots [N];
out [R, Hq, Dv], natural-log lse [R, Hq]: 0 and -inf for a row that sees nothing; alibi_slopes [Hq].

Releases the GIL. Raises ValueError for a shape, element type, order, slot or path that does not fit.)");
    module.def("attention_partial_tasks", &partial_tasks_binding, "q"_a, "k"_a, "v"_a, "query_offsets"_a,
               "query_start"_a, "kv_offsets"_a, "kv_start"_a, "slots"_a, "out"_a, "lse"_a, nb::kw_only(),
               "scale"_a, "window"_a, "chunk"_a, "softcap"_a, "alibi_slopes"_a.none(), "k_scales"_a.none(),
               "v_scales"_a.none(), "threads"_a, "path"_a, "first"_a, "last"_a, "adds"_a,
               R"(
Tasks [first, last) of the attention_count_tasks() that attention_partial() with the same arguments consists of.

Each task writes rows and heads of ``out`` and ``lse`` of its own; with ``adds`` it merges into what they hold.
Releases the GIL. Raises ValueError like attention_partial(), and for tasks outside the attention.)");
    module.def("attention_count_tasks", &count_tasks_binding, "query_offsets"_a, "query_heads"_a,
               "kv_heads"_a, "Number of tasks of an attention of these query rows. Raises ValueError.");
    module.def("attention_append", &append_binding, "slab"_a, "rows"_a, "slots"_a, "threads"_a,
               "scales"_a.none(),
               R"(
Write rows [T, Hkv, D] into slots [T] of slab [slots, Hkv, D], which is mutated.

Rows hold the slab's element type or float32, rounded to nearest even. A slab of codes (int8, or uint8 for e4m3)
takes float32, float16 or uint16 and has ``scales`` [slots, Hkv], which are mutated too. Releases the GIL. Raises
ValueError, before anything is written, for a shape, element type, order or slot that does not fit.)");
    module.def("attention_merge", &merge_binding, "outs"_a, "lses"_a, "sinks"_a.none(), "out"_a,
               "lse"_a.none(), "threads"_a,
               R"(
Merge partial attentions, outs of [R, Hq, Dv] and lses of [R, Hq], with sinks [Hq]; writes ``out`` and ``lse``.

out [R, Hq, Dv] holds float32, float16 or uint16 (bfloat16 bits). Releases the GIL. Raises ValueError.)");
    module.def("read_memory", &read_memory_binding, "memory"_a.noconvert(), "threads"_a,
               "Read all bytes once, to measure memory bandwidth; returns a checksum. Releases the GIL.");
    module.def("read_rows", &read_rows_binding, "rows"_a, "slots"_a, "threads"_a,
               R"(
Read the rows [slots, bytes] at these slots once, to measure memory bandwidth; returns a checksum.

Releases the GIL. Raises ValueError unless a row is a positive multiple of 64 bytes and all slots exist.)");
}
