// Another engine: where it can be reached, and what is on its way to it.
//
// Threads: a side's links belong to the progress thread of our group; the rest is constant or atomic.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "engine/process.h"
#include "engine/region.h"
#include "engine/stats.h"

namespace fkv {

struct Transfer;

struct Peer {
    // One of our rails paired with one of the peer's; belongs to our group's progress thread.
    struct Link {
        std::uint32_t local_rail;
        std::uint32_t remote_rail;
        PeerAddress address;
        PeerStats* stats;
        std::uint32_t ops_in_flight = 0;  // writes and frames, of one rail's
        std::uint32_t frames_in_flight = 0;
        std::uint64_t bytes_in_flight = 0;
        // Beyond so many in flight the provider may refuse one, as it did in the middle of a batch.
        std::uint32_t most_ops = ~std::uint32_t{0};
        std::int64_t last_progress_ns = 0;  // the last completion, or the first post after idleness
        std::int64_t reported_ns = 0;       // when it was last said that nothing completes
    };
    // What one of our groups keeps of this peer: [remote group][pair], filled at the first use. The addresses stay in
    // the NICs' tables as long as the engine lives: taking one out while that peer may still send crashes shm (1.17).
    struct Side {
        std::vector<std::vector<Link>> links;
        std::deque<Transfer*> messages;  // not posted yet, in order
        PeerStats stats;
    };

    Epoch epoch{};
    Epoch owner{};                                            // the engine that knows it: nobody else may use its links
    std::vector<std::vector<std::vector<std::byte>>> groups;  // [group][rail] -> address bytes
    std::vector<std::unique_ptr<Side>> sides;                 // [our group]
    std::optional<ProcessId> process;                         // where it runs, if it says so
    std::shared_ptr<PeerKeys> keys;                           // the same for every Peer of this epoch
    std::atomic<bool> removed{false};
};

}  // namespace fkv
