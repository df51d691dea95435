// The work of a decode step for every memory worker in one attention. Nothing here knows Python.
#pragma once

#include "lamina/virtual_cluster.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace lamina {

// Seconds of a memory worker: its network card's for each row, in and out; attention's by number of rows and
// for each token that they see.
class DecodeShares {
public:
    DecodeShares(std::size_t memories, double receive_row_s, double send_row_s, double token_s,
                 std::vector<double> attend_s);

    // Shares of every worker with a part in the attention, once each. Row i has its keys and values on worker
    // homes[i] and sees tokens[i] of them besides its own; `more` is added to the rows' shares, in its order.
    // Throws std::invalid_argument for arrays of different lengths, std::out_of_range for a worker or a
    // number of rows that does not exist.
    std::vector<Share> of(std::span<const std::int64_t> homes, const std::vector<std::int64_t> &tokens,
                          const std::vector<Share> &more);

private:
    double receive_row_s_, send_row_s_, token_s_;
    struct Worker {
        std::size_t rows = 0;
        std::int64_t tokens = 0;
        std::size_t place = NONE; // index among the shares
    };
    static constexpr std::size_t NONE = static_cast<std::size_t>(-1);

    std::size_t place_of(std::size_t worker, std::vector<Share> &shares);

    std::vector<double> attend_s_; // by rows
    std::vector<Worker> workers_;  // reset to this between calls
};

} // namespace lamina
