// An in-process fabric with a seed, for tests: reliable, but as late, unordered and unhelpful as a provider may be.
//
//     FakeFabric fabric(seed);
//     auto nic = fabric.open_nic(FakeProfile::strict());
//     auto held = fabric.add_rule({.step = Step::kTellTarget, .action = Action::kHold});  // keep one immediate back
//     ... fabric.release(held);
//
// It loses an operation only with an error or with the death of a peer. Data moves by memcpy, as late as the rules of
// Nic allow. The same seed and the same calls give the same run; with engines that have threads of their own the
// calls interleave differently, so there the seed repeats the decisions but not their order.
//
// Owns:     nothing of the caller's; NICs keep the fabric's state alive.
// Threads:  all calls from any thread; one mutex guards everything. Actions run under it.
// Blocking: wait_fired() only, within its bound.
// Failure:  a misuse of Nic that a provider may punish arbitrarily is written down: violations() must stay empty.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fabric/nic.h"
#include "fake/profile.h"

namespace fkv::fake {

struct World;

using NicId = std::uint32_t;  // NICs count from 0 in the order of opening
using RuleId = std::uint64_t;
constexpr NicId kAnyNic = ~NicId{0};

// Stages of an operation, in this order; kTellSource comes at any time after kArrive, or before it where the profile
// lets the sender hear early.
enum class Step : std::uint8_t {
    kLeave,       // posted, nothing has left the sender
    kArrive,      // keys and bounds are checked, a message finds its receive
    kLandFirst,   // first part of the payload is written
    kLandLast,    // the rest is written
    kTellTarget,  // immediate or message is reported
    kTellSource,  // the sender's completion is reported
};

enum class OpKind : std::uint8_t { kWrite, kRead, kSend };

struct OpView {
    std::uint64_t id;  // counts posts from 0, over all NICs
    OpKind kind;
    NicId src, dst;
    std::uint64_t nbytes;
    std::uint64_t dst_address;  // of a write, as posted
    bool has_imm;
    std::uint32_t imm;
};

enum class Action : std::uint8_t {
    kPass,  // only counts and calls
    kHold,  // waits for release(); where order is granted all later operations of the pair wait too
    kFail,
    kFailNoContext,  // an error entry that names no operation is all that the sender gets
    kFailAsReceive,  // the same, and it claims to come from a receive (shm's fast path does that)
    kKillSource,
    kKillTarget,
    kFreezeSource,
    kFreezeTarget,
};

// What happens to operations that are about to make `step`.
struct Rule {
    Step step = Step::kArrive;
    std::function<bool(const OpView&)> match = nullptr;  // null: every operation
    unsigned skip = 0;                                   // let so many matching operations pass first
    unsigned times = 1;                                  // act on so many, then stop
    unsigned one_in = 1;                                 // act on a random one of so many
    Action action = Action::kPass;
    int fi_errno = 5;  // of kFail*: EIO
    Death death = Death::kErrors;
    std::function<void(const OpView&)> call = nullptr;  // runs under the fabric's lock: must not call the fabric

    static constexpr unsigned kAlways = ~0u;
};

// Which set-up call or post fails.
enum class Call : std::uint8_t { kOpen, kRegister, kDeregister, kInsert, kPost };
struct CallFault {
    Call call;
    NicId nic = kAnyNic;
    unsigned skip = 0;
    unsigned times = 1;
    int fi_errno = 5;
};

struct Stats {
    std::uint64_t steps, posts, again, failures;
    std::size_t in_flight, open_nics, open_mrs, posted_receives;
};

class FakeFabric {
  public:
    explicit FakeFabric(std::uint64_t seed);

    std::unique_ptr<Nic> open_nic(const FakeProfile& profile = FakeProfile::strict());
    static NicId id_of(const Nic& nic);

    RuleId add_rule(Rule rule);
    // Ends the rule and lets what it holds go on, or fail with the rule's errno.
    void release(RuleId rule, Action then = Action::kPass);
    unsigned num_fired(RuleId rule) const;
    bool wait_fired(RuleId rule, unsigned count, std::chrono::milliseconds bound) const;

    void fail_call(const CallFault& fault);

    // From now on `src` takes nothing for `dst` and says "again" each time, as a NIC does that cannot connect; until
    // refuse(src, dst, false).
    void refuse(NicId src, NicId dst, bool refused = true);

    // kill: the process of this NIC is gone. To the killed side the device has failed, so that it can clean up.
    void kill(NicId nic, Death death = Death::kErrors);
    // freeze: the process of this NIC is stopped; thaw lets it go on. Offloaded NICs go on moving data meanwhile.
    void freeze(NicId nic);
    void thaw(NicId nic);

    Stats stats() const;
    std::vector<std::string> violations() const;
    std::uint64_t seed() const;
    std::string describe() const;  // seed, step and what is in flight; for failure messages

  private:
    std::shared_ptr<World> world_;
};

}  // namespace fkv::fake
