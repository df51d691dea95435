#include "lamina/token_times.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace lamina {

TokenTimes::TokenTimes(const std::vector<std::int64_t> &tokens)
    : first_s_(tokens.size(), std::numeric_limits<double>::quiet_NaN()) {
    requests_.reserve(tokens.size());
    for (const std::int64_t own : tokens)
        requests_.push_back({.tokens = own});
}

std::vector<std::size_t> TokenTimes::draw(double now_s, std::span<const std::int64_t> requests) {
    std::vector<std::size_t> ended;
    const std::size_t before = gaps_.size();
    for (std::size_t place = 0; place < requests.size(); ++place) {
        const auto index = static_cast<std::size_t>(requests[place]);
        Request &own = requests_.at(index);
        if (own.drawn == own.tokens)
            throw std::invalid_argument("request " + std::to_string(index) + " has all of its " +
                                        std::to_string(own.tokens) + " tokens");
        if (own.drawn == 0) {
            first_s_[index] = now_s;
        } else {
            const double gap = now_s - own.last_s;
            own.longest_gap_s = std::max(own.longest_gap_s, gap);
            // Most requests of a step have waited equally long.
            const auto known =
                std::find(gaps_.begin() + static_cast<std::ptrdiff_t>(before), gaps_.end(), gap);
            if (known == gaps_.end()) {
                gaps_.push_back(gap);
                gap_counts_.push_back(1);
            } else {
                ++gap_counts_[static_cast<std::size_t>(known - gaps_.begin())];
            }
        }
        own.last_s = now_s;
        if (++own.drawn == own.tokens)
            ended.push_back(place);
    }
    return ended;
}

double TokenTimes::longest_gap_s(std::size_t request) const {
    const Request &own = requests_[request];
    return own.drawn > 1 ? own.longest_gap_s : std::numeric_limits<double>::quiet_NaN();
}

} // namespace lamina
