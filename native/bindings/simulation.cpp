// lamina._native: VirtualCluster, DecodeShares, TokenTimes.
#include "lamina/decode_shares.h"
#include "lamina/token_times.h"
#include "lamina/virtual_cluster.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>

namespace nb = nanobind;
using namespace lamina;

namespace {

struct Shares {
    std::vector<Share> shares;
};

using Numbers = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::span<const std::int64_t> span(const Numbers &numbers) {
    return {numbers.data(), numbers.shape(0)};
}

// Tuples (worker, receiving, attending, sending) in seconds.
using ShareTuple = std::tuple<std::size_t, double, double, double>;

std::vector<Share> shares_of(const std::vector<ShareTuple> &tuples) {
    std::vector<Share> shares;
    shares.reserve(tuples.size());
    for (const auto &[worker, receive_s, attention_s, send_s] : tuples)
        shares.push_back({worker, receive_s, attention_s, send_s});
    return shares;
}

std::vector<ShareTuple> tuples_of(const Shares &own) {
    std::vector<ShareTuple> tuples;
    tuples.reserve(own.shares.size());
    for (const Share &share : own.shares)
        tuples.emplace_back(share.worker, share.receive_s, share.attention_s, share.send_s);
    return tuples;
}

void submit(VirtualCluster &cluster, std::size_t lane, double now_s, std::int64_t number,
            const std::vector<std::size_t> &replicas, std::int64_t tick, std::int64_t ticks,
            const StepTimes &times, const std::vector<std::int64_t> &behind) {
    cluster.submit(lane, now_s, {number, replicas, tick, ticks, times, behind});
}

using FinishedTuple = std::tuple<double, std::size_t, std::int64_t, double, double>;

std::optional<FinishedTuple> advance(VirtualCluster &cluster, double until_s) {
    const auto finished = cluster.advance(until_s);
    if (!finished)
        return std::nullopt;
    return FinishedTuple{finished->time_s, finished->lane, finished->number, finished->busy_s,
                         finished->waited_s};
}

const char *name(Stage stage) {
    switch (stage) {
    case Stage::Slice:
        return "slice";
    case Stage::ChunkAttention:
        return "chunk attention";
    case Stage::Attention:
        return "attention";
    }
    throw std::logic_error("no such stage");
}

using Span = std::tuple<std::string, std::size_t, std::size_t, double, double>;

std::vector<Span> spans(const VirtualCluster &cluster) {
    std::vector<Span> result;
    for (const VirtualSpan &span : cluster.spans())
        result.emplace_back(name(span.stage), span.worker, span.lane, span.begin_s, span.end_s);
    return result;
}

std::tuple<double, double, double> as_tuple(const Work &work) {
    return {work.busy_s, work.send_s, work.receive_s};
}

template <class T> using Array = nb::ndarray<nb::numpy, T, nb::c_contig>;

// A new array of this shape, uninitialized.
template <class T> Array<T> make_array(std::initializer_list<std::size_t> shape) {
    std::size_t size = 1;
    for (const std::size_t extent : shape)
        size *= extent;
    T *values = new T[size];
    const nb::capsule owner(values, [](void *held) noexcept { delete[] static_cast<T *>(held); });
    return Array<T>(values, shape, owner);
}

// `value` of every request.
template <class T> Array<T> by_request(const TokenTimes &times, T (TokenTimes::*value)(std::size_t) const) {
    const auto result = make_array<T>({times.count()});
    for (std::size_t request = 0; request < times.count(); ++request)
        result.data()[request] = (times.*value)(request);
    return result;
}

std::pair<Array<double>, Array<std::int64_t>> gaps(const TokenTimes &times) {
    const auto values = make_array<double>({times.gaps().size()});
    const auto counts = make_array<std::int64_t>({times.gaps().size()});
    std::copy(times.gaps().begin(), times.gaps().end(), values.data());
    std::copy(times.gap_counts().begin(), times.gap_counts().end(), counts.data());
    return {values, counts};
}

Shares decode_shares(DecodeShares &shares, const Numbers &homes, const std::vector<std::int64_t> &tokens,
                     const std::vector<ShareTuple> &more) {
    return {shares.of(span(homes), tokens, shares_of(more))};
}

} // namespace

void register_simulation(nb::module_ &module) {
    using namespace nb::literals;
    nb::class_<Shares>(module, "Shares",
                       R"(
Memory workers' parts in each attention of a step, every worker once.

Each is (worker, receiving, attending, sending), in seconds.)")
        .def(
            "__init__",
            [](Shares *self, const std::vector<ShareTuple> &tuples) { new (self) Shares{shares_of(tuples)}; },
            "tuples"_a)
        .def("tuples", &tuples_of, "The parts as they were given or computed.");
    nb::class_<StepTimes>(module, "StepTimes", "Seconds of the parts of one step.")
        .def(
            "__init__",
            [](StepTimes *self, double first_s, double inner_s, double last_s, double chunks_s, double send_s,
               double receive_s, double context_s, const Shares &shares) {
                new (self) StepTimes{first_s, inner_s,   last_s,    chunks_s,
                                     send_s,  receive_s, context_s, shares.shares};
            },
            nb::kw_only(), "first_s"_a, "inner_s"_a, "last_s"_a, "chunks_s"_a = 0.0, "send_s"_a = 0.0,
            "receive_s"_a = 0.0, "context_s"_a = 0.0, "shares"_a,
            R"(
``first_s``, ``inner_s``, ``last_s``: slices 0, 1 .. n - 1 and n. ``chunks_s``: the attention of prompt chunks
to themselves, on the replica after a slice. ``send_s``, ``receive_s``: the replica's network card, to and from
all memory workers. ``context_s``: to reach another replica. ``shares``: of memory workers in each attention.)");
    nb::class_<DecodeShares>(module, "DecodeShares",
                             "The work of a decode step for every memory worker in one attention.")
        .def(nb::init<std::size_t, double, double, double, std::vector<double>>(), "memories"_a,
             "receive_row_s"_a, "send_row_s"_a, "token_s"_a, "attend_s"_a,
             R"(
Seconds of a memory worker: its network card's for a row, in and out; attention's for each token that rows see
and, ``attend_s``, by number of rows.)")
        .def("of", &decode_shares, "homes"_a, "tokens"_a, "more"_a,
             R"(
Shares of rows whose KV is on workers ``homes`` and that see ``tokens`` besides themselves, with ``more`` added.

Raises ValueError or IndexError.)");
    nb::class_<VirtualCluster>(
        module, "VirtualCluster",
        "Compute and memory workers in virtual time: when the slices and attentions of steps begin and end.")
        .def(nb::init<std::size_t, std::size_t, std::size_t, double, std::size_t>(), "replicas"_a,
             "memories"_a, "lanes"_a, "latency_s"_a, "recorded"_a = 0,
             "``latency_s``: of every message, besides its time on network cards; ``recorded``: spans to "
             "keep at most.")
        .def("submit", &submit, "lane"_a, "now_s"_a, "number"_a, "replicas"_a, "tick"_a, "ticks"_a, "times"_a,
             "behind"_a = std::vector<std::int64_t>(), R"(
Append the lane's next step: slices 0 .. n with an attention after each but the last.

``replicas`` [n + 1]: the replica of each slice. Slice 0 is due at ``tick``, each later one ``ticks`` after the
one before. ``behind``: steps of other lanes; each attention waits until their K and V of its layer are stored.

Raises ValueError.)")
        .def("advance", &advance, "until_s"_a,
             R"(
Play on until a step ends: (time_s, lane, number, busy_s, waited_s); None if none ends up to ``until_s``.

``waited_s``: the mean wait for slices whose replica was idle before them, times the attentions; 0 without any.)")
        .def("slow_replica", &VirtualCluster::slow_replica, "replica"_a, "factor"_a,
             "Slices that begin from now on take ``factor`` times as long.")
        .def("slow_memory", &VirtualCluster::slow_memory, "memory"_a, "factor"_a,
             "Attentions that begin from now on take ``factor`` times as long.")
        .def(
            "replica_work",
            [](const VirtualCluster &cluster, std::size_t index) {
                return as_tuple(cluster.replica_work(index));
            },
            "replica"_a,
            "Seconds so far in which it computed, and in which its network card sent and received.")
        .def(
            "memory_work",
            [](const VirtualCluster &cluster, std::size_t index) {
                return as_tuple(cluster.memory_work(index));
            },
            "memory"_a,
            "Seconds so far in which it attended, and in which its network card sent and received.")
        .def("spans", &spans, "The newest spans recorded: (stage, worker, lane, begin_s, end_s).");
    nb::class_<TokenTimes>(module, "TokenTimes", "When requests get their tokens.")
        .def(nb::init<const std::vector<std::int64_t> &>(), "tokens"_a, "Tokens that each request is to get.")
        .def(
            "draw",
            [](TokenTimes &times, double now_s, const Numbers &requests) {
                return times.draw(now_s, span(requests));
            },
            "now_s"_a, "requests"_a,
            R"(
Give each of these requests its next token. Returns the indices in ``requests`` of those whose last token it is.

Raises IndexError for a request that does not exist, ValueError for one that has all its tokens.)")
        .def(
            "drawn", [](const TokenTimes &times) { return by_request(times, &TokenTimes::drawn); },
            "Tokens so far, by request.")
        .def(
            "first_s", [](const TokenTimes &times) { return by_request(times, &TokenTimes::first_s); },
            "Time of the first token, by request; NaN before it.")
        .def(
            "longest_gap_s",
            [](const TokenTimes &times) { return by_request(times, &TokenTimes::longest_gap_s); },
            "Longest time between two consecutive tokens, by request; NaN with fewer than two.")
        .def("gaps", &gaps,
             "Times between consecutive tokens of a request, and how often each occurred; a time may be "
             "listed twice.");
}
