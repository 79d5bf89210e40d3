// Everything that leaves a group: transfers in turn, messages, pings; and how each of them ends.
//
// Owns:     every transfer from add() to its event.
// Threads:  the progress thread only, but for reserve() and in_flight().
// Failure:  a transfer's first error is kept; it ends in one event, after its last posted operation is retired.
//
// Fairness: transfers take turns; small ones and messages go before bulk. How much of a rail one peer may hold is the
// rail's to say. Messages to one peer go one after the other: it puts them together, and has room for few unfinished
// ones.
#pragma once

#include <algorithm>
#include <atomic>
#include <deque>
#include <initializer_list>
#include <map>
#include <memory>
#include <vector>

#include "engine/event.h"
#include "engine/poster.h"
#include "engine/rail.h"
#include "engine/transfer.h"

namespace fkv {

class Sender {
  public:
    Sender(std::uint32_t group, const Epoch& epoch, std::vector<std::unique_ptr<Rail>>& rails,
           std::size_t max_transfers, EventQueue& events);

    // Makes room for `n` transfers that will be added; false if that is more than max_transfers.
    bool reserve(std::size_t n);
    void unreserve(std::size_t n) { in_flight_.fetch_sub(n); }
    std::size_t in_flight() const { return in_flight_.load(std::memory_order_relaxed); }
    std::uint64_t max_write_bytes() const { return poster_.max_write_bytes(); }

    void add(std::shared_ptr<Transfer> transfer);
    // Posts what there is room for. True if anything was posted or ended.
    bool post(std::int64_t now);
    // False: there is no room for it now.
    bool ping(const std::shared_ptr<Peer>& peer, std::int64_t now) { return poster_.ping(peer, now); }
    // The links to one of a peer's groups; null if its address is refused.
    std::vector<Peer::Link>* links_to(Peer& peer, std::uint32_t remote_group) {
        return poster_.find_links(peer, remote_group);
    }
    // Whether what is posted there would go over another connection than what was posted before.
    bool is_broken(const Peer::Link& link) const { return poster_.is_broken(link); }
    // False: it has to be tried again.
    bool say_goodbye(const std::shared_ptr<Peer>& peer, Peer::Link& link, std::uint64_t id, std::int64_t now) {
        return poster_.goodbye(peer, link, id, now);
    }
    bool anything_queued() const { return !urgent_.empty() || !bulk_.empty() || !talking_.empty(); }
    bool anything_outstanding() const;
    // Whether a transfer waits for a watch's word, which nobody need tell us of.
    bool anything_parked() const { return !parked_.empty(); }
    // Whether a word has come to what a transfer waits for.
    bool anything_reached() const {
        return std::any_of(parked_.begin(), parked_.end(),
                           [](const auto& entry) { return entry.first->word() >= entry.second.next; });
    }
    // Whether a transfer waits for a word whose change wakes nobody.
    bool anything_to_watch() const {
        return std::any_of(parked_.begin(), parked_.end(), [](const auto& entry) { return entry.first->is_polled(); });
    }
    bool empty() const { return live_.empty(); }

    void on_sent(Rail& rail, Op* op, std::int64_t now);
    void on_failed(Rail& rail, Op* op, OpError error, std::int64_t now);
    // An error that no operation owns up to: everything on this endpoint fails, and stays owned until it is retired.
    void on_unattributed(Rail& rail, const OpError& error);

    // Ends what was cancelled while it waits: messages behind one that cannot be posted, transfers for a watch.
    void sweep(std::int64_t now);

    // Calls fn(transfer, why) for each that has waited so long for rails that do nothing; once in `for_ns`.
    template <typename Fn>
    void for_each_held_up(std::int64_t now, std::int64_t for_ns, Fn&& fn) {
        const auto look = [&](Transfer& first, const auto& all) {
            if (now - first.reported_ns < for_ns) return;
            const auto why = poster_.why_held_up(first, now, for_ns);
            if (why.empty()) return;
            for (auto* t : all) {
                t->reported_ns = now;
                fn(*t, why);
            }
        };
        for (auto* queue : {&urgent_, &bulk_})
            for (auto* t : *queue) look(*t, std::initializer_list<Transfer*>{t});
        for (auto* peer : talking_)
            if (auto& messages = peer->sides[group_]->messages; !messages.empty()) look(*messages.front(), messages);
    }

    void stop_all();  // posts nothing more
    void end_all();   // the endpoints are closed: whatever is left is retired

  private:
    using Queue = std::deque<Transfer*>;

    bool post_messages(std::int64_t now);
    bool unpark();
    void queue(Transfer& transfer) { (transfer.urgent ? urgent_ : bulk_).push_back(&transfer); }
    template <typename Match>
    std::vector<Transfer*> take_parked(Match&& match);
    bool post_turns(Queue& queue, std::int64_t now);
    bool must_stop(Transfer& transfer, std::int64_t now);
    void stop_posting(Transfer& transfer);
    void retire(Rail& rail, Op* op);
    void finish(Transfer& transfer, Outcome outcome);

    const std::uint32_t group_;
    std::vector<std::unique_ptr<Rail>>& rails_;
    const std::size_t max_transfers_;
    Poster poster_;
    EventQueue& events_;
    std::atomic<std::size_t> in_flight_{0};
    bool stopping_ = false;
    std::uint64_t round_ = 0;

    std::vector<std::shared_ptr<Transfer>> live_;
    Queue urgent_, bulk_;  // not everything posted yet; served in turn
    // Transfers that wait for a watch, and the least of the words that they wait for.
    struct Parked {
        std::uint64_t next = ~std::uint64_t{0};
        std::vector<Transfer*> transfers;
    };
    std::map<const Watch*, Parked> parked_;
    std::deque<Peer*> talking_;  // with messages to post, which keep it alive; served in turn
};

}  // namespace fkv
