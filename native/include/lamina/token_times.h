// When requests get their tokens, in virtual time. Nothing here knows Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace lamina {

// Requests are numbered from 0; request i gets tokens[i] tokens.
class TokenTimes {
public:
    explicit TokenTimes(const std::vector<std::int64_t> &tokens);

    // Each of `requests` gets its next token. Returns the indices in `requests` of those for which it is
    // the last. Throws std::out_of_range for one that does not exist, std::invalid_argument for one that has
    // all its tokens.
    std::vector<std::size_t> draw(double now_s, std::span<const std::int64_t> requests);

    std::size_t count() const { return requests_.size(); }
    std::int64_t drawn(std::size_t request) const { return requests_[request].drawn; }
    // NaN for a request without a first token, or without two of them.
    double first_s(std::size_t request) const { return first_s_[request]; }
    double longest_gap_s(std::size_t request) const;

    // Times between consecutive tokens of one request, in order of occurrence, and how often each occurred; a
    // time may be listed twice.
    const std::vector<double> &gaps() const { return gaps_; }
    const std::vector<std::int64_t> &gap_counts() const { return gap_counts_; }

private:
    struct Request {
        std::int64_t tokens, drawn = 0;
        double last_s = 0, longest_gap_s = 0;
    };

    std::vector<Request> requests_;
    std::vector<double> first_s_;
    std::vector<double> gaps_;
    std::vector<std::int64_t> gap_counts_;
};

} // namespace lamina
