// How a thread that drives NICs rests: it spins, then yields, then sleeps, sooner or later as an answer is due or not.
//
// Threads: rest() on that thread; wake() from any.
#pragma once

#include <poll.h>

#include <atomic>
#include <vector>

#include "base/event_fd.h"
#include "engine/stats.h"
#include "fabric/nic.h"

namespace fkv {

class Rest {
  public:
    // The NICs are those that the thread polls.
    Rest(bool spin, std::vector<Nic*> nics);

    // What the thread knows after a round.
    struct Situation {
        bool worked;          // the round posted, completed or took something
        bool outstanding;     // completions are due
        bool queued;          // posts were refused and must be tried again
        bool watches;         // a word in memory may change without anybody telling us
        std::int64_t due_ns;  // when housekeeping is due; 0: it can wait
        bool deaf = false;    // only wake() and the clock end the sleep: what the NICs have must wait
    };
    // May sleep. `calm` says, after the intention to sleep was published, whether there is still nothing to do.
    template <typename Calm>
    void rest(const Situation& situation, std::int64_t now, Calm&& calm) {
        const auto timeout_ns = decide(situation, now);
        if (timeout_ns < 0) return;
        if (timeout_ns == 0) return yield();
        if (!collect(situation.deaf)) return;
        // Pairs with wake(): whoever brings work fills a queue and then looks at the flag; we set the flag and then
        // look at the queues.
        sleeping_.store(true);
        if (calm()) sleep(timeout_ns);
        sleeping_.store(false);
    }

    // Whoever comes first rings; until the thread has got a core, the others need not.
    void wake() {
        if (sleeping_.load() && sleeping_.exchange(false)) bell_.ring();
    }
    void ring() { bell_.ring(); }
    std::uint64_t sleeps() const { return sleeps_.get(); }

  private:
    std::int64_t decide(const Situation& situation, std::int64_t now);  // < 0: go on; 0: yield; else the longest sleep
    void learn(std::int64_t waited_ns);                                 // that work came after so long a wait
    void yield();
    bool collect(bool deaf);  // the descriptors to sleep on; false when a NIC must not be slept on right now
    void sleep(std::int64_t timeout_ns);
    bool is_deaf() const { return idle_wakes_ > kMaxIdleWakes; }  // to the NICs' descriptors

    static constexpr int kMaxIdleWakes = 16;

    const bool spin_;
    const std::vector<Nic*> nics_;
    const bool are_rung_;               // every NIC has a descriptor ...
    const bool are_sure_;               // ... without which nothing comes
    bool worked_ = false;               // in the round before
    std::int64_t last_work_ns_ = 0;     // when the last round that worked ended
    std::int64_t nap_ns_ = 0;           // how long to sleep by the clock alone
    int stream_waits_ = 0;              // in a row that ended as soon as in a stream ...
    std::int64_t longest_wait_ns_ = 0;  // ... of which this was the longest
    int idle_wakes_ = 0;                // by a NIC's descriptor, without finding work, since the last work
    std::vector<pollfd> fds_;
    std::atomic<bool> sleeping_{false};
    EventFd bell_;
    Count sleeps_;
};

}  // namespace fkv
