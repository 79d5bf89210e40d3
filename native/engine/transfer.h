// One submission on its way: what is to be written or sent, how far it is, and how it ends.
//
// Threads:  made by the submitting thread, then owned by the group's progress thread; `cancelled` from any thread.
// Failure:  the first error is kept; the end is reported once, after the last posted operation is retired.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "engine/counters.h"
#include "engine/pages.h"

namespace fkv {

// Where a peer can be reached: for each of its groups the addresses of its rails.
struct Peer {
    Epoch epoch{};
    std::vector<std::vector<std::vector<std::byte>>> groups;  // [group][rail] -> address bytes

    // Handles in the address tables of our rails: [local group][remote group][pair]; each local group's entry belongs
    // to that group's progress thread and is filled at the first use.
    struct Link {
        std::uint32_t local_rail;
        std::uint32_t remote_rail;
        PeerAddress address;
        std::uint32_t ops_in_flight = 0;  // writes and frames, of one rail's
        std::uint32_t frames_in_flight = 0;
    };
    std::vector<std::vector<std::vector<Link>>> links;

    std::atomic<bool> removed{false};
};

struct Transfer {
    enum class Kind : std::uint8_t { kWrite, kMessage };

    std::uint64_t id = 0;
    Kind kind = Kind::kWrite;
    std::shared_ptr<Peer> peer;
    std::vector<PagePiece> pieces;
    CounterToken token;
    std::vector<std::byte> message;  // kMessage: what to send, cut into frames while posting

    std::atomic<bool> cancelled{false};

    // Progress thread only, from here on.
    PageCursor cursor;
    PlannedWrite planned{};
    std::size_t message_offset = 0;  // of the next frame
    bool has_planned = false;        // `planned` was taken from the cursor and could not be posted yet
    bool all_posted = false;
    bool exhausted = false;  // all posted, or nothing more will be
    bool failed = false;
    std::uint32_t outstanding = 0;
    std::size_t live_index = 0;  // in the group's list of transfers
    std::uint64_t bytes_done = 0;
    OpError error;
};

}  // namespace fkv
