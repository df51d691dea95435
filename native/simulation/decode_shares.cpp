#include "lamina/decode_shares.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace lamina {

DecodeShares::DecodeShares(std::size_t memories, double receive_row_s, double send_row_s, double token_s,
                           std::vector<double> attend_s)
    : receive_row_s_(receive_row_s), send_row_s_(send_row_s), token_s_(token_s),
      attend_s_(std::move(attend_s)), rows_(memories), tokens_(memories) {}

void DecodeShares::of(const std::vector<std::size_t> &homes, const std::vector<std::int64_t> &tokens,
                      double *shares) {
    if (homes.size() != tokens.size())
        throw std::invalid_argument("homes and tokens differ in length");
    if (homes.size() >= attend_s_.size())
        throw std::out_of_range("more rows than there are times for");
    const std::size_t count = memories();
    if (std::any_of(homes.begin(), homes.end(), [count](std::size_t home) { return home >= count; }))
        throw std::out_of_range("a row is on a memory worker that does not exist");
    for (std::size_t i = 0; i < homes.size(); ++i) {
        if (rows_[homes[i]]++ == 0)
            involved_.push_back(homes[i]);
        tokens_[homes[i]] += tokens[i] + 1;
    }
    std::fill_n(shares, 3 * count, 0.0);
    for (const std::size_t home : involved_) {
        const double rows = static_cast<double>(rows_[home]);
        shares[home] = rows * receive_row_s_;
        shares[count + home] = attend_s_[rows_[home]] + static_cast<double>(tokens_[home]) * token_s_;
        shares[2 * count + home] = rows * send_row_s_;
        rows_[home] = 0;
        tokens_[home] = 0;
    }
    involved_.clear();
}

} // namespace lamina
