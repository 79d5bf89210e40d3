#include "engine/group.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <map>
#include <set>

#include "engine/thread.h"

namespace fkv {
namespace {

constexpr std::size_t kNumFrames = 64;       // message frames per rail and direction
constexpr std::size_t kErrorsPerRound = 64;  // failed completions that are read before anything else has its turn
constexpr std::int64_t kHousekeepingNs = 10 * kMillisecond;

// The NICs with a thread each, listed in `pollers`, where the options ask for it.
std::vector<std::unique_ptr<Nic>> give_threads(std::vector<std::unique_ptr<Nic>> nics, const GroupOptions& options,
                                               std::vector<PolledNic*>& pollers) {
    if (options.nic_threads_from == 0 || nics.size() < options.nic_threads_from) return nics;
    for (std::size_t k = 0; k < nics.size(); ++k) {
        auto polled = std::make_unique<PolledNic>(
            std::move(nics[k]),
            PollerOptions{"fabric_kv-nic" + std::to_string(k), options.cpus, options.spin, options.max_brought});
        pollers.push_back(polled.get());
        nics[k] = std::move(polled);
    }
    return nics;
}

std::vector<std::unique_ptr<Rail>> make_rails(std::uint32_t index, std::vector<std::unique_ptr<Nic>> nics) {
    if (nics.empty()) throw Error(ErrorKind::kConfig, "group " + std::to_string(index) + " has no NIC");
    std::vector<std::unique_ptr<Rail>> rails;
    for (auto& nic : nics) rails.push_back(std::make_unique<Rail>(std::move(nic), kNumFrames));
    return rails;
}

std::vector<Nic*> nics_of(const std::vector<std::unique_ptr<Rail>>& rails) {
    std::vector<Nic*> nics;
    for (const auto& rail : rails) nics.push_back(&rail->nic());
    return nics;
}

}  // namespace

Group::Group(std::uint32_t index, const Epoch& epoch, std::vector<std::unique_ptr<Nic>> nics,
             const GroupOptions& options, std::shared_ptr<EventQueue> events, std::shared_ptr<const Peers> peers)
    : index_(index),
      options_(options),
      events_(std::move(events)),
      rails_(make_rails(index, give_threads(std::move(nics), options, pollers_))),
      heartbeat_(options.heartbeat),
      sender_(index, epoch, rails_, options.max_transfers, *events_),
      farewell_(index, rails_.size(), heartbeat_.lost_after_ns() / 2, sender_, std::move(peers)),
      receiver_(index, options.num_counters, options.max_inbox_bytes, heartbeat_, farewell_, *events_),
      in_order_(
          std::all_of(rails_.begin(), rails_.end(), [](const auto& rail) { return rail->info().ordered_writes; })),
      rest_(options.spin, nics_of(rails_)),
      submissions_(options.max_transfers),
      calls_(options.max_transfers) {
    thread_ = start_thread("fabric_kv", options.cpus, [this] { run(); });
}

Group::~Group() {
    begin_close(0);
    close();
}

bool Group::submit(std::vector<std::shared_ptr<Transfer>> transfers) {
    if (!sender_.reserve(transfers.size())) return false;
    // The queue is as long as the reservation allows: it takes what was reserved, unless it is closed.
    if (!submissions_.push_all(transfers)) {
        sender_.unreserve(transfers.size());
        throw Error(ErrorKind::kClosed, "the engine is closed");
    }
    wake();
    return true;
}

bool Group::run_soon(std::function<void()> fn) {
    if (!calls_.push(std::move(fn))) return false;
    wake();
    return true;
}

std::uint64_t Group::max_registration_bytes() const {
    auto bytes = std::min(options_.max_registration_bytes, found_limit_.load());
    for (const auto& rail : rails_) bytes = std::min(bytes, rail->info().max_mr_bytes);
    return bytes;
}

// -- the progress thread ---------------------------------------------------------------------------------------------

void Group::run() {
    try {
        progress();
    } catch (const std::exception& error) {
        // Nothing on this thread is expected to throw. If it does, no completion will be seen any more: close() ends
        // all.
        stopping_.store(true);
        round_began_ns_.store(0);
        fault(Event::kFault, {0, 0, "progress", "", "", std::string("the progress thread ended: ") + error.what()});
        std::unique_lock lock(end_mutex_);
        end_.wait(lock, [this] { return close_wanted_; });
    }
    // Here, and not in close(): a NIC may hold whoever closes it for ever.
    close_endpoints();
    // The lock is held until the caller of close() may go on and destroy it.
    std::lock_guard lock(end_mutex_);
    at_end_ = true;
    end_.notify_all();
}

void Group::progress() {
    while (!stopping_.load(std::memory_order_relaxed)) {
        const auto now = now_ns();
        round_began_ns_.store(now, std::memory_order_relaxed);
        const bool worked = round(now);
        const bool waits = !heartbeat_.empty() || receiver_.holds() || farewell_.pending() ||
                           sender_.anything_outstanding() || sender_.anything_parked();
        round_began_ns_.store(0, std::memory_order_relaxed);
        rest_.rest(
            {worked, sender_.anything_outstanding(), sender_.anything_queued(), sender_.anything_to_watch(),
             waits ? next_housekeeping_ns_ : 0},
            now,
            [&] { return submissions_.empty() && calls_.empty() && !stopping_.load() && !sender_.anything_reached(); });
    }
    drain();
    take_leave();
}

void Group::close_endpoints() {
    for (auto& rail : rails_) {
        round_began_ns_.store(now_ns());
        try {
            rail->close_endpoint(quiet_);
        } catch (const std::exception& error) {
            open_for_ever_ = true;
            const auto& info = rail->info();
            fault(Event::kFault, {0, 0, "close", info.provider, info.domain, error.what()});
        }
    }
    round_began_ns_.store(0);
}

bool Group::round(std::int64_t now) {
    bool worked = take_submissions();
    worked |= sender_.post(now);
    for (auto& rail : rails_) worked |= poll_rail(*rail, now);
    if (farewell_.pending()) worked |= farewell_.step(now, receiver_.holds());
    if (now >= next_housekeeping_ns_) housekeeping(now);
    for (std::size_t k = 0; k < pollers_.size(); ++k) pollers_[k]->expect(rails_[k]->outstanding_ops != 0);
    return worked;
}

bool Group::take_submissions() {
    calls_.pop_all(incoming_calls_);
    for (auto& call : incoming_calls_) call();
    incoming_calls_.clear();
    submissions_.pop_all(incoming_);
    if (incoming_.empty()) return false;
    for (auto& transfer : incoming_) sender_.add(std::move(transfer));
    incoming_.clear();
    return true;
}

bool Group::poll_rail(Rail& rail, std::int64_t now) {
    std::array<Completion, 64> completions;
    const int n = rail.nic().poll(completions);
    for (int i = 0; i < n; ++i) {
        const auto& completion = completions[i];
        auto* op = reinterpret_cast<Op*>(completion.context);
        switch (completion.kind) {
            case Completion::kRemoteWrite:
                receiver_.on_imm(rail, completion.imm, op);
                break;
            case Completion::kReceived:
                receiver_.on_message(rail, op, completion.nbytes, now);
                break;
            case Completion::kSent:
                op->link->last_progress_ns = now;
                sender_.on_sent(rail, op, now);
                break;
        }
    }
    bool worked = n > 0;
    if (n < 0) {
        // Bounded: a receive that fails and is posted again may fail again at once.
        FailedCompletion failure;
        for (std::size_t i = 0; i < kErrorsPerRound && rail.nic().read_error(failure); ++i) {
            on_failure(rail, std::move(failure), now);
            worked = true;
        }
    }
    if (worked) {  // a queue that cannot be read, and has no error to show either, makes no progress
        rail.last_progress_ns = now;
        rail.stalled = false;
    }
    return worked;
}

void Group::on_failure(Rail& rail, FailedCompletion failure, std::int64_t now) {
    rail.stats.errors.add(1);
    auto* op = reinterpret_cast<Op*>(failure.context);
    if (failure.inbound) return;  // a peer left, or erred, in the middle of writing to us; it will not be counted
    if (!op) {
        sender_.on_unattributed(rail, failure.error);
        fault(Event::kFault, std::move(failure.error));
    } else if (op->kind == Op::Kind::kRecv) {
        rail.repost(op);
    } else {
        op->link->last_progress_ns = now;
        sender_.on_failed(rail, op, std::move(failure.error), now);
    }
}

void Group::housekeeping(std::int64_t now) {
    next_housekeeping_ns_ = now + std::min(heartbeat_.interval_ns() / 4, kHousekeepingNs);
    receiver_.deliver_held(now);
    for (auto& rail : rails_) {
        rail->post_receives();
        check_stall(*rail, now);
        check_links(*rail, now);
    }
    check_waiting(now);
    sender_.sweep(now);
    check_peers(now);
}

void Group::check_peers(std::int64_t now) {
    const auto lost = [&](const Peer& peer, Outcome how, std::string why) {
        Event event;
        event.kind = Event::kPeerLost;
        event.outcome = how;
        event.peer = peer.epoch;
        event.error.text = std::move(why);
        events_->post(std::move(event));
    };
    heartbeat_.check(
        now, in_order_, [&](const std::shared_ptr<Peer>& peer) { return sender_.ping(peer, now); },
        [&](const Peer& peer, std::int64_t silent_ns) {
            lost(peer, Outcome::kFailed, "nothing was heard for " + std::to_string(silent_ns / kMillisecond) + " ms");
        },
        [&](const Peer& peer) { lost(peer, Outcome::kClosed, "it has closed its engine"); });
}

void Group::check_stall(Rail& rail, std::int64_t now) {
    const auto silent_ns = now - rail.last_progress_ns;
    if (rail.outstanding_ops == 0 || rail.stalled || silent_ns < options_.stall_ns) return;
    rail.stalled = true;
    const auto& info = rail.info();
    fault(Event::kStalled,
          {0, 0, "stall", info.provider, info.domain,
           "no completion for " + std::to_string(silent_ns / kMillisecond) + " ms with " +
               std::to_string(rail.outstanding_ops) + " operations of " + std::to_string(rail.outstanding_bytes) +
               " bytes in flight"},
          static_cast<std::uint64_t>(silent_ns), rail.outstanding_bytes);
}

// A rail may complete nothing to one peer while all others go on, and that peer's heartbeats come over another rail.
void Group::check_links(Rail& rail, std::int64_t now) {
    if (rail.outstanding_ops == 0 || now < rail.look_again_ns) return;
    rail.look_again_ns = now + options_.stall_ns / 4;  // it looks at every operation
    struct Held {
        Epoch peer;
        std::set<std::uint64_t> ids;
    };
    std::map<Peer::Link*, Held> held;
    rail.for_each_in_flight([&](const Op& op) {
        auto& link = *op.link;
        // Again after as long, for transfers that have come since.
        const auto since = std::max(link.last_progress_ns, link.reported_ns);
        if (!op.transfer || now - since < options_.stall_ns) return;
        auto& found = held[&link];
        found.peer = op.transfer->peer->epoch;
        found.ids.insert(op.transfer->id);
    });
    const auto& info = rail.info();
    for (const auto& [link, found] : held) {
        link->reported_ns = now;
        tell_held_up(found.peer, {found.ids.begin(), found.ids.end()},
                     info.provider + " NIC " + info.domain + " has completed nothing to the peer for " +
                         std::to_string((now - link->last_progress_ns) / kMillisecond) + " ms with " +
                         std::to_string(link->ops_in_flight) + " operations in flight");
    }
}

// What a NIC never takes is in flight nowhere: of a peer that cannot be connected to nothing else would ever be heard,
// as long as its heartbeats come over another NIC.
void Group::check_waiting(std::int64_t now) {
    if (!sender_.anything_queued() || now < look_again_ns_) return;
    look_again_ns_ = now + options_.stall_ns / 4;  // it looks at every transfer
    std::map<std::pair<Epoch, std::string>, std::vector<std::uint64_t>> held;
    sender_.for_each_held_up(now, options_.stall_ns, [&](const Transfer& transfer, const std::string& why) {
        held[{transfer.peer->epoch, why}].push_back(transfer.id);
    });
    for (auto& [found, ids] : held) tell_held_up(found.first, std::move(ids), found.second);
}

void Group::tell_held_up(const Epoch& peer, std::vector<std::uint64_t> transfers, std::string why) {
    Event event;
    event.kind = Event::kHeldUp;
    event.peer = peer;
    event.transfers = std::move(transfers);
    event.error.text = std::move(why);
    events_->post(std::move(event));
}

void Group::fault(Event::Kind kind, OpError error, std::uint64_t silent_ns, std::uint64_t outstanding_bytes) {
    Event event;
    event.kind = kind;
    event.group = index_;
    event.error = std::move(error);
    event.id = silent_ns;
    event.bytes = outstanding_bytes;
    events_->post(std::move(event));
}

// -- the end ---------------------------------------------------------------------------------------------------------

void Group::drain() {
    take_submissions();
    sender_.stop_all();
    const auto deadline = drain_until_ns_.load();
    for (auto now = now_ns(); !sender_.empty() && now < deadline; now = now_ns()) {
        round_began_ns_.store(now, std::memory_order_relaxed);
        bool worked = say_and_hear(now);
        if (now >= next_housekeeping_ns_) {
            next_housekeeping_ns_ = now + kHousekeepingNs;
            check_peers(now);
        }
        round_began_ns_.store(0, std::memory_order_relaxed);
        if (!worked) std::this_thread::sleep_for(std::chrono::nanoseconds(50 * kMicrosecond));
    }
}

// Peers that do not answer for as long as would have them counted as lost may well be gone.
void Group::take_leave() {
    const auto begin = now_ns(), until = begin + std::min(heartbeat_.lost_after_ns(), options_.end_ns / 4);
    receiver_.stop_holding(begin);
    farewell_.begin(begin, until);
    for (auto now = begin; farewell_.pending() && now < until; now = now_ns()) {
        round_began_ns_.store(now, std::memory_order_relaxed);
        const bool worked = say_and_hear(now);
        round_began_ns_.store(0, std::memory_order_relaxed);
        if (!worked) std::this_thread::sleep_for(std::chrono::nanoseconds(50 * kMicrosecond));
    }
    quiet_ = farewell_.quiet(now_ns());
}

bool Group::say_and_hear(std::int64_t now) {
    bool worked = farewell_.step(now, receiver_.holds());
    receiver_.deliver_held(now);
    for (auto& rail : rails_) {
        rail->post_receives();
        worked |= poll_rail(*rail, now);
    }
    return worked;
}

void Group::begin_close(std::int64_t drain_ns) {
    std::lock_guard lock(end_mutex_);
    if (close_wanted_) return;
    close_wanted_ = true;
    drain_until_ns_.store(now_ns() + drain_ns);
    stopping_.store(true);
    end_.notify_all();
    rest_.ring();
}

bool Group::close() {
    std::lock_guard lock(close_mutex_);
    if (closed_) return true;
    {
        const auto bound_ns = std::max<std::int64_t>(drain_until_ns_.load() + options_.end_ns - now_ns(), 0);
        std::unique_lock end(end_mutex_);
        if (!end_.wait_for(end, std::chrono::nanoseconds(bound_ns), [this] { return at_end_; })) return false;
        if (open_for_ever_) return false;
    }
    thread_.join();
    closed_ = true;
    // What slipped in beside stopping_ ends like all the others.
    submissions_.close();
    calls_.close();
    take_submissions();
    sender_.end_all();
    return true;
}

void Group::leave_behind(std::unique_ptr<Group> group) {
    static std::mutex mutex;
    static auto& left = *new std::vector<std::unique_ptr<Group>>;  // not destroyed at exit either
    std::lock_guard lock(mutex);
    group->thread_.detach();
    left.push_back(std::move(group));
}

std::optional<Group::Stuck> Group::stuck(std::int64_t now, std::int64_t at_least_ns) const {
    const auto report = [&](std::int64_t since, const char* whose, const NicInfo& info) -> std::optional<Stuck> {
        if (since == 0 || now - since < at_least_ns) return std::nullopt;
        return Stuck{now - since,
                     {0, 0, "progress", info.provider, info.domain,
                      std::string(whose) + " has not returned from the provider for " +
                          std::to_string((now - since) / kMillisecond) + " ms"}};
    };
    for (std::size_t k = 0; k < pollers_.size(); ++k)
        if (auto found = report(pollers_[k]->busy_since_ns(), "the NIC's thread", rails_[k]->info())) return found;
    return report(round_began_ns_.load(), "the progress thread", rails_[0]->info());
}

void Group::check_stuck(std::int64_t now) {
    auto found = stuck(now, options_.stall_ns);
    const auto since = found ? now - found->for_ns : 0;
    if (reported_ns_.exchange(since) == since || !found) return;
    fault(Event::kStalled, std::move(found->where), static_cast<std::uint64_t>(found->for_ns));
}

}  // namespace fkv
