#include "engine/poller.h"

#include <algorithm>
#include <array>

#include "base/clock.h"
#include "engine/thread.h"

namespace fkv {
namespace {

constexpr std::size_t kErrorsPerPoll = 64;

}  // namespace

PolledNic::PolledNic(std::unique_ptr<Nic> nic, const PollerOptions& options)
    : nic_(std::move(nic)), info_(nic_->info()), ring_(options.ring), rest_(options.spin, {nic_.get()}) {
    info_.fail_stop = false;
    thread_ = start_thread(options.name, options.cpus, [this] { run(); });
}

PolledNic::~PolledNic() { stop(); }

void PolledNic::stop() {
    if (!thread_.joinable()) return;
    stopping_.store(true);
    rest_.ring();
    thread_.join();
}

// -- the owner's side ------------------------------------------------------------------------------------------------

void PolledNic::close_endpoint() {
    stop();
    nic_->close_endpoint();
    drop_rest();
}

void PolledNic::close_quiet_endpoint() {
    stop();
    nic_->close_quiet_endpoint();
    drop_rest();
}

void PolledNic::drop_rest() {
    while (!ring_.empty()) ring_.pop();
    last_words_read_ = true;
}

// Whatever comes of a post, the NIC wants to be polled after it, as a single thread would do.
PostResult PolledNic::posted(PostResult result) {
    if (result == PostResult::kOk)
        num_accepted_.store(num_accepted_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    num_calls_.store(num_calls_.load(std::memory_order_relaxed) + 1);
    rest_.wake();
    return result;
}

PolledNic::Brought PolledNic::take() {
    auto brought = ring_.pop();
    if (blocked_.load()) rest_.wake();
    return brought;
}

int PolledNic::poll(std::span<Completion> out) {
    if (owner_sleeps_.load(std::memory_order_relaxed)) owner_sleeps_.store(false);
    int count = 0;
    for (auto& completion : out) {
        if (ring_.empty()) break;
        if (ring_.front().failed) return count > 0 ? count : -1;
        completion = take().done;
        ++count;
    }
    if (count == 0 && !out.empty() && ended_.load() && !last_words_read_ && ring_.empty()) return -1;
    return count;
}

bool PolledNic::read_error(FailedCompletion& out) {
    if (!ring_.empty()) {
        if (!ring_.front().failed) return false;
        out = std::move(*take().failed);
        return true;
    }
    if (!ended_.load() || last_words_read_) return false;
    last_words_read_ = true;
    out = std::move(last_words_);
    return true;
}

bool PolledNic::may_sleep() {
    bell_.clear();
    owner_sleeps_.store(true);
    return ring_.empty() && (!ended_.load() || last_words_read_);
}

// -- the thread ------------------------------------------------------------------------------------------------------

void PolledNic::run() {
    try {
        std::uint64_t accepted = 0;
        while (!stopping_.load(std::memory_order_relaxed)) {
            const auto now = now_ns();
            const auto num_calls = num_calls_.load();
            const auto num_accepted = num_accepted_.load(std::memory_order_relaxed);
            const bool full = ring_.full();
            blocked_.store(full);
            busy_since_ns_.store(now, std::memory_order_relaxed);
            const bool worked = (!full && bring()) || num_accepted != accepted;
            busy_since_ns_.store(0, std::memory_order_relaxed);
            accepted = num_accepted;
            Rest::Situation situation{};
            situation.worked = worked;
            situation.outstanding = expecting_.load(std::memory_order_relaxed);
            situation.deaf = full;
            rest_.rest(situation, now, [&] {
                return full ? ring_.full() && !stopping_.load() : num_calls_.load() == num_calls && !stopping_.load();
            });
        }
    } catch (const std::exception& error) {
        const auto& info = nic_->info();
        last_words_ = {nullptr,
                       {0, 0, "poll", info.provider, info.domain,
                        std::string("the thread that polls this NIC ended: ") + error.what()}};
        busy_since_ns_.store(0);
        ended_.store(true);
        tell();
    }
}

// Polls once. True if it brought something.
bool PolledNic::bring() {
    std::array<Completion, 64> done;
    const auto room = ring_.room();
    const int n = nic_->poll(std::span(done).first(std::min(room, done.size())));
    for (int i = 0; i < n; ++i) ring_.push({done[i], nullptr});
    bool brought = n > 0;
    if (n < 0) {
        FailedCompletion failure;
        for (std::size_t i = 0; i < std::min(room, kErrorsPerPoll) && nic_->read_error(failure); ++i) {
            ring_.push({{}, std::make_unique<FailedCompletion>(std::move(failure))});
            brought = true;
        }
    }
    if (brought) tell();
    return brought;
}

void PolledNic::tell() {
    if (owner_sleeps_.load() && owner_sleeps_.exchange(false)) bell_.ring();
}

}  // namespace fkv
