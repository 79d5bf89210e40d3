// The NICs of one GPU (or of the host) and the thread that drives them.
//
// Owns:     rails, counters, its threads and every transfer from submit() to its event.
// Threads:  submit(), run_soon(), counters() and figures from any thread; the rest on the progress thread.
// Blocking: close() only, for its drain time and end_ns at most; afterwards no NIC touches caller memory, unless it
//           answers false.
// Failure:  submit() answers false when max_transfers are in flight; everything else ends in an event. A provider that
//           does not return from a call holds the thread for ever: stuck() tells, and what is in flight then has no
//           end.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/queue.h"
#include "engine/event.h"
#include "engine/farewell.h"
#include "engine/heartbeat.h"
#include "engine/poller.h"
#include "engine/rail.h"
#include "engine/receiver.h"
#include "engine/rest.h"
#include "engine/sender.h"

namespace fkv {

struct GroupOptions {
    bool spin = false;      // never sleep
    std::vector<int> cpus;  // the group's threads are pinned to these; empty: they are not pinned
    // So many NICs or more are polled by a thread each; 0: the progress thread polls all.
    std::size_t nic_threads_from = 0;
    std::size_t max_brought = 1024;  // completions that may wait between a NIC's thread and the progress thread
    std::size_t max_transfers = 16384;
    std::size_t max_inbox_bytes = std::size_t{64} << 20;
    std::uint64_t max_registration_bytes = ~std::uint64_t{0};  // larger regions consist of several registrations
    std::uint32_t num_counters = 65536;
    std::int64_t stall_ns = 5 * kSecond;  // a rail with work in flight that completes nothing for so long is reported
    std::int64_t end_ns = 10 * kSecond;   // close() waits so long, after the drain time, for the NICs to be closed
    HeartbeatOptions heartbeat;
};

class Group {
  public:
    Group(std::uint32_t index, const Epoch& epoch, std::vector<std::unique_ptr<Nic>> nics, const GroupOptions& options,
          std::shared_ptr<EventQueue> events, std::shared_ptr<const Peers> peers);
    ~Group();  // must not be called while close() answers false: see leave_behind()

    // Takes all or none.
    bool submit(std::vector<std::shared_ptr<Transfer>> transfers);
    // Runs fn on the progress thread before its next round. False when the queue for that is full.
    bool run_soon(std::function<void()> fn);
    void wake() { rest_.wake(); }

    // On the progress thread only.
    void monitor(std::shared_ptr<Peer> peer) { heartbeat_.watch(std::move(peer), now_ns()); }

    // Stops intake, cancels what is queued and lets posted operations end, for at most drain_ns from now. Does not
    // wait.
    void begin_close(std::int64_t drain_ns);
    // Waits for that, and for the endpoints to be closed. Every caller returns only once that is done; false: a thread
    // has not come back from a NIC. Then a later call looks whether it has come back since.
    bool close();
    // The end of a group whose close() answers false: its thread may come back at any time, so that everything stays.
    static void leave_behind(std::unique_ptr<Group> group);
    // How long the progress thread, or that of a NIC, has been in one call of the provider; set from `at_least_ns` on.
    struct Stuck {
        std::int64_t for_ns;
        OpError where;
    };
    std::optional<Stuck> stuck(std::int64_t now, std::int64_t at_least_ns) const;
    // Posts an event where a thread has been stuck for stall_ns; once for each time.
    void check_stuck(std::int64_t now);

    const GroupOptions& options() const { return options_; }
    std::vector<std::unique_ptr<Rail>>& rails() { return rails_; }
    CounterTable& counters() { return receiver_.counters(); }
    const Receiver& receiver() const { return receiver_; }
    const Sender& sender() const { return sender_; }
    const Rest& rest() const { return rest_; }
    bool has_nic_threads() const { return !pollers_.empty(); }
    std::uint64_t max_registration_bytes() const;
    // What a NIC was found to take at most. Any thread.
    void limit_registrations(std::uint64_t nbytes) { found_limit_.store(nbytes); }

  private:
    void run();
    void progress();
    void close_endpoints();
    bool round(std::int64_t now);
    bool take_submissions();
    bool poll_rail(Rail& rail, std::int64_t now);
    void on_failure(Rail& rail, FailedCompletion failure, std::int64_t now);
    void housekeeping(std::int64_t now);
    void check_peers(std::int64_t now);
    void check_stall(Rail& rail, std::int64_t now);
    void check_links(Rail& rail, std::int64_t now);
    void check_waiting(std::int64_t now);
    void tell_held_up(const Epoch& peer, std::vector<std::uint64_t> transfers, std::string why);
    void fault(Event::Kind kind, OpError error, std::uint64_t silent_ns = 0, std::uint64_t outstanding_bytes = 0);
    void drain();
    void take_leave();
    // One round of a group that is about to end. True if anything was done.
    bool say_and_hear(std::int64_t now);

    const std::uint32_t index_;
    const GroupOptions options_;
    const std::shared_ptr<EventQueue> events_;
    std::vector<PolledNic*> pollers_;  // [rail], or none; the rails own them
    std::vector<std::unique_ptr<Rail>> rails_;
    Heartbeat heartbeat_;
    Sender sender_;
    Farewell farewell_;
    Receiver receiver_;
    const bool in_order_;  // what is sent on a link comes behind what was written there before
    Rest rest_;

    std::atomic<std::uint64_t> found_limit_{~std::uint64_t{0}};  // see limit_registrations()
    BoundedQueue<std::shared_ptr<Transfer>> submissions_;
    BoundedQueue<std::function<void()>> calls_;
    std::atomic<bool> stopping_{false};
    std::atomic<std::int64_t> drain_until_ns_{0};
    std::atomic<std::int64_t> round_began_ns_{0};  // 0: the thread rests
    std::atomic<std::int64_t> reported_ns_{0};     // the beginning of what check_stuck() has reported

    // Progress thread only.
    std::vector<std::shared_ptr<Transfer>> incoming_;
    std::vector<std::function<void()>> incoming_calls_;
    std::int64_t next_housekeeping_ns_ = 0;
    std::int64_t look_again_ns_ = 0;  // for transfers that wait for rails that do nothing
    bool quiet_ = false;              // all peers that we know have said goodbye

    std::mutex close_mutex_;
    bool closed_ = false;  // guarded by close_mutex_
    std::mutex end_mutex_;
    std::condition_variable end_;
    bool close_wanted_ = false, at_end_ = false;  // guarded by end_mutex_
    bool open_for_ever_ = false;                  // an endpoint could not be closed; written before at_end_
    std::thread thread_;                          // last: it uses everything above
};

}  // namespace fkv
