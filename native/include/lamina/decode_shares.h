// What a decode step asks of every memory worker in one attention. Nothing here knows Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lamina {

// Seconds of a memory worker: what its network card takes for each row, in and out; attention, for any number
// of rows and for each token that they see.
class DecodeShares {
public:
    DecodeShares(std::size_t memories, double receive_row_s, double send_row_s, double token_s,
                 std::vector<double> attend_s);

    // Into shares [3, memories], which it overwrites: receiving, attending, sending. Row i has its keys and
    // values on worker homes[i] and sees tokens[i] of them besides its own. Throws std::invalid_argument for
    // arrays of different lengths, std::out_of_range for a worker or a number of rows that does not exist.
    void of(const std::vector<std::size_t> &homes, const std::vector<std::int64_t> &tokens, double *shares);

    std::size_t memories() const { return rows_.size(); }

private:
    double receive_row_s_, send_row_s_, token_s_;
    std::vector<double> attend_s_;      // by rows
    std::vector<std::size_t> rows_;     // by worker, and zero between calls
    std::vector<std::int64_t> tokens_;  // the same
    std::vector<std::size_t> involved_; // workers with rows, in the order they came
};

} // namespace lamina
