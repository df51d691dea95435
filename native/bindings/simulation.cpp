// lamina._native: VirtualCluster, DecodeShares, TokenTimes.
#include "lamina/decode_shares.h"
#include "lamina/token_times.h"
#include "lamina/virtual_cluster.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <initializer_list>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>

namespace nb = nanobind;
using namespace lamina;

namespace {

struct Shares { // what Python holds of them
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
            const std::vector<std::size_t> &replicas, std::int64_t tick, std::int64_t ticks, double first_s,
            double inner_s, double last_s, double chunks_s, double send_s, double receive_s, double context_s,
            const Shares &shares) {
    VirtualStep step{.number = number,
                     .replicas = replicas,
                     .tick = tick,
                     .ticks = ticks,
                     .first_s = first_s,
                     .inner_s = inner_s,
                     .last_s = last_s,
                     .chunks_s = chunks_s,
                     .send_s = send_s,
                     .receive_s = receive_s,
                     .context_s = context_s,
                     .shares = shares.shares};
    cluster.submit(lane, now_s, std::move(step));
}

nb::object advance(VirtualCluster &cluster, double until_s) {
    const auto finished = cluster.advance(until_s);
    if (!finished)
        return nb::none();
    return nb::make_tuple(finished->time_s, finished->lane, finished->number, finished->busy_s,
                          finished->waited_s);
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

nb::tuple as_tuple(const Work &work) {
    return nb::make_tuple(work.busy_s, work.send_s, work.receive_s);
}

template <class T> using Array = nb::ndarray<nb::numpy, T, nb::c_contig>;

// A new array of this shape, with nothing in it yet.
template <class T> Array<T> make_array(std::initializer_list<std::size_t> shape) {
    std::size_t size = 1;
    for (const std::size_t extent : shape)
        size *= extent;
    T *values = new T[size];
    const nb::capsule owner(values, [](void *held) noexcept { delete[] static_cast<T *>(held); });
    return Array<T>(values, shape, owner);
}

// Of every request, what `value` says.
template <class T> Array<T> by_request(const TokenTimes &times, T (TokenTimes::*value)(std::size_t) const) {
    const auto result = make_array<T>({times.count()});
    for (std::size_t request = 0; request < times.count(); ++request)
        result.data()[request] = (times.*value)(request);
    return result;
}

nb::tuple gaps(const TokenTimes &times) {
    const auto values = make_array<double>({times.gaps().size()});
    const auto counts = make_array<std::int64_t>({times.gaps().size()});
    std::copy(times.gaps().begin(), times.gaps().end(), values.data());
    std::copy(times.gap_counts().begin(), times.gap_counts().end(), counts.data());
    return nb::make_tuple(values, counts);
}

Shares decode_shares(DecodeShares &shares, const Numbers &homes, const std::vector<std::int64_t> &tokens,
                     const std::vector<ShareTuple> &more) {
    return {shares.of(span(homes), tokens, shares_of(more))};
}

} // namespace

void register_simulation(nb::module_ &module) {
    nb::class_<VirtualCluster>(module, "VirtualCluster")
        .def(nb::init<std::size_t, std::size_t, std::size_t, double, std::size_t>(), nb::arg("replicas"),
             nb::arg("memories"), nb::arg("lanes"), nb::arg("latency_s"), nb::arg("recorded") = 0)
        .def("submit", &submit)
        .def("advance", &advance)
        .def("slow_replica", &VirtualCluster::slow_replica)
        .def("slow_memory", &VirtualCluster::slow_memory)
        .def("replica_work", [](const VirtualCluster &cluster,
                                std::size_t index) { return as_tuple(cluster.replica_work(index)); })
        .def("memory_work", [](const VirtualCluster &cluster,
                               std::size_t index) { return as_tuple(cluster.memory_work(index)); })
        .def("spans", &spans);
    nb::class_<Shares>(module, "Shares")
        .def("__init__", [](Shares *self,
                            const std::vector<ShareTuple> &tuples) { new (self) Shares{shares_of(tuples)}; })
        .def("tuples", &tuples_of);
    nb::class_<DecodeShares>(module, "DecodeShares")
        .def(nb::init<std::size_t, double, double, double, std::vector<double>>())
        .def("of", &decode_shares);
    nb::class_<TokenTimes>(module, "TokenTimes")
        .def(nb::init<const std::vector<std::int64_t> &>())
        .def("draw", [](TokenTimes &times, double now_s,
                        const Numbers &requests) { return times.draw(now_s, span(requests)); })
        .def("drawn", [](const TokenTimes &times) { return by_request(times, &TokenTimes::drawn); })
        .def("first_s", [](const TokenTimes &times) { return by_request(times, &TokenTimes::first_s); })
        .def("longest_gap_s",
             [](const TokenTimes &times) { return by_request(times, &TokenTimes::longest_gap_s); })
        .def("gaps", &gaps);
}
