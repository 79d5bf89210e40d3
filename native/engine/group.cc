#include "engine/group.h"

#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <array>
#include <cstring>

namespace fkv {
namespace {

constexpr std::size_t kNumFrames = 64;             // message frames per rail and direction
constexpr std::size_t kPostsPerTurn = 64;          // writes that a transfer may post before the next one's turn
constexpr std::size_t kTurnsPerRound = 16;         // transfers served between two looks at the completion queues
constexpr std::uint64_t kMaxWriteBytes = 1 << 20;  // larger ones gain nothing and make others wait
constexpr int kMaxIdleWakes = 16;                  // by a NIC's descriptor, without finding work
constexpr std::size_t kMaxLinks = 64;              // rail pairs to one peer that are considered for a write
constexpr std::size_t kErrorsPerRound = 64;        // failed completions that are read before anything else has its turn

OpError detail_of(const Error& error) {
    auto detail = error.op();
    detail.text = error.what();
    return detail;
}

// The cpus as the kernel wants them. Throws Error(kConfig) for one that this process may not use.
cpu_set_t checked_cpus(const std::vector<int>& cpus) {
    cpu_set_t allowed, set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof allowed, &allowed)) CPU_ZERO(&allowed);
    for (const int cpu : cpus) {
        if (cpu < 0 || cpu >= CPU_SETSIZE || !CPU_ISSET(cpu, &allowed))
            throw Error(ErrorKind::kConfig,
                        "cpu " + std::to_string(cpu) +
                            " is not among the cpus that this process may use (taskset, cgroup cpuset)");
        CPU_SET(cpu, &set);
    }
    return set;
}

// Pins and names the calling thread, and lets its naps end on time.
void prepare_thread(const cpu_set_t& cpus) {
    pthread_setname_np(pthread_self(), "fabric_kv");
    // The default slack of 50 us would double our shortest naps: prctl(2).
    prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);
    if (CPU_COUNT(&cpus) > 0) pthread_setaffinity_np(pthread_self(), sizeof cpus, &cpus);
}

std::uint64_t smallest_max_msg(const std::vector<std::unique_ptr<Rail>>& rails) {
    std::uint64_t bytes = kMaxWriteBytes;
    for (const auto& rail : rails) bytes = std::min(bytes, rail->info().max_msg_bytes);
    return bytes;
}

}  // namespace

Group::Group(std::uint32_t index, const Epoch& epoch, std::vector<std::unique_ptr<Nic>> nics,
             const GroupOptions& options, EventQueue& events)
    : index_(index),
      epoch_(epoch),
      options_(options),
      events_(events),
      rails_([&] {
          std::vector<std::unique_ptr<Rail>> rails;
          for (auto& nic : nics) rails.push_back(std::make_unique<Rail>(std::move(nic), kNumFrames));
          return rails;
      }()),
      max_write_bytes_(smallest_max_msg(rails_)),
      counters_(options.num_counters),
      submissions_(options.max_transfers),
      calls_(options.max_transfers),
      heartbeat_(options.heartbeat) {
    if (rails_.empty()) throw Error(ErrorKind::kConfig, "group " + std::to_string(index) + " has no NIC");
    thread_ = std::thread([this, cpus = checked_cpus(options.cpus)] {
        prepare_thread(cpus);
        run();
    });
}

Group::~Group() {
    begin_close(0);
    close();
}

bool Group::submit(std::shared_ptr<Transfer> transfer) {
    if (stopping_.load()) throw Error(ErrorKind::kClosed, "the engine is closed");
    if (in_flight_.fetch_add(1) >= options_.max_transfers || !submissions_.push(std::move(transfer))) {
        in_flight_.fetch_sub(1);
        // Beside close(), the queue is shut rather than full.
        if (stopping_.load()) throw Error(ErrorKind::kClosed, "the engine is closed");
        return false;
    }
    wake();
    return true;
}

bool Group::run_soon(std::function<void()> fn) {
    if (!calls_.push(std::move(fn))) return false;
    wake();
    return true;
}

void Group::wake() {
    // Pairs with sleep(): it sets the flag, then looks at the queues; we fill a queue, then look at the flag.
    if (sleeping_.load()) bell_.ring();
}

void Group::forget(const Peer& peer) { heartbeat_.forget(peer.epoch); }

// -- the progress thread ---------------------------------------------------------------------------------------------

void Group::run() {
    try {
        last_work_ns_ = now_ns();
        while (!stopping_.load(std::memory_order_relaxed)) rest(round());
        drain();
    } catch (const std::exception& error) {
        // Nothing on this thread is expected to throw. If it does, no completion will be seen any more: close() ends
        // all.
        stopping_.store(true);
        fault({0, 0, "progress", "", "", std::string("the progress thread ended: ") + error.what()});
    }
}

bool Group::round() {
    bool worked = take_submissions();
    worked |= post_messages();
    worked |= post_writes();
    for (auto& rail : rails_) worked |= poll_rail(*rail);
    if (const auto now = now_ns(); now >= next_housekeeping_ns_) housekeeping();
    return worked;
}

bool Group::take_submissions() {
    calls_.pop_all(incoming_calls_);
    for (auto& call : incoming_calls_) call();
    incoming_calls_.clear();
    submissions_.pop_all(incoming_);
    if (incoming_.empty()) return false;
    for (auto& transfer : incoming_) {
        auto& t = *transfer;
        t.live_index = live_.size();
        live_.push_back(std::move(transfer));
        if (t.kind == Transfer::Kind::kMessage) {
            messaging_.push_back(&t);
            continue;
        }
        const bool counted = t.token.unit_bytes > 0;
        t.cursor = PageCursor(
            t.pieces, {max_write_bytes_, counted ? t.token.unit_bytes : 1, counted ? kMaxWeight : ~std::uint64_t{0}});
        writing_.push_back(&t);
    }
    incoming_.clear();
    return true;
}

bool Group::post_messages() {
    bool worked = false;
    // A peer that takes nothing must not hold up messages to the others: each gets one try per round.
    for (std::size_t n = std::min(messaging_.size(), kNumFrames); n > 0; --n) {
        auto* t = messaging_.front();
        messaging_.pop_front();
        const auto result =
            t->cancelled.load(std::memory_order_relaxed) || t->failed ? PostResult::kFailed : post_message(*t);
        if (result == PostResult::kAgain) {
            messaging_.push_back(t);
            continue;
        }
        worked = true;
        stop_posting(*t);
    }
    return worked;
}

PostResult Group::post_message(Transfer& transfer) {
    // An empty message is one frame without payload.
    do {
        const auto payload = std::span(transfer.message).subspan(transfer.message_offset);
        const auto nbytes = std::min(payload.size(), kMaxFramePayload);
        const FrameHeader header{kFrameMagic,
                                 kFrameVersion,
                                 static_cast<std::uint16_t>(FrameKind::kData),
                                 epoch_,
                                 transfer.id,
                                 static_cast<std::uint32_t>(transfer.message.size()),
                                 static_cast<std::uint32_t>(transfer.message_offset)};
        const auto result = post_frame(header, payload.first(nbytes), transfer.peer, &transfer);
        if (result != PostResult::kOk) return result;
        ++transfer.outstanding;
        transfer.message_offset += nbytes;
    } while (transfer.message_offset < transfer.message.size());
    transfer.all_posted = true;
    return PostResult::kOk;
}

// A frame of a transfer's message, or a ping.
PostResult Group::post_frame(const FrameHeader& header, std::span<const std::byte> payload,
                             const std::shared_ptr<Peer>& peer, Transfer* transfer) {
    auto& rail = *rails_[0];
    Peer::Link* link = nullptr;
    try {
        link = &links_to(*peer, 0).front();
    } catch (const Error& error) {  // the provider refuses the peer's address
        if (transfer) fail(*transfer, detail_of(error));
        return PostResult::kFailed;
    }
    auto* op =
        rail.take_op(transfer ? Op::Kind::kMessage : Op::Kind::kPing, *link, transfer, sizeof header + payload.size());
    if (!op) return PostResult::kAgain;
    if (!transfer) op->keep = peer;
    std::memcpy(op->frame, &header, sizeof header);
    if (!payload.empty()) std::memcpy(op->frame + sizeof header, payload.data(), payload.size());
    const auto result = rail.post_frame(op);
    if (result != PostResult::kOk) rail.free_op(op);
    if (result == PostResult::kFailed && transfer) fail(*transfer, rail.nic().last_post_error());
    return result;
}

bool Group::post_writes() {
    bool worked = false;
    for (std::size_t turn = std::min(writing_.size(), kTurnsPerRound); turn > 0; --turn) {
        auto* t = writing_.front();
        writing_.pop_front();
        auto result = PostResult::kOk;
        for (std::size_t n = 0; n < kPostsPerTurn; ++n) {
            if (t->failed || t->cancelled.load(std::memory_order_relaxed)) {
                result = PostResult::kFailed;
                break;
            }
            if (!t->has_planned && !t->cursor.next(t->planned)) {
                t->all_posted = true;
                break;
            }
            t->has_planned = true;
            result = post_planned(*t);
            if (result != PostResult::kOk) break;
            t->has_planned = false;
            worked = true;
        }
        if (result == PostResult::kFailed || t->all_posted) {
            worked = true;
            stop_posting(*t);
        } else {
            writing_.push_back(t);
        }
    }
    return worked;
}

std::vector<Peer::Link>& Group::links_to(Peer& peer, std::uint32_t remote_group) {
    auto& links = peer.links[index_][remote_group];
    if (!links.empty()) return links;
    const auto& remote = peer.groups[remote_group];
    const auto num_local = rails_.size(), num_remote = remote.size();
    std::vector<Peer::Link> made;
    for (std::size_t k = 0; k < std::max(num_local, num_remote); ++k) {
        const auto local_rail = static_cast<std::uint32_t>(k % num_local),
                   remote_rail = static_cast<std::uint32_t>(k % num_remote);
        made.push_back({.local_rail = local_rail,
                        .remote_rail = remote_rail,
                        .address = rails_[local_rail]->nic().insert_peer(remote[remote_rail])});
    }
    links = std::move(made);
    return links;
}

PostResult Group::post_planned(Transfer& transfer) {
    try {
        auto& links = links_to(*transfer.peer, transfer.planned.piece->dst->group);
        if (links.size() == 1) return post_write_on(transfer, links[0]);
        // The rail with the fewest bytes in flight takes it; if that one is full, the next one.
        std::array<Peer::Link*, kMaxLinks> order;
        const auto count = std::min(links.size(), order.size());
        for (std::size_t i = 0; i < count; ++i) order[i] = &links[i];
        std::sort(order.begin(), order.begin() + count, [&](const auto* a, const auto* b) {
            return rails_[a->local_rail]->outstanding_bytes < rails_[b->local_rail]->outstanding_bytes;
        });
        for (std::size_t i = 0; i < count; ++i)
            if (const auto result = post_write_on(transfer, *order[i]); result != PostResult::kAgain) return result;
        return PostResult::kAgain;
    } catch (const Error& error) {  // the provider refuses the peer's address
        fail(transfer, detail_of(error));
        return PostResult::kFailed;
    }
}

PostResult Group::post_write_on(Transfer& transfer, Peer::Link& link) {
    auto& rail = *rails_[link.local_rail];
    const auto& planned = transfer.planned;
    auto* op = rail.take_op(Op::Kind::kWrite, link, &transfer, planned.nbytes);
    if (!op) return PostResult::kAgain;
    const auto& src = *planned.piece->src;
    const auto& dst = planned.piece->dst->rails[link.remote_rail];
    WriteOp write{};
    write.src = src.base + planned.src_offset;
    write.local_desc = src.rails[link.local_rail]->local_desc();
    write.nbytes = planned.nbytes;
    write.peer = link.address;
    write.dst = dst.base + planned.dst_offset;
    write.rkey = dst.rkey;
    write.has_imm = transfer.token.unit_bytes > 0;
    write.imm = pack({transfer.token.slot, transfer.token.generation, static_cast<std::uint32_t>(planned.units)});
    write.context = &op->context;
    const auto result = rail.nic().post_write(write);
    if (result == PostResult::kOk) {
        ++transfer.outstanding;
        RailStats::add(rail.stats.ops, 1);
        RailStats::add(rail.stats.bytes, planned.nbytes);
        return result;
    }
    rail.free_op(op);
    if (result == PostResult::kAgain)
        RailStats::add(rail.stats.again, 1);
    else
        fail(transfer, rail.nic().last_post_error());
    return result;
}

// -- completions -----------------------------------------------------------------------------------------------------

bool Group::poll_rail(Rail& rail) {
    std::array<Completion, 64> completions;
    const int n = rail.nic().poll(completions);
    for (int i = 0; i < n; ++i) on_completion(rail, completions[i]);
    bool worked = n > 0;
    if (n < 0) {
        // Bounded: a receive that fails and is posted again may fail again at once.
        FailedCompletion failure;
        for (std::size_t i = 0; i < kErrorsPerRound && rail.nic().read_error(failure); ++i) {
            on_failure(rail, std::move(failure));
            worked = true;
        }
    }
    return worked;
}

void Group::on_completion(Rail& rail, const Completion& completion) {
    auto* op = reinterpret_cast<Op*>(completion.context);
    switch (completion.kind) {
        case Completion::kRemoteWrite:
            RailStats::add(rail.stats.imms, 1);
            on_imm(completion.imm);
            if (op) rail.repost(op);  // the immediate used up a receive
            return;
        case Completion::kReceived:
            RailStats::add(rail.stats.messages, 1);
            if (on_frame(*op, completion.nbytes, held_.empty()))
                rail.repost(op);
            else
                held_.push_back({&rail, op, completion.nbytes});
            return;
        case Completion::kSent:
            RailStats::add(rail.stats.completions, 1);
            if (op->transfer) op->transfer->bytes_done += op->nbytes;
            retire(rail, op);
            return;
    }
}

void Group::on_failure(Rail& rail, FailedCompletion failure) {
    RailStats::add(rail.stats.errors, 1);
    auto* op = reinterpret_cast<Op*>(failure.context);
    if (!op) {
        // Nobody knows which operation it was. Every transfer on this endpoint fails; what they posted stays owned
        // until its own completion, or the close of the endpoint, retires it.
        rail.for_each_in_flight([&](Op& other) {
            if (other.transfer) fail(*other.transfer, failure.error);
        });
        fault(std::move(failure.error));
        return;
    }
    if (op->kind == Op::Kind::kRecv) {
        rail.repost(op);
        return;
    }
    if (op->transfer) fail(*op->transfer, std::move(failure.error));
    retire(rail, op);
}

void Group::on_imm(std::uint32_t word) {
    const auto imm = unpack(word);
    Event event;
    event.group = index_;
    if (imm.slot == kUserSlot) {
        event.kind = Event::kUser;
        event.id = word & ((1u << (kGenerationBits + kWeightBits)) - 1);
        // A peer may send any number of them, faster than anyone takes them.
        if (events_.inbox_bytes() + sizeof(Event) > options_.max_inbox_bytes)
            return RailStats::add(stats_.dropped_imms, 1);
        events_.post(std::move(event));
        return;
    }
    const auto verdict = counters_.add(imm);
    if (verdict == CounterVerdict::kNothing) return;
    if (verdict == CounterVerdict::kStale) return RailStats::add(stats_.stale_imms, 1);
    if (verdict != CounterVerdict::kFired) RailStats::add(stats_.violations, 1);
    if (verdict == CounterVerdict::kLate) return;
    event.kind = Event::kCounter;
    event.verdict = verdict;
    event.slot = imm.slot;
    event.generation = imm.generation;
    events_.post(std::move(event));
}

// False: there is no room for it, or data is not wanted; the frame must be kept. Pings never wait behind data.
bool Group::on_frame(const Op& recv, std::uint64_t nbytes, bool take_data) {
    const auto frame = parse_frame({recv.frame, std::min<std::size_t>(nbytes, kFrameBytes)});
    if (!frame) {
        RailStats::add(stats_.malformed_frames, 1);
        return true;
    }
    heartbeat_.heard(frame->header.sender, now_ns());
    if (frame->header.kind == static_cast<std::uint16_t>(FrameKind::kPing)) return true;
    if (!take_data || events_.inbox_bytes() + frame->payload.size() > options_.max_inbox_bytes) return false;
    Event event;
    event.kind = Event::kMessage;
    event.peer = frame->header.sender;
    event.id = frame->header.message_id;
    event.bytes = frame->header.total_bytes;
    event.offset = frame->header.offset;
    event.payload.assign(frame->payload.begin(), frame->payload.end());
    events_.post(std::move(event));
    return true;
}

void Group::retire(Rail& rail, Op* op) {
    auto* transfer = op->transfer;
    rail.free_op(op);
    if (transfer && --transfer->outstanding == 0 && transfer->exhausted) finish(*transfer, Outcome::kOk);
}

void Group::fail(Transfer& transfer, OpError error) {
    if (transfer.failed) return;  // the first error is the cause, later ones its echo
    transfer.failed = true;
    transfer.error = std::move(error);
}

void Group::stop_posting(Transfer& transfer) {
    transfer.exhausted = true;
    if (transfer.outstanding == 0) finish(transfer, Outcome::kOk);
}

void Group::finish(Transfer& transfer, Outcome outcome) {
    if (transfer.failed)
        outcome = Outcome::kFailed;
    else if (outcome == Outcome::kOk && !transfer.all_posted)
        outcome = stopping_.load() ? Outcome::kClosed : Outcome::kCancelled;
    Event event;
    event.kind = Event::kTransfer;
    event.group = index_;
    event.outcome = outcome;
    event.id = transfer.id;
    event.bytes = transfer.bytes_done;
    event.peer = transfer.peer->epoch;
    event.error = std::move(transfer.error);
    // Let go of its regions before anyone can hear that it has ended.
    for (auto& piece : transfer.pieces) piece.src->end_use();
    transfer.pieces.clear();
    const auto index = transfer.live_index;
    std::swap(live_[index], live_.back());
    live_[index]->live_index = index;
    live_.pop_back();
    in_flight_.fetch_sub(1);
    events_.post(std::move(event));
}

void Group::fault(OpError error) {
    Event event;
    event.kind = Event::kFault;
    event.group = index_;
    event.error = std::move(error);
    events_.post(std::move(event));
}

// -- time ------------------------------------------------------------------------------------------------------------

void Group::housekeeping() {
    const auto now = now_ns();
    next_housekeeping_ns_ = now + std::min(heartbeat_.interval_ns() / 4, 10 * kMillisecond);
    while (!held_.empty() && on_frame(*held_.front().recv, held_.front().nbytes, true)) {
        held_.front().rail->repost(held_.front().recv);
        held_.pop_front();
    }
    // The held frames' receives are not posted: whatever came after them, pings too, may wait outside.
    if (!held_.empty()) heartbeat_.deaf(now);
    for (auto& rail : rails_) rail->post_receives();
    heartbeat_.check(
        now,
        [&](const std::shared_ptr<Peer>& peer) {
            // A ping that fails is left out: a peer that cannot be reached is silent, and will be reported.
            return post_frame(
                       {kFrameMagic, kFrameVersion, static_cast<std::uint16_t>(FrameKind::kPing), epoch_, 0, 0, 0}, {},
                       peer, nullptr) != PostResult::kAgain;
        },
        [&](Peer& peer, std::int64_t silent_ns) {
            Event event;
            event.kind = Event::kPeerLost;
            event.peer = peer.epoch;
            event.error.text = "nothing was heard for " + std::to_string(silent_ns / kMillisecond) + " ms";
            events_.post(std::move(event));
        });
}

bool Group::anything_outstanding() const {
    return !writing_.empty() || !messaging_.empty() ||
           std::any_of(rails_.begin(), rails_.end(), [](const auto& rail) { return rail->outstanding_ops > 0; });
}

// Spin, then yield, then sleep: how soon depends on whether an answer is due.
void Group::rest(bool worked) {
    const auto now = now_ns();
    if (worked) {
        last_work_ns_ = now;
        idle_wakes_ = 0;
    }
    if (worked || options_.spin) return;
    const auto idle_ns = now - last_work_ns_;
    if (idle_ns < 20 * kMicrosecond) return;
    const bool busy = anything_outstanding();
    if (idle_ns < (busy ? 200 : 50) * kMicrosecond) {
        std::this_thread::yield();
        return;
    }
    std::int64_t timeout_ns;
    const bool descriptors =
        std::all_of(rails_.begin(), rails_.end(), [](const auto& rail) { return rail->info().wait_fd; });
    if (busy)
        // Posts that were refused are tried again although no descriptor says so.
        // At first soon: a queue that is full empties quickly, unless its peer is gone.
        timeout_ns = descriptors && writing_.empty() && messaging_.empty() ? 5 * kMillisecond
                     : idle_ns < 10 * kMillisecond                         ? 100 * kMicrosecond
                                                                           : kMillisecond;
    else if (descriptors)
        timeout_ns = 100 * kMillisecond;
    else
        // Nothing wakes us but the clock: short naps just after work, longer ones when the peer seems done.
        timeout_ns = idle_ns < 10 * kMillisecond ? 50 * kMicrosecond : kMillisecond;
    if (!heartbeat_.empty() || !held_.empty())
        timeout_ns = std::min(timeout_ns, std::max<std::int64_t>(next_housekeeping_ns_ - now, 0));
    sleep(timeout_ns);
}

void Group::sleep(std::int64_t timeout_ns) {
    std::array<pollfd, kMaxLinks + 1> fds;
    nfds_t count = 0;
    fds[count++] = {bell_.fd(), POLLIN, 0};
    // A descriptor that stays readable although there is nothing to read (libfabric 1.17's "net" does that) would turn
    // sleeping into spinning: after a few such wake-ups the clock alone decides.
    const bool distrust = idle_wakes_ > kMaxIdleWakes;
    if (distrust) timeout_ns = std::min(timeout_ns, 200 * kMicrosecond);
    for (auto& rail : rails_) {
        if (distrust || !rail->info().wait_fd || count == fds.size()) continue;
        if (!rail->nic().may_sleep()) {
            ++idle_wakes_;
            return;
        }
        fds[count++] = {rail->nic().wait_fd(), POLLIN, 0};
    }
    sleeping_.store(true);
    if (submissions_.empty() && calls_.empty() && !stopping_.load()) {
        const timespec timeout{timeout_ns / kSecond, timeout_ns % kSecond};
        ::ppoll(fds.data(), count, &timeout, nullptr);
        RailStats::add(stats_.sleeps, 1);
        if (std::any_of(fds.begin() + 1, fds.begin() + count, [](const pollfd& fd) { return fd.revents != 0; }))
            ++idle_wakes_;
    }
    sleeping_.store(false);
    if (fds[0].revents) bell_.clear();
}

// -- the end ---------------------------------------------------------------------------------------------------------

void Group::drain() {
    take_submissions();
    for (auto* queue : {&writing_, &messaging_}) {
        // stop_posting() may finish and free the transfer, so the queue is emptied first.
        auto waiting = std::exchange(*queue, {});
        for (auto* t : waiting) stop_posting(*t);
    }
    const auto deadline = drain_until_ns_.load();
    while (!live_.empty() && now_ns() < deadline) {
        bool worked = false;
        for (auto& rail : rails_) worked |= poll_rail(*rail);
        if (!worked) std::this_thread::sleep_for(std::chrono::nanoseconds(50 * kMicrosecond));
    }
}

void Group::begin_close(std::int64_t drain_ns) {
    if (stopping_.load()) return;
    drain_until_ns_.store(now_ns() + drain_ns);
    stopping_.store(true);
    bell_.ring();
}

void Group::close() {
    std::lock_guard lock(close_mutex_);
    if (closed_) return;
    closed_ = true;
    thread_.join();
    for (auto& rail : rails_) rail->close_endpoint();
    // A submission that slipped in beside stopping_ ends like all the others; after this none can.
    submissions_.close();
    submissions_.pop_all(incoming_);
    for (auto& transfer : incoming_) {
        transfer->live_index = live_.size();
        live_.push_back(std::move(transfer));
    }
    incoming_.clear();
    while (!live_.empty()) finish(*live_.back(), Outcome::kClosed);
}

}  // namespace fkv
