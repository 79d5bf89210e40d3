// How the progress thread rests: it spins, then yields, then sleeps, sooner or later as an answer is due or not.
//
// Threads: rest() on the progress thread; wake() from any.
#pragma once

#include <poll.h>

#include <atomic>
#include <memory>
#include <vector>

#include "base/event_fd.h"
#include "engine/rail.h"
#include "engine/stats.h"

namespace fkv {

class Rest {
  public:
    Rest(bool spin, std::vector<std::unique_ptr<Rail>>& rails) : spin_(spin), rails_(rails) {}

    // What the thread knows after a round.
    struct Situation {
        bool worked;          // the round posted, completed or took something
        bool outstanding;     // completions are due
        bool queued;          // posts were refused and must be tried again
        bool watches;         // a word in memory may change without anybody telling us
        std::int64_t due_ns;  // when housekeeping is due; 0: it can wait
    };
    // May sleep. `calm` says, after the intention to sleep was published, whether there is still nothing to do.
    template <typename Calm>
    void rest(const Situation& situation, std::int64_t now, Calm&& calm) {
        const auto timeout_ns = decide(situation, now);
        if (timeout_ns < 0) return;
        if (timeout_ns == 0) return yield();
        if (!collect()) return;
        // Pairs with wake(): whoever brings work fills a queue and then looks at the flag; we set the flag and then
        // look at the queues.
        sleeping_.store(true);
        if (calm()) sleep(timeout_ns);
        sleeping_.store(false);
    }

    void wake() {
        if (sleeping_.load()) bell_.ring();
    }
    void ring() { bell_.ring(); }
    std::uint64_t sleeps() const { return sleeps_.get(); }

  private:
    std::int64_t decide(const Situation& situation, std::int64_t now);  // < 0: go on; 0: yield; else the longest sleep
    void yield();
    bool collect();  // the descriptors to sleep on; false when a NIC must not be slept on right now
    void sleep(std::int64_t timeout_ns);

    const bool spin_;
    std::vector<std::unique_ptr<Rail>>& rails_;
    std::int64_t last_work_ns_ = 0;
    int idle_wakes_ = 0;  // by a NIC's descriptor, without finding work, since the last work
    std::vector<pollfd> fds_;
    std::atomic<bool> sleeping_{false};
    EventFd bell_;
    Count sleeps_;
};

}  // namespace fkv
