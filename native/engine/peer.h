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
        static constexpr std::uint32_t kNoBound = ~std::uint32_t{0};
        // Of batches: beyond so many in flight the provider may refuse one, as it did since the link was last idle. It
        // also refuses early when the target pauses: such a bound grows again.
        std::uint32_t most_ops = kNoBound;
        std::uint64_t kept_for = 0;         // the transfer for which room is kept ...
        std::int64_t kept_until_ns = 0;     // ... until then
        std::int64_t last_progress_ns = 0;  // the last completion, or the first post after idleness
        std::int64_t reported_ns = 0;       // when it was last said that nothing completes
        // Since when the NIC takes nothing, with nothing in flight that could make room; 0: it does. A NIC that cannot
        // connect says no more than that.
        std::int64_t refused_ns = 0;
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
