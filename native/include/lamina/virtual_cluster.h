// Compute and memory workers in virtual time: when the slices and attentions of steps begin and end. Each
// step gives the placement and order of its work; only durations are modelled. Nothing here knows Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <queue>
#include <unordered_map>
#include <vector>

namespace lamina {

// One memory worker's part in each attention of a step, in seconds: its network card receives, it attends,
// its card sends.
struct Share {
    std::size_t worker;
    double receive_s, attention_s, send_s;
};

// Of the parts of one step, in seconds.
struct StepTimes {
    double first_s, inner_s, last_s; // slices 0, 1 .. n - 1 and n
    double chunks_s;                 // attention of prompt chunks to themselves, on the replica after a slice
    double send_s, receive_s;        // the replica's network card: to all memory workers, from all of them
    double context_s;                // moving the context to another replica
    std::vector<Share> shares;
};

// One step of one lane: slices 0 .. n with an attention after each but the last.
struct VirtualStep {
    std::int64_t number;
    std::vector<std::size_t> replicas; // [n + 1]: the replica of slice k
    std::int64_t tick, ticks;          // when slice 0 is due, and how much later each slice is
    StepTimes times;
    std::vector<std::int64_t> behind; // steps of other lanes that store K and V which its attentions see
};

struct Finished {
    double time_s;
    std::size_t lane;
    std::int64_t number;
    double busy_s;   // in its slices
    double waited_s; // mean wait for slices whose replica was idle, times the attentions; 0 without any
};

enum class Stage { Slice, ChunkAttention, Attention };

struct VirtualSpan {
    Stage stage;
    std::size_t worker, lane;
    double begin_s, end_s;
};

// Seconds that one worker has worked so far.
struct Work {
    double busy_s = 0;                // in slices and attention
    double send_s = 0, receive_s = 0; // of its network card, each way
};

class VirtualCluster {
public:
    // latency_s: of every message, besides the time it occupies network cards. recorded: spans kept at most.
    VirtualCluster(std::size_t replicas, std::size_t memories, std::size_t lanes, double latency_s,
                   std::size_t recorded);

    // The lane's next step, behind those it has. Throws std::invalid_argument for a step that cannot be run.
    void submit(std::size_t lane, double now_s, VirtualStep step);

    // Plays on to the end of the next step, or to until_s if none ends before.
    std::optional<Finished> advance(double until_s);

    // Work that begins from now on takes `factor` times as long.
    void slow_replica(std::size_t replica, double factor) { replicas_.at(replica).factor = factor; }
    void slow_memory(std::size_t memory, double factor) { memories_.at(memory).factor = factor; }

    Work replica_work(std::size_t replica) const { return replicas_.at(replica).work; }
    Work memory_work(std::size_t memory) const { return memories_.at(memory).work; }
    const std::deque<VirtualSpan> &spans() const { return spans_; }

private:
    enum class Kind : std::uint8_t { Ready, SliceEnd, Free, Arrived };

    struct Event {
        double time_s;
        std::uint64_t order; // breaks ties in time: the event pushed first
        Kind kind;
        std::uint32_t index; // of a lane, or of a replica that becomes free
        // A replica that becomes free chooses among all slices that are ready then.
        bool operator>(const Event &other) const {
            if (time_s != other.time_s)
                return time_s > other.time_s;
            const bool free = kind == Kind::Free, other_free = other.kind == Kind::Free;
            return free != other_free ? free : order > other.order;
        }
    };

    struct Due {
        std::int64_t tick;
        std::size_t lane;
        bool operator>(const Due &other) const {
            return tick != other.tick ? tick > other.tick : lane > other.lane;
        }
    };

    template <class T> using Earliest = std::priority_queue<T, std::vector<T>, std::greater<T>>;

    struct Replica {
        Earliest<Due> due; // slices that could run
        bool busy = false;
        double sent_s = 0, received_s = 0; // until when its network card is busy, each way
        double factor = 1;
        Work work;
    };

    struct Memory {
        double received_s = 0, attended_s = 0, sent_s = 0;
        double factor = 1;
        Work work;
    };

    struct Lane {
        std::deque<VirtualStep> steps;
        std::size_t slice = 0;
        double context_s = 0; // when the context of the next slice has arrived
        double busy_s = 0;
        double since_s = 0;  // when the latest slice's replica was done with it
        double waited_s = 0; // between slices, where the replica was idle when the next one could begin
        std::size_t waits = 0;
    };

    void push(double time_s, Kind kind, std::size_t index);
    void ready(std::size_t lane);
    void begin_slice(std::size_t replica, double now_s);
    std::optional<Finished> end_slice(std::size_t lane, double now_s);
    void send(Lane &lane, std::size_t index, double now_s);
    void attend(std::size_t lane, double now_s);
    bool parked(const Lane &lane) const;
    void store(const Lane &lane, double now_s);
    void record(Stage stage, std::size_t worker, std::size_t lane, double begin_s, double end_s);

    std::vector<Replica> replicas_;
    std::vector<Memory> memories_;
    std::vector<Lane> lanes_;
    double latency_s_;
    std::size_t recorded_;
    Earliest<Event> events_;
    std::uint64_t order_ = 0;
    // By step in flight: its attentions whose K and V are stored.
    std::unordered_map<std::int64_t, std::size_t> stored_;
    std::vector<std::size_t> parked_; // lanes whose attention waits for K and V of another lane
    std::deque<VirtualSpan> spans_;
};

} // namespace lamina
