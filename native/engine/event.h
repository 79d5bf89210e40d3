// What the engine tells its owner, in one queue for all groups.
//
// Threads:  post() from progress threads; take() from any thread.
// Blocking: take() for at most its timeout. The descriptor is readable while events wait.
#pragma once

#include <poll.h>

#include <atomic>
#include <mutex>
#include <vector>

#include "base/event_fd.h"
#include "engine/counters.h"
#include "engine/transfer.h"

namespace fkv {

// kExpired: its deadline passed before everything was posted.
enum class Outcome : std::uint8_t { kOk, kFailed, kCancelled, kClosed, kExpired };

struct Event {
    enum Kind : std::uint8_t {
        kTransfer,  // id, outcome, bytes, error
        kCounter,   // group, token.slot, token.generation, verdict
        kMessage,   // peer, id (message), bytes (total), offset, payload
        kUser,      // group, id (the 15 bits)
        kPeerLost,  // peer, outcome (kClosed: it said goodbye), error.text
        kFault,     // error: a rail or the progress thread failed
        kStalled,   // error: a rail with work in flight has completed nothing for a while; id: ns, bytes: outstanding
        kHeldUp,    // peer, transfers, error: one rail completes nothing to that peer, to which these have operations
    };
    Kind kind{};
    Outcome outcome{};
    CounterVerdict verdict{};
    std::uint32_t group = 0;
    std::uint32_t slot = 0;
    std::uint32_t generation = 0;
    std::uint32_t offset = 0;
    std::uint64_t id = 0;
    std::uint64_t bytes = 0;
    Epoch peer{};
    std::vector<std::byte> payload;
    OpError error;
    std::vector<PageRange> failed_pages;
    PageRange unposted;
    std::vector<std::uint64_t> transfers;  // ids
};

class EventQueue {
  public:
    void post(Event event) {
        std::lock_guard lock(mutex_);
        inbox_bytes_.fetch_add(cost(event), std::memory_order_relaxed);
        events_.push_back(std::move(event));
        if (events_.size() == 1) bell_.ring();
    }

    std::vector<Event> take(int timeout_ms) {
        std::vector<Event> out;
        if (timeout_ms != 0 && empty()) {
            pollfd pfd{bell_.fd(), POLLIN, 0};
            ::poll(&pfd, 1, timeout_ms);
        }
        std::lock_guard lock(mutex_);
        out.swap(events_);
        bell_.clear();
        std::size_t bytes = 0;
        for (const auto& event : out) bytes += cost(event);
        inbox_bytes_.fetch_sub(bytes, std::memory_order_relaxed);
        return out;
    }

    int fd() const { return bell_.fd(); }
    void ring() { bell_.ring(); }
    // Memory that events hold whose number only peers decide; what ends here is bounded by what was begun here.
    std::size_t inbox_bytes() const { return inbox_bytes_.load(std::memory_order_relaxed); }

  private:
    static std::size_t cost(const Event& event) {
        const bool from_peer = event.kind == Event::kMessage || event.kind == Event::kUser;
        return from_peer ? sizeof(Event) + event.payload.size() : 0;
    }

    bool empty() {
        std::lock_guard lock(mutex_);
        return events_.empty();
    }

    std::mutex mutex_;
    std::vector<Event> events_;  // guarded by mutex_
    std::atomic<std::size_t> inbox_bytes_{0};
    EventFd bell_;
};

}  // namespace fkv
