#include "engine/rest.h"

#include <poll.h>

#include <algorithm>
#include <thread>

#include "base/clock.h"

namespace fkv {
namespace {

constexpr std::int64_t kSpinNs = 20 * kMicrosecond;
constexpr std::int64_t kYieldNs = 50 * kMicrosecond;
constexpr std::int64_t kYieldOutstandingNs = 200 * kMicrosecond;
// In the middle of a stream, which a few waits in a row show that ended so soon, falling asleep costs more than waiting
// twice as long as it has taken so far. Heartbeats, also of many peers, are no stream.
constexpr std::int64_t kStreamGapNs = 500 * kMicrosecond;
constexpr int kMinStreamWaits = 4;
constexpr std::int64_t kRetryNs = 100 * kMicrosecond;  // posts that were refused, although no descriptor says so
// Where nothing wakes us but the clock we sleep for a tenth of the time in which nothing has come: what comes waits
// little in proportion, and an idle engine looks five hundred times a second.
constexpr std::int64_t kShortNapNs = 50 * kMicrosecond;
constexpr std::int64_t kIdleNapNs = 2 * kMillisecond;
constexpr std::int64_t kRungNapNs = 10 * kMillisecond;  // the same where who brings something will most likely ring
constexpr std::int64_t kLongNapNs = kMillisecond;
constexpr std::int64_t kNapShare = 10;
template <typename Is>
bool all(const std::vector<Nic*>& nics, Is&& is) {
    return std::all_of(nics.begin(), nics.end(), is);
}

}  // namespace

Rest::Rest(bool spin, std::vector<Nic*> nics)
    : spin_(spin),
      nics_(std::move(nics)),
      are_rung_(all(nics_, [](const Nic* nic) { return nic->wait_fd() >= 0; })),
      are_sure_(are_rung_ && all(nics_, [](const Nic* nic) { return !nic->wait_is_hint(); })) {}

std::int64_t Rest::decide(const Situation& situation, std::int64_t now) {
    // A round may take milliseconds, in which its NIC copies. It ended when this one began.
    if (worked_) last_work_ns_ = now;
    worked_ = situation.worked;
    const auto idle_ns = now - last_work_ns_;
    if (situation.worked) {
        if (idle_ns > kSpinNs) learn(idle_ns);
        idle_wakes_ = 0;
        return -1;
    }
    if (spin_ || idle_ns < kSpinNs) return -1;
    auto yield_ns = situation.outstanding ? kYieldOutstandingNs : kYieldNs;
    if (stream_waits_ >= kMinStreamWaits) yield_ns = std::max(yield_ns, 2 * longest_wait_ns_);
    if (idle_ns < yield_ns) return 0;
    std::int64_t timeout_ns;
    nap_ns_ = std::clamp(idle_ns / kNapShare, kShortNapNs, are_rung_ && !is_deaf() ? kRungNapNs : kIdleNapNs);
    if (situation.queued)
        // At first soon: a queue that is full empties quickly, unless its peer is gone.
        timeout_ns = idle_ns < 10 * kMillisecond ? kRetryNs : kLongNapNs;
    else if (are_sure_)
        timeout_ns = situation.outstanding ? 5 * kMillisecond : 100 * kMillisecond;
    else if (situation.outstanding)
        timeout_ns = kShortNapNs;
    else
        timeout_ns = nap_ns_;
    if (situation.watches) timeout_ns = std::min(timeout_ns, kShortNapNs);
    if (situation.due_ns) timeout_ns = std::min(timeout_ns, situation.due_ns - now);
    return std::max<std::int64_t>(timeout_ns, 0);
}

void Rest::learn(std::int64_t waited_ns) {
    const bool in_stream = waited_ns <= kStreamGapNs;
    stream_waits_ = in_stream ? stream_waits_ + 1 : 0;
    longest_wait_ns_ = in_stream ? std::max(longest_wait_ns_, waited_ns) : 0;
}

void Rest::yield() { std::this_thread::yield(); }

bool Rest::collect(bool deaf) {
    fds_.clear();
    fds_.push_back({bell_.fd(), POLLIN, 0});
    // A descriptor that stays readable although there is nothing to read (libfabric 1.17's "net" does that) would turn
    // sleeping into spinning: after a few such wake-ups the clock alone decides.
    if (deaf || is_deaf()) return true;
    for (auto* nic : nics_) {
        if (nic->wait_fd() < 0) continue;
        if (!nic->may_sleep()) {
            ++idle_wakes_;
            return false;
        }
        fds_.push_back({nic->wait_fd(), POLLIN, 0});
    }
    return true;
}

void Rest::sleep(std::int64_t timeout_ns) {
    if (is_deaf()) timeout_ns = std::min(timeout_ns, nap_ns_);
    const timespec timeout{timeout_ns / kSecond, timeout_ns % kSecond};
    ::ppoll(fds_.data(), fds_.size(), &timeout, nullptr);
    sleeps_.add(1);
    if (std::any_of(fds_.begin() + 1, fds_.end(), [](const pollfd& fd) { return fd.revents != 0; })) ++idle_wakes_;
    if (fds_[0].revents) bell_.clear();
}

}  // namespace fkv
