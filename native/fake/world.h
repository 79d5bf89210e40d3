// The state behind FakeFabric and its NICs, and the steps that operations make. Internal to fake/.
//
// Threads:  every function here is called with `mutex` held.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <utility>

#include "base/event_fd.h"
#include "fake/fake_fabric.h"

namespace fkv::fake {

// Of fi_errno(3), beyond what errno has. The fake does without libfabric's headers.
constexpr int kErrTruncated = 265;  // FI_ETRUNC

struct Mr {
    std::uint64_t id;
    std::byte* base;
    std::uint64_t nbytes;
    std::uint64_t remote_base;
};

// One entry of a completion queue.
struct Entry {
    bool failed = false;
    bool receive = false;   // belongs to a posted receive
    bool frees_tx = false;  // gives back a place of the transmit queue
    Completion done{};      // not failed
    FailedCompletion failure{};
};

struct Receive {
    MessageOp op{};
    std::uint64_t local_mr = 0;
};

struct NicState {
    NicId id = 0;
    FakeProfile profile;
    NicInfo info;
    std::unique_ptr<EventFd> bell;
    std::map<std::uint64_t, Mr> mrs;  // by rkey
    std::vector<NicId> peers;         // by PeerAddress; kAnyNic where removed
    std::deque<Receive> receives;
    std::deque<Entry> cq;
    std::set<const OpContext*> contexts;  // posted and not yet read from the queue
    std::size_t tx_used = 0;              // the same, of writes and sends
    std::size_t rx_used = 0;              // the same, of receives
    unsigned storm = 0;                   // polls until a storm of kAgain ends
    bool gone = false;                    // killed or its endpoint closed: nothing reaches its memory any more
    bool closed = false;                  // its endpoint
    bool destroyed = false;
    bool frozen = false;
    Death death = Death::kErrors;

    std::size_t cq_depth() const { return profile.tx_depth + profile.rx_depth; }
    bool cq_full() const { return cq.size() >= cq_depth(); }
};

// One of the two ways of an operation: to the target and back to the sender.
struct Track {
    std::uint64_t due = 0;
    RuleId held = 0;
    bool ruled = false;  // the rules have been asked about the coming step
};

// A run of an operation's bytes on both sides. Reads and messages have one.
struct Part {
    const std::byte* source = nullptr;
    std::uint64_t nbytes = 0;
    std::uint64_t dst_address = 0;
    std::uint64_t rkey = 0;
    std::uint64_t local_mr = 0;    // id, 0: none
    std::byte* landing = nullptr;  // the target's side, once accepted
    std::uint64_t mr = 0;          // the target's registration, 0 where nobody checks
};

struct Op {
    OpView view{};
    std::vector<Part> parts;
    std::byte* local = nullptr;  // of a read: where the data goes
    OpContext* context = nullptr;

    bool uses_local_mr(std::uint64_t id) const {
        return std::any_of(parts.begin(), parts.end(), [&](const auto& part) { return part.local_mr == id; });
    }
    bool uses_mr(std::uint64_t id) const {
        return std::any_of(parts.begin(), parts.end(), [&](const auto& part) { return part.mr == id; });
    }

    Step step = Step::kLeave;  // the coming one, towards the target
    Track target{}, back{};
    bool target_done = false;
    bool source_done = false;
    bool lost = false;       // the peer died silently
    bool delivered = false;  // the sender must not hear before the data is in place
    bool early = false;      // the sender may hear before the target has accepted
    bool reported = false;   // the sender has heard of success
    Step back_after{};       // else the sender hears when this step is done
    bool failed = false;
    bool with_context = true;
    bool as_receive = false;
    OpError error{};

    bool accepted = false;    // by the target
    Receive receive{};        // of an accepted message
    std::uint64_t split = 0;  // of the payload so many bytes land together, and then the rest, or the other way round
    bool back_to_front = false;
    std::uint64_t checksum = 0;   // of the payload when it was posted
    std::vector<std::byte> wire;  // the payload, where the source may change before it lands
    bool on_wire = false;
};

struct HeldRule {
    RuleId id = 0;
    Rule rule;
    unsigned matched = 0;
    unsigned fired = 0;
};

struct World {
    std::mutex mutex;
    std::condition_variable rule_fired;
    std::uint64_t seed = 0;
    std::mt19937_64 random;
    std::uint64_t clock = 0;
    std::uint64_t next_id = 1;  // of rules and registrations
    std::uint64_t magic = 0;    // tells this fabric's addresses from another's
    std::vector<NicState> nics;
    std::list<Op> ops;
    std::vector<HeldRule> rules;
    std::vector<CallFault> faults;
    std::set<std::pair<NicId, NicId>> refused;  // what the first takes nothing for
    // Ordered pairs after a failure: operations with smaller ids than this do not pass.
    std::map<std::pair<NicId, NicId>, std::uint64_t> broken;
    std::vector<std::string> violations;
    Stats stats{};

    // world.cc: operations move.
    void advance(NicId poller);
    void run_to_target(Op& op, NicId poller);
    void run_to_source(Op& op);
    void arrive(Op& op);
    bool accept_remote(Op& op);
    bool accept_part(Op& op, Part& part);
    bool accept_message(Op& op);
    void land(Op& op, bool first);
    void copy(Op& op, std::uint64_t begin, std::uint64_t end);
    void take_onto_wire(Op& op);
    void check_source(const Op& op);
    bool tell_target(Op& op);
    void push(NicState& nic, Entry entry);
    bool is_ordered(const Op& op) const;
    bool is_cut_off(const Op& op) const;  // by an earlier failure of its pair
    bool waits_for_earlier(const Op& op, bool to_target) const;
    bool may_sleep(const NicState& nic) const;

    // faults.cc: operations, calls and NICs go wrong.
    void fail(Op& op, int fi_errno, const std::string& why, Action how = Action::kFail);
    bool pass_rules(Op& op, Track& track, Step step);
    bool act(Op& op, Track& track, HeldRule& held);  // whether the operation may go on
    void kill(NicId nic, Death death);
    void freeze(NicId nic, bool frozen);
    void leave(NicState& nic, Death death);
    void close_endpoint(NicState& nic);
    void close_mr(NicState& nic, std::uint64_t rkey);
    int call_fails(Call call, NicId nic);  // the errno, or 0
    void misused(const NicState& nic, const std::string& what);

    std::vector<NicId> process_of(NicId nic) const;
    std::uint64_t below(std::uint64_t bound) { return bound ? random() % bound : 0; }
    bool percent(unsigned chance) { return below(100) < chance; }
    std::string where() const {
        return "fake fabric, seed " + std::to_string(seed) + ", step " + std::to_string(clock);
    }
    OpError error_of(const NicState& nic, const char* op, int fi_errno, const std::string& why) const;
};

// FNV-1a; only has to notice that a source changed.
inline std::uint64_t checksum_of(const std::vector<Part>& parts) {
    std::uint64_t hash = 0xcbf29ce484222325u;
    for (const auto& part : parts)
        for (std::uint64_t i = 0; i < part.nbytes; ++i)
            hash = (hash ^ static_cast<std::uint64_t>(part.source[i])) * 0x100000001b3u;
    return hash;
}

std::unique_ptr<Nic> make_nic(std::shared_ptr<World> world, NicId id);

}  // namespace fkv::fake
