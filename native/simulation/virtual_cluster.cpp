#include "lamina/virtual_cluster.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace lamina {

VirtualCluster::VirtualCluster(std::size_t replicas, std::size_t memories, std::size_t lanes,
                               double latency_s, std::size_t recorded)
    : replicas_(replicas), memories_(memories), lanes_(lanes), latency_s_(latency_s), recorded_(recorded) {}

void VirtualCluster::submit(std::size_t lane, double now_s, VirtualStep step) {
    if (step.replicas.size() < 2)
        throw std::invalid_argument("a step needs at least two slices, with an attention between them");
    for (const std::size_t replica : step.replicas)
        if (replica >= replicas_.size())
            throw std::invalid_argument("a step names a replica that does not exist");
    for (const Share &share : step.times.shares)
        if (share.worker >= memories_.size())
            throw std::invalid_argument("a step names a memory worker that does not exist");
    Lane &own = lanes_.at(lane);
    stored_[step.number] = 0;
    own.steps.push_back(std::move(step));
    if (own.steps.size() == 1)
        push(now_s, Kind::Ready, lane);
}

std::optional<Finished> VirtualCluster::advance(double until_s) {
    while (!events_.empty() && events_.top().time_s <= until_s) {
        const Event event = events_.top();
        events_.pop();
        switch (event.kind) {
        case Kind::Ready: {
            Lane &lane = lanes_[event.index];
            const std::vector<std::size_t> &order = lane.steps.front().replicas;
            if (lane.slice > 0 && order[lane.slice - 1] == order[lane.slice] &&
                !replicas_[order[lane.slice]].busy) {
                lane.waited_s += event.time_s - lane.since_s;
                lane.waits += 1;
            }
            ready(event.index);
            begin_slice(lane.steps.front().replicas[lane.slice], event.time_s);
            break;
        }
        case Kind::SliceEnd:
            if (const auto finished = end_slice(event.index, event.time_s))
                return finished;
            break;
        case Kind::Free:
            replicas_[event.index].busy = false;
            begin_slice(event.index, event.time_s);
            break;
        case Kind::Arrived:
            if (parked(lanes_[event.index]))
                parked_.push_back(event.index);
            else
                attend(event.index, event.time_s);
            break;
        }
    }
    return std::nullopt;
}

void VirtualCluster::push(double time_s, Kind kind, std::size_t index) {
    events_.push({time_s, order_++, kind, static_cast<std::uint32_t>(index)});
}

void VirtualCluster::ready(std::size_t lane) {
    const Lane &own = lanes_[lane];
    const VirtualStep &step = own.steps.front();
    const auto tick = step.tick + step.ticks * static_cast<std::int64_t>(own.slice);
    replicas_[step.replicas[own.slice]].due.push({tick, lane});
}

void VirtualCluster::begin_slice(std::size_t replica, double now_s) {
    Replica &own = replicas_[replica];
    if (own.busy || own.due.empty())
        return;
    const std::size_t index = own.due.top().lane;
    own.due.pop();
    Lane &lane = lanes_[index];
    const VirtualStep &step = lane.steps.front();
    const bool last = lane.slice + 1 == step.replicas.size();
    const double seconds = own.factor * (lane.slice == 0 ? step.times.first_s
                                         : last          ? step.times.last_s
                                                         : step.times.inner_s);
    own.busy = true;
    own.work.busy_s += seconds;
    lane.busy_s += seconds;
    record(Stage::Slice, replica, index, now_s, now_s + seconds);
    push(now_s + seconds, Kind::SliceEnd, index);
}

std::optional<Finished> VirtualCluster::end_slice(std::size_t index, double now_s) {
    Lane &lane = lanes_[index];
    const VirtualStep &step = lane.steps.front();
    const std::size_t replica = step.replicas[lane.slice];
    if (lane.slice + 1 < step.replicas.size()) {
        send(lane, index, now_s);
        return std::nullopt;
    }
    const double attentions = static_cast<double>(step.replicas.size() - 1);
    const double waited_s = lane.waits ? attentions * lane.waited_s / static_cast<double>(lane.waits) : 0.0;
    const Finished finished{now_s, index, step.number, lane.busy_s, waited_s};
    stored_.erase(step.number);
    lane.steps.pop_front();
    lane.slice = 0;
    lane.busy_s = lane.waited_s = 0;
    lane.waits = 0;
    if (!lane.steps.empty()) {
        if (lane.steps.front().replicas.front() == replica) // the same slice: no attention lies between
            ready(index);
        else // the tokens drawn go to the first stage
            push(now_s + latency_s_, Kind::Ready, index);
    }
    push(now_s, Kind::Free, replica);
    return finished;
}

// After slice k: q, k and v go to the memory workers; chunks attend to themselves; the context goes to slice
// k+1.
void VirtualCluster::send(Lane &lane, std::size_t index, double now_s) {
    const VirtualStep &step = lane.steps.front();
    const std::size_t number = step.replicas[lane.slice];
    Replica &replica = replicas_[number];
    replica.sent_s = std::max(replica.sent_s, now_s) + step.times.send_s;
    replica.work.send_s += step.times.send_s;
    push(replica.sent_s + latency_s_, Kind::Arrived, index);

    const double chunks_s = replica.factor * step.times.chunks_s;
    const double free_s = now_s + chunks_s;
    if (chunks_s > 0) {
        replica.work.busy_s += chunks_s;
        lane.busy_s += chunks_s;
        record(Stage::ChunkAttention, number, index, now_s, free_s);
    }
    lane.context_s = lane.since_s = free_s;
    if (step.replicas[lane.slice + 1] != number) {
        replica.sent_s = std::max(replica.sent_s, free_s) + step.times.context_s;
        replica.work.send_s += step.times.context_s;
        lane.context_s = replica.sent_s + latency_s_;
    }
    if (free_s == now_s && (events_.empty() || events_.top().time_s > now_s)) { // it would be the next event
        replica.busy = false;
        begin_slice(number, now_s);
    } else {
        push(free_s, Kind::Free, number);
    }
}

bool VirtualCluster::parked(const Lane &lane) const {
    const VirtualStep &step = lane.steps.front();
    return std::any_of(step.behind.begin(), step.behind.end(), [&](std::int64_t earlier) {
        const auto found = stored_.find(earlier);
        return found != stored_.end() && found->second <= lane.slice;
    });
}

// K and V of the lane's slice are stored: lanes whose attention waited for them go on.
void VirtualCluster::store(const Lane &lane, double now_s) {
    stored_[lane.steps.front().number] = lane.slice + 1;
    const auto waits = std::stable_partition(parked_.begin(), parked_.end(),
                                             [&](std::size_t index) { return parked(lanes_[index]); });
    for (auto index = waits; index != parked_.end(); ++index)
        push(now_s, Kind::Arrived, *index);
    parked_.erase(waits, parked_.end());
}

// Every memory worker serves lanes in the order in which their messages come; its network card works both
// ways.
void VirtualCluster::attend(std::size_t index, double now_s) {
    Lane &lane = lanes_[index];
    const VirtualStep &step = lane.steps.front();
    store(lane, now_s);
    double first_s = std::numeric_limits<double>::infinity(), last_s = now_s;
    for (const Share &share : step.times.shares) {
        Memory &memory = memories_[share.worker];
        memory.received_s = std::max(memory.received_s, now_s) + share.receive_s;
        const double begin_s = std::max(memory.received_s, memory.attended_s);
        const double seconds = memory.factor * share.attention_s;
        memory.attended_s = begin_s + seconds;
        memory.sent_s = std::max(memory.sent_s, memory.attended_s) + share.send_s;
        memory.work.busy_s += seconds;
        memory.work.receive_s += share.receive_s;
        memory.work.send_s += share.send_s;
        first_s = std::min(first_s, memory.attended_s);
        last_s = std::max(last_s, memory.sent_s);
        record(Stage::Attention, share.worker, index, begin_s, memory.attended_s);
    }
    lane.slice += 1;
    Replica &replica = replicas_[step.replicas[lane.slice]];
    replica.received_s =
        std::max(replica.received_s, std::min(first_s, last_s) + latency_s_) + step.times.receive_s;
    replica.work.receive_s += step.times.receive_s;
    push(std::max({last_s + latency_s_, replica.received_s, lane.context_s}), Kind::Ready, index);
}

void VirtualCluster::record(Stage stage, std::size_t worker, std::size_t lane, double begin_s, double end_s) {
    if (recorded_ == 0)
        return;
    if (spans_.size() == recorded_)
        spans_.pop_front();
    spans_.push_back({stage, worker, lane, begin_s, end_s});
}

} // namespace lamina
