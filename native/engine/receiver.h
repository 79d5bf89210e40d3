// What arrives at a group: immediates go to their counters, frames to the owner's inbox.
//
// Threads: the progress thread only; the counters themselves from any.
// Failure: bytes from a peer that make no sense are dropped and counted; a full inbox leaves receives unposted, which
//          holds back the senders.
#pragma once

#include <deque>

#include "base/clock.h"
#include "engine/counters.h"
#include "engine/event.h"
#include "engine/farewell.h"
#include "engine/heartbeat.h"
#include "engine/rail.h"

namespace fkv {

class Receiver {
  public:
    Receiver(std::uint32_t group, std::uint32_t num_counters, std::size_t max_inbox_bytes, Heartbeat& heartbeat,
             Farewell& farewell, EventQueue& events)
        : group_(group),
          max_inbox_bytes_(max_inbox_bytes),
          heartbeat_(heartbeat),
          farewell_(farewell),
          events_(events),
          counters_(num_counters) {}

    // A remote write's immediate; `recv` is the receive that it used up, or null.
    void on_imm(Rail& rail, std::uint32_t word, Op* recv) {
        rail.stats.imms.add(1);
        count(word);
        if (recv) rail.repost(recv);
    }

    void on_message(Rail& rail, Op* recv, std::uint64_t nbytes, std::int64_t now) {
        rail.stats.messages.add(1);
        if (deliver(*recv, nbytes, held_.empty(), now))
            rail.repost(recv);
        else
            held_.push_back({&rail, recv, nbytes});
    }

    // Delivers what had to wait for room in the inbox.
    void deliver_held(std::int64_t now) {
        for (; !held_.empty() && deliver(*held_.front().recv, held_.front().nbytes, true, now); held_.pop_front())
            held_.front().rail->repost(held_.front().recv);
        // The held frames' receives are not posted: whatever came after them, pings too, may wait outside.
        if (!held_.empty()) heartbeat_.deaf(now);
    }
    bool holds() const { return !held_.empty(); }
    // From here on data for which there is no room is dropped: nobody is going to make any.
    void stop_holding(std::int64_t now) {
        drops_ = true;
        deliver_held(now);
    }

    CounterTable& counters() { return counters_; }
    const ReceiverStats& stats() const { return stats_; }

  private:
    void count(std::uint32_t word);
    // False: there is no room for it, or data is not wanted; the frame must be kept. Nothing else waits behind data.
    bool deliver(const Op& recv, std::uint64_t nbytes, bool take_data, std::int64_t now);

    struct HeldFrame {
        Rail* rail;
        Op* recv;
        std::uint64_t nbytes;
    };

    const std::uint32_t group_;
    const std::size_t max_inbox_bytes_;
    Heartbeat& heartbeat_;
    Farewell& farewell_;
    EventQueue& events_;
    CounterTable counters_;
    ReceiverStats stats_;
    std::deque<HeldFrame> held_;
    bool drops_ = false;
};

}  // namespace fkv
