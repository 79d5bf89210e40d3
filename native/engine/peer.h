// Another engine: where it can be reached, and what is on its way to it.
//
// Threads: a side's links belong to the progress thread of our group; the rest is constant or atomic.
#pragma once

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "base/clock.h"
#include "engine/process.h"
#include "engine/region.h"
#include "engine/stats.h"

namespace fkv {

struct Transfer;

struct Peer {
    // One of our rails paired with one of the peer's; belongs to our group's progress thread.
    struct Link {
        static constexpr std::int64_t kAvoidedNs = 100 * kMillisecond, kLongestAvoidedNs = 2 * kSecond;
        // An operation has failed. The others in flight do so, too, which says nothing new.
        void failed(std::int64_t now) {
            has_failed = true;
            if (avoided_for_ns && !tried) return;
            avoided_for_ns = std::clamp(2 * avoided_for_ns, kAvoidedNs, kLongestAvoidedNs);
            avoided_until_ns = now + avoided_for_ns;
            tried = false;
        }
        // An operation was posted: if it tries the link again, the others wait for what becomes of it.
        void posted(std::int64_t now) {
            if (!avoided_for_ns) return;
            avoided_until_ns = now + avoided_for_ns;
            tried = true;
        }
        void works() {
            avoided_until_ns = avoided_for_ns = 0;
            tried = false;
        }

        // Whether anything was ever posted, or could not be.
        bool was_used() const { return last_progress_ns != 0; }

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
        std::uint64_t kept_for = 0;      // the transfer for which room is kept ...
        std::int64_t kept_until_ns = 0;  // ... until then
        // What fails at once has nothing in flight and would take everything: after a failure others go first for a
        // while, longer each time, and one write tries it again.
        std::int64_t avoided_until_ns = 0;
        std::int64_t avoided_for_ns = 0;  // 0: the last one did not fail
        bool tried = false;               // again, and it is not known yet how that went
        // An operation has failed since we know the peer. Where that breaks the connection, and the next post makes
        // another one, a flush on that says nothing of what the broken one still holds.
        bool has_failed = false;
        std::int64_t last_progress_ns = 0;  // the last completion, or the first post after idleness
        std::int64_t reported_ns = 0;       // when it was last said that nothing completes
        // Since when the NIC takes nothing, with nothing in flight that could make room; 0: it does. A NIC that cannot
        // connect says no more than that.
        std::int64_t refused_ns = 0;
    };
    // How far one of our groups and one of the peer's are with taking leave of each other.
    struct Goodbye {
        struct Way {
            std::size_t link;
            bool said = false;
        };
        bool begun = false;          // by us
        std::vector<Way> ways;       // over which we say so
        std::uint64_t heard = 0;     // how often the peer has
        std::uint64_t expected = 0;  // how often it will have; 0: it has not begun
        bool counted = false;        // in pairs_heard

        bool all_heard() const { return expected > 0 && heard >= expected; }
        bool all_said() const {
            return begun && std::all_of(ways.begin(), ways.end(), [](const Way& way) { return way.said; });
        }
    };
    // What one of our groups keeps of this peer: [remote group][pair], filled at the first use. The addresses stay in
    // the NICs' tables as long as the engine lives: taking one out while that peer may still send crashes shm (1.17).
    struct Side {
        std::vector<std::vector<Link>> links;
        std::vector<Goodbye> goodbyes;       // [remote group]
        std::deque<Transfer*> messages;      // not posted yet, in order
        std::uint64_t refused_in_round = 0;  // of the sender, when a transfer could post nothing
        PeerStats stats;

        const Link* find_link(std::uint32_t remote_group, std::size_t pair) const {
            if (remote_group >= links.size() || pair >= links[remote_group].size()) return nullptr;
            return &links[remote_group][pair];
        }
    };

    bool is_self() const { return epoch == owner; }
    // Whether it has said goodbye wherever it may have posted something, and all that came before has been delivered.
    bool has_left() const { return pairs_heard.load() == sides.size() * groups.size(); }

    Epoch epoch{};
    Epoch owner{};                                            // the engine that knows it: nobody else may use its links
    std::vector<std::vector<std::vector<std::byte>>> groups;  // [group][rail] -> address bytes
    std::vector<std::unique_ptr<Side>> sides;                 // [our group]
    std::optional<ProcessId> process;                         // where it runs, if it says so
    std::shared_ptr<PeerKeys> keys;                           // the same for every Peer of this epoch
    std::atomic<bool> removed{false};
    std::atomic<bool> watched{false};         // we listen for its heartbeats, and it is to listen for ours
    std::atomic<bool> silent{false};          // for longer than it may be, or it has exited
    std::atomic<bool> leaving{false};         // it has said goodbye: nothing is posted to it any more
    std::atomic<std::size_t> pairs_heard{0};  // of our groups and the peer's, in which all goodbyes have come
};

}  // namespace fkv
