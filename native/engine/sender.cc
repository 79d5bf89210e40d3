#include "engine/sender.h"

#include <algorithm>
#include <utility>

namespace fkv {
namespace {

constexpr std::size_t kMessagesPerTurn = 64;  // of a peer, before the next one's turn
constexpr std::size_t kTurnsPerRound = 16;    // transfers served between two looks at the completion queues ...
constexpr std::size_t kLooksPerRound = 256;   // ... and looked at
}  // namespace

Sender::Sender(std::uint32_t group, const Epoch& epoch, std::vector<std::unique_ptr<Rail>>& rails,
               std::size_t max_transfers, EventQueue& events)
    : group_(group), rails_(rails), max_transfers_(max_transfers), poster_(group, epoch, rails), events_(events) {}

bool Sender::reserve(std::size_t n) {
    if (in_flight_.fetch_add(n) + n <= max_transfers_) return true;
    in_flight_.fetch_sub(n);
    return false;
}

void Sender::add(std::shared_ptr<Transfer> transfer) {
    auto& t = *transfer;
    t.live_index = live_.size();
    live_.push_back(std::move(transfer));
    poster_.begin(t);
    if (t.kind != Transfer::Kind::kMessage) return queue(t);
    auto& messages = t.peer->sides[group_]->messages;
    if (messages.empty()) talking_.push_back(t.peer.get());
    messages.push_back(&t);
}

// -- posting ---------------------------------------------------------------------------------------------------------

bool Sender::post(std::int64_t now) {
    ++round_;
    bool worked = !parked_.empty() && unpark();
    worked |= post_messages(now);
    worked |= post_turns(urgent_, now);
    worked |= post_turns(bulk_, now);
    return worked;
}

bool Sender::must_stop(Transfer& transfer, std::int64_t now) {
    if (transfer.deadline_ns && now >= transfer.deadline_ns) transfer.expired = true;
    if (transfer.peer->removed.load(std::memory_order_relaxed))
        transfer.fail({0, 0, "post", "", "", "the peer was removed"});
    if (transfer.peer->leaving.load(std::memory_order_relaxed))
        transfer.fail({0, 0, "post", "", "", "the peer has closed its engine"});
    return transfer.failed || transfer.expired || transfer.cancelled.load(std::memory_order_relaxed);
}

bool Sender::post_messages(std::int64_t now) {
    bool worked = false;
    for (std::size_t turn = std::min(talking_.size(), kTurnsPerRound); turn > 0; --turn) {
        auto& messages = talking_.front()->sides[group_]->messages;
        const auto peer = messages.front()->peer;  // its last message may be what keeps it alive
        talking_.pop_front();
        for (std::size_t n = kMessagesPerTurn; n > 0 && !messages.empty(); --n) {
            auto* t = messages.front();
            if (!must_stop(*t, now) && poster_.post_some(*t, now) == PostResult::kAgain) {
                if (t->waits_since_ns == 0) t->waits_since_ns = now;
                break;
            }
            messages.pop_front();
            worked = true;
            stop_posting(*t);
        }
        if (!messages.empty()) talking_.push_back(peer.get());
    }
    return worked;
}

// Lists by watch, so that a round costs one look at each word while nothing has changed.
bool Sender::unpark() {
    bool any = false;
    for (auto it = parked_.begin(); it != parked_.end();) {
        auto& parked = it->second;
        const auto word = it->first->word();
        if (word < parked.next) {
            ++it;
            continue;
        }
        parked.next = ~std::uint64_t{0};
        std::erase_if(parked.transfers, [&](Transfer* t) {
            if (t->waits_for > word) {
                parked.next = std::min(parked.next, t->waits_for);
                return false;
            }
            queue(*t);
            return true;
        });
        any = true;
        it = parked.transfers.empty() ? parked_.erase(it) : std::next(it);
    }
    return any;
}

template <typename Match>
std::vector<Transfer*> Sender::take_parked(Match&& match) {
    std::vector<Transfer*> taken;
    for (auto it = parked_.begin(); it != parked_.end();) {
        std::erase_if(it->second.transfers, [&](Transfer* t) {
            if (!match(*t)) return false;
            taken.push_back(t);
            return true;
        });
        it = it->second.transfers.empty() ? parked_.erase(it) : std::next(it);
    }
    return taken;
}

void Sender::sweep(std::int64_t now) {
    for (auto* t : take_parked([&](Transfer& parked) { return must_stop(parked, now); })) stop_posting(*t);
    for (auto* peer : talking_) {
        auto& messages = peer->sides[group_]->messages;
        // All but the first: that one has its turn.
        for (auto it = messages.begin() + 1; it != messages.end();) {
            auto* t = *it;
            if (!must_stop(*t, now)) {
                ++it;
                continue;
            }
            it = messages.erase(it);
            stop_posting(*t);
        }
    }
}

// Beyond the usual number of turns only for peers that have not taken nothing in this round: transfers to one that
// takes nothing, however many, do not keep those to others from their turns.
bool Sender::post_turns(Queue& queue, std::int64_t now) {
    std::size_t served = 0, tried = 0;
    for (std::size_t look = std::min(queue.size(), kLooksPerRound);
         look > 0 && served < kTurnsPerRound && tried < 2 * kTurnsPerRound; --look) {
        auto* t = queue.front();
        queue.pop_front();
        auto& refused_in_round = t->peer->sides[group_]->refused_in_round;
        const bool stops = must_stop(*t, now);
        if (!stops && tried >= kTurnsPerRound && refused_in_round == round_) {
            if (t->waits_since_ns == 0) t->waits_since_ns = now;
            queue.push_back(t);
            continue;
        }
        ++tried;
        const auto outstanding = t->outstanding;
        const bool stopped = stops || poster_.post_some(*t, now) == PostResult::kFailed || t->all_posted;
        const bool posted = t->outstanding != outstanding;
        served += stopped || posted;
        if (posted || t->waits_for)
            t->waits_since_ns = 0;
        else if (t->waits_since_ns == 0)
            t->waits_since_ns = now;
        if (stopped) {
            stop_posting(*t);
        } else if (t->waits_for) {
            auto& parked = parked_[t->watch.get()];
            parked.next = std::min(parked.next, t->waits_for);
            parked.transfers.push_back(t);
        } else {
            if (!posted) refused_in_round = round_;
            queue.push_back(t);
        }
    }
    return served > 0;
}

bool Sender::anything_outstanding() const {
    return std::any_of(rails_.begin(), rails_.end(), [](const auto& rail) { return rail->outstanding_ops > 0; });
}

// -- endings ---------------------------------------------------------------------------------------------------------

void Sender::on_sent(Rail& rail, Op* op, std::int64_t now) {
    rail.stats.completions.add(1);
    if (op->link->avoided_for_ns) op->link->works();
    if (op->kind == Op::Kind::kWrite) {
        const auto us = static_cast<std::uint64_t>(now - op->posted_ns) / 1000;
        rail.stats.write_latency.add(us);
        op->link->stats->write_latency.add(us);
    }
    if (op->transfer) op->transfer->bytes_done += op->nbytes;
    retire(rail, op);
}

void Sender::on_failed(Rail& rail, Op* op, OpError error, std::int64_t now) {
    op->link->stats->errors.add(1);
    op->link->failed(now);
    if (auto* transfer = op->transfer) {
        if (op->kind == Op::Kind::kWrite) transfer->failed_pages.push_back(op->pages);
        transfer->fail(std::move(error));
    }
    retire(rail, op);
}

void Sender::on_unattributed(Rail& rail, const OpError& error) {
    rail.for_each_in_flight([&](Op& op) {
        op.link->has_failed = true;
        if (op.transfer) op.transfer->fail(error);
    });
}

void Sender::retire(Rail& rail, Op* op) {
    auto* transfer = op->transfer;
    if (transfer) transfer->outstanding_plain -= op->plain;
    rail.free_op(op);
    if (transfer && --transfer->outstanding == 0 && transfer->exhausted) finish(*transfer, Outcome::kOk);
}

void Sender::stop_posting(Transfer& transfer) {
    transfer.exhausted = true;
    if (transfer.outstanding == 0) finish(transfer, Outcome::kOk);
}

void Sender::finish(Transfer& transfer, Outcome outcome) {
    if (transfer.failed)
        outcome = Outcome::kFailed;
    else if (outcome == Outcome::kOk && !transfer.all_posted)
        outcome = stopping_ ? Outcome::kClosed : transfer.expired ? Outcome::kExpired : Outcome::kCancelled;
    Event event;
    event.kind = Event::kTransfer;
    event.group = group_;
    event.outcome = outcome;
    event.id = transfer.id;
    event.bytes = transfer.bytes_done;
    event.peer = transfer.peer->epoch;
    event.error = std::move(transfer.error);
    event.failed_pages = std::move(transfer.failed_pages);
    if (!transfer.all_posted && (transfer.kind == Transfer::Kind::kWrite || transfer.kind == Transfer::Kind::kRead)) {
        // Where posting stopped: everything from here on was never sent.
        PlannedWrite next{};
        if (transfer.has_planned || transfer.cursor.next(next)) {
            const auto& first = transfer.has_planned ? transfer.planned : next;
            event.unposted = {static_cast<std::uint32_t>(first.piece - transfer.pieces.data()), first.first_page, 1};
        }
    }
    // Let go of its regions before anyone can hear that it has ended.
    for (auto& piece : transfer.pieces) piece.src->end_use();
    transfer.pieces.clear();
    const auto index = transfer.live_index;
    std::swap(live_[index], live_.back());
    live_[index]->live_index = index;
    const auto keep = std::move(live_.back());
    live_.pop_back();
    in_flight_.fetch_sub(1);
    events_.post(std::move(event));
}

void Sender::stop_all() {
    stopping_ = true;
    // stop_posting() may finish and free the transfer, so each queue is emptied first.
    for (auto* t : take_parked([](Transfer&) { return true; })) stop_posting(*t);
    for (auto* queue : {&urgent_, &bulk_})
        for (auto* t : std::exchange(*queue, {})) stop_posting(*t);
    for (auto* peer : std::exchange(talking_, {}))
        for (auto* t : std::exchange(peer->sides[group_]->messages, {})) stop_posting(*t);
}

void Sender::end_all() {
    stop_all();
    while (!live_.empty()) finish(*live_.back(), Outcome::kClosed);
}

}  // namespace fkv
