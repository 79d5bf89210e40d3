// The NICs of one GPU (or of the host) and the thread that drives them.
//
// Owns:     rails, counters, the progress thread and every transfer from submit() to its event.
// Threads:  submit(), run_soon(), counters() and stats from any thread; the rest on the progress thread.
// Blocking: close() only, for at most its drain time; afterwards no NIC touches caller memory.
// Failure:  submit() answers false when max_transfers are in flight; everything else ends in an event.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/event_fd.h"
#include "base/queue.h"
#include "engine/event.h"
#include "engine/heartbeat.h"
#include "engine/rail.h"
#include "engine/transfer.h"

namespace fkv {

struct GroupOptions {
    bool spin = false;      // never sleep
    std::vector<int> cpus;  // the progress thread is pinned to these; empty: it is not pinned
    std::size_t max_transfers = 16384;
    std::size_t max_inbox_bytes = std::size_t{64} << 20;
    std::uint32_t num_counters = 65536;
    HeartbeatOptions heartbeat;
};

struct GroupStats {
    std::atomic<std::uint64_t> stale_imms{0}, violations{0}, malformed_frames{0}, sleeps{0};
    std::atomic<std::uint64_t> dropped_imms{0};  // the user's own, for which the inbox had no room
};

class Group {
  public:
    Group(std::uint32_t index, const Epoch& epoch, std::vector<std::unique_ptr<Nic>> nics, const GroupOptions& options,
          EventQueue& events);
    ~Group();

    bool submit(std::shared_ptr<Transfer> transfer);
    // Runs fn on the progress thread before its next round. False when the queue for that is full.
    bool run_soon(std::function<void()> fn);
    void wake();

    void monitor(std::shared_ptr<Peer> peer) { heartbeat_.watch(std::move(peer), now_ns()); }  // progress thread
    void forget(const Peer& peer);                                                             // progress thread

    // Stops intake, cancels what is queued and lets posted operations end, for at most drain_ns from now. Does not
    // wait.
    void begin_close(std::int64_t drain_ns);
    // Waits for that, then closes the endpoints. Every caller returns only once that is done.
    void close();

    std::vector<std::unique_ptr<Rail>>& rails() { return rails_; }
    CounterTable& counters() { return counters_; }
    const GroupStats& stats() const { return stats_; }
    std::size_t in_flight() const { return in_flight_.load(std::memory_order_relaxed); }
    std::size_t max_transfers() const { return options_.max_transfers; }
    std::uint64_t max_write_bytes() const { return max_write_bytes_; }

  private:
    void run();
    bool round();
    bool take_submissions();
    bool post_messages();
    bool post_writes();
    PostResult post_planned(Transfer& transfer);
    PostResult post_write_on(Transfer& transfer, Peer::Link& link);
    PostResult post_message(Transfer& transfer);
    PostResult post_frame(const FrameHeader& header, std::span<const std::byte> payload,
                          const std::shared_ptr<Peer>& peer, Transfer* transfer);
    std::vector<Peer::Link>& links_to(Peer& peer, std::uint32_t remote_group);

    bool poll_rail(Rail& rail);
    void on_completion(Rail& rail, const Completion& completion);
    void on_failure(Rail& rail, FailedCompletion failure);
    void on_imm(std::uint32_t word);
    bool on_frame(const Op& recv, std::uint64_t nbytes, bool take_data);
    void retire(Rail& rail, Op* op);
    void fail(Transfer& transfer, OpError error);
    void stop_posting(Transfer& transfer);
    void finish(Transfer& transfer, Outcome outcome);
    void fault(OpError error);

    void housekeeping();
    void rest(bool worked);
    void sleep(std::int64_t timeout_ns);
    bool anything_outstanding() const;
    void drain();

    const std::uint32_t index_;
    const Epoch epoch_;
    const GroupOptions options_;
    EventQueue& events_;
    std::vector<std::unique_ptr<Rail>> rails_;
    std::uint64_t max_write_bytes_;
    CounterTable counters_;
    GroupStats stats_;

    BoundedQueue<std::shared_ptr<Transfer>> submissions_;
    BoundedQueue<std::function<void()>> calls_;
    std::atomic<std::size_t> in_flight_{0};
    std::atomic<bool> stopping_{false};
    std::atomic<bool> sleeping_{false};
    std::atomic<std::int64_t> drain_until_ns_{0};
    EventFd bell_;

    // Progress thread only.
    std::vector<std::shared_ptr<Transfer>> incoming_;
    std::vector<std::function<void()>> incoming_calls_;
    std::vector<std::shared_ptr<Transfer>> live_;
    std::deque<Transfer*> writing_;    // not everything posted yet; served in turn
    std::deque<Transfer*> messaging_;  // messages to post; they overtake writes
    struct HeldFrame {
        Rail* rail;
        Op* recv;
        std::uint64_t nbytes;
    };
    std::deque<HeldFrame> held_;  // received frames that the inbox has no room for; their receives stay unposted
    Heartbeat heartbeat_;
    std::int64_t last_work_ns_ = 0;
    int idle_wakes_ = 0;  // since the last work
    std::int64_t next_housekeeping_ns_ = 0;

    std::mutex close_mutex_;
    bool closed_ = false;  // guarded by close_mutex_
    std::thread thread_;   // last: it uses everything above
};

}  // namespace fkv
