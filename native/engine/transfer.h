// One submission on its way: what is to be written or sent, how far it is, and how it ends.
//
// Threads:  made by the submitting thread, then owned by the group's progress thread; `cancelled` from any thread.
// Failure:  the first error is kept; the end is reported once, after the last posted operation is retired.
#pragma once

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "engine/counters.h"
#include "engine/pages.h"
#include "engine/peer.h"
#include "engine/watch.h"

namespace fkv {

// Pages that an operation stood for, to say which ones failed.
struct PageRange {
    std::uint32_t piece = 0;
    std::uint64_t first = 0;
    std::uint64_t count = 0;
};

// Writes that were posted without an immediate, one after the other on the same link. The next one there answers for
// them, with the sum of their units.
struct Batch {
    Peer::Link* link = nullptr;  // null: there are none
    std::uint32_t num_writes = 0;
    std::uint64_t units = 0;
    std::uint64_t nbytes = 0;
    bool refused = false;  // the provider would not take the one that was to follow
};

struct Transfer {
    enum class Kind : std::uint8_t {
        kWrite,
        kRead,  // the pieces' src is where the data goes
        kMessage,
        kSignal,   // immediates without data
        kFlush,    // nothing; it ends when what was written before on the same rails is in the target's memory
        kConnect,  // nothing; it ends when every rail has reached its peer
    };

    std::uint64_t id = 0;
    Kind kind = Kind::kWrite;
    std::shared_ptr<Peer> peer;
    std::vector<PagePiece> pieces;
    std::uint64_t nbytes = 0;  // of all pieces or the message
    CounterToken token;
    std::vector<std::byte> message;                  // kMessage: what to send, cut into frames while posting
    std::shared_ptr<const RemoteRegion> signal_dst;  // not pages: a region at the peer; nothing is written there
    std::uint64_t signal_units = 0;                  // kSignal: units left to post, or with no token ...
    std::uint32_t user_value = 0;                    // ... the bits of a user event
    std::int64_t deadline_ns = 0;                    // 0: none
    bool urgent = false;                             // small: goes before bulk
    std::shared_ptr<const Watch> watch;              // what its pieces' layers wait for; null: nothing
    std::uint64_t step = 0;                          // ... in this step

    std::atomic<bool> cancelled{false};

    // Progress thread only, from here on.
    PageCursor cursor;
    PlannedWrite planned{};
    PlannedWrite following{};  // the one after it, where that one may answer for it
    Batch batch;
    std::size_t message_offset = 0;  // of the next frame
    std::size_t next_link = 0;       // kFlush, kConnect: to post on
    bool has_planned = false;        // `planned` was taken from the cursor and could not be posted yet
    bool has_following = false;
    bool all_posted = false;
    bool exhausted = false;  // all posted, or nothing more will be
    bool failed = false;
    std::uint64_t waits_for = 0;  // the watch's word before which nothing more can be posted; 0: none
    bool expired = false;         // its deadline passed before everything was posted
    std::uint32_t outstanding = 0;
    std::uint32_t outstanding_plain = 0;  // writes without an immediate that a later immediate answers for
    std::int64_t waits_since_ns = 0;      // for a rail that takes its next operation; 0: it does not
    std::int64_t reported_ns = 0;         // when it was last said that it is held up
    std::size_t live_index = 0;           // in the sender's list of transfers
    std::uint64_t bytes_done = 0;
    OpError error;
    std::vector<PageRange> failed_pages;

    // The first error is the cause, later ones its echo.
    void fail(OpError cause) {
        if (failed) return;
        failed = true;
        error = std::move(cause);
    }
};

}  // namespace fkv
