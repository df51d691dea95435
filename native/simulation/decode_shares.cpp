#include "lamina/decode_shares.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace lamina {

DecodeShares::DecodeShares(std::size_t memories, double receive_row_s, double send_row_s, double token_s,
                           std::vector<double> attend_s)
    : receive_row_s_(receive_row_s), send_row_s_(send_row_s), token_s_(token_s),
      attend_s_(std::move(attend_s)), workers_(memories) {}

std::vector<Share> DecodeShares::of(std::span<const std::int64_t> homes,
                                    const std::vector<std::int64_t> &tokens, const std::vector<Share> &more) {
    if (homes.size() != tokens.size())
        throw std::invalid_argument("homes and tokens differ in length");
    const auto exists = [this](std::size_t worker) { return worker < workers_.size(); };
    if (!std::all_of(homes.begin(), homes.end(), exists) ||
        !std::all_of(more.begin(), more.end(), [&](const Share &share) { return exists(share.worker); }))
        throw std::out_of_range("a row is on a memory worker that does not exist");

    std::vector<Share> shares;
    shares.reserve(homes.size() + more.size());
    for (std::size_t i = 0; i < homes.size(); ++i) {
        Worker &worker = workers_[static_cast<std::size_t>(homes[i])];
        place_of(static_cast<std::size_t>(homes[i]), shares);
        worker.rows += 1;
        worker.tokens += tokens[i] + 1;
    }
    const auto forget = [&] {
        for (const Share &share : shares)
            workers_[share.worker] = {};
    };
    if (std::any_of(shares.begin(), shares.end(),
                    [this](const Share &share) { return workers_[share.worker].rows >= attend_s_.size(); })) {
        forget();
        throw std::out_of_range("a worker has more rows than attend_s has times for");
    }
    for (Share &share : shares) {
        const Worker &worker = workers_[share.worker];
        const double rows = static_cast<double>(worker.rows);
        share.receive_s = rows * receive_row_s_;
        share.attention_s = attend_s_[worker.rows] + static_cast<double>(worker.tokens) * token_s_;
        share.send_s = rows * send_row_s_;
    }
    for (const Share &added : more) {
        Share &share = shares[place_of(added.worker, shares)];
        share.receive_s += added.receive_s;
        share.attention_s += added.attention_s;
        share.send_s += added.send_s;
    }
    forget();
    return shares;
}

std::size_t DecodeShares::place_of(std::size_t worker, std::vector<Share> &shares) {
    std::size_t &place = workers_[worker].place;
    if (place == NONE) {
        place = shares.size();
        shares.push_back({worker, 0, 0, 0});
    }
    return place;
}

} // namespace lamina
