// What a decode step asks of every memory worker in one attention. Nothing here knows Python.
#pragma once

#include "lamina/virtual_cluster.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace lamina {

// Seconds of a memory worker: what its network card takes for each row, in and out; attention, for any number
// of rows and for each token that they see.
class DecodeShares {
public:
    DecodeShares(std::size_t memories, double receive_row_s, double send_row_s, double token_s,
                 std::vector<double> attend_s);

    // Of every worker with a part in the attention, once. Row i has its keys and values on worker homes[i]
    // and sees tokens[i] of them besides its own; `more` is added to what the rows come to, in its order.
    // Throws std::invalid_argument for arrays of different lengths, std::out_of_range for a worker or a
    // number of rows that does not exist.
    std::vector<Share> of(std::span<const std::int64_t> homes, const std::vector<std::int64_t> &tokens,
                          const std::vector<Share> &more);

private:
    double receive_row_s_, send_row_s_, token_s_;
    struct Worker {
        std::size_t rows = 0;
        std::int64_t tokens = 0;
        std::size_t place = NONE; // among the shares
    };
    static constexpr std::size_t NONE = static_cast<std::size_t>(-1);

    std::size_t place_of(std::size_t worker, std::vector<Share> &shares);

    std::vector<double> attend_s_; // by rows
    std::vector<Worker> workers_;  // as they are here between calls
};

} // namespace lamina
