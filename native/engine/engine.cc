#include "engine/engine.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <random>
#include <set>
#include <utility>

namespace fkv {
namespace {

// Transfers up to this size go before bulk: a few pages, a tail, a signal.
constexpr std::uint64_t kUrgentBytes = 64 << 10;

// No NIC has a smaller limit on one registration: whatever is refused in this size is refused for another reason.
constexpr std::uint64_t kLeastRegistration = 1 << 20;

// What drivers say of a registration that is above their limit; libfabric does not tell the limit itself.
bool may_be_too_large(const OpError& error) {
    return error.fi_errno == EINVAL || error.fi_errno == E2BIG || error.fi_errno == EMSGSIZE || error.fi_errno == EFBIG;
}

Epoch random_epoch() {
    std::random_device source;
    Epoch epoch;
    for (auto& byte : epoch) byte = static_cast<std::byte>(source());
    return epoch;
}

// Keeps regions whose NICs could not be closed, for ever or until they can.
void mark_stuck(const std::shared_ptr<Region>& region, bool stuck) {
    static std::mutex mutex;
    static auto& left = *new std::set<std::shared_ptr<Region>>;
    std::lock_guard lock(mutex);
    region->is_stuck.store(stuck);
    if (stuck)
        left.insert(region);
    else
        left.erase(region);
}

}  // namespace

Engine::Engine(std::vector<std::vector<std::unique_ptr<Nic>>> nics, const std::vector<GroupOptions>& options,
               std::size_t max_peer_registrations)
    : max_peer_registrations_(max_peer_registrations), share_counts_(std::make_shared<ShareCounts>(nics.size())) {
    if (nics.empty() || nics.size() != options.size())
        throw Error(ErrorKind::kConfig, "an engine needs at least one group, and options for each");
    address_.epoch = random_epoch();
    address_.process = this_process();
    for (std::uint32_t i = 0; i < nics.size(); ++i) {
        std::vector<std::vector<std::byte>> rails;
        for (const auto& nic : nics[i]) rails.push_back(nic->address());
        address_.groups.push_back(std::move(rails));
        groups_.push_back(std::make_unique<Group>(i, address_.epoch, std::move(nics[i]), options[i], events_, peers_));
    }
}

Engine::~Engine() {
    try {
        close(0);
    } catch (const Error&) {
        for (auto& group : groups_)
            if (!group->close()) Group::leave_behind(std::move(group));
    }
}

void Engine::check_open() const {
    if (in_child())
        throw Error(
            ErrorKind::kClosed,
            "the engine belongs to the parent process: a forked child must open its own, or be started by spawn");
    if (closed_.load()) throw Error(ErrorKind::kClosed, "the engine is closed");
}

Group& Engine::group(std::uint32_t index) {
    if (index >= groups_.size())
        throw Error(ErrorKind::kConfig, "group " + std::to_string(index) + " does not exist: the engine has " +
                                            std::to_string(groups_.size()));
    return *groups_[index];
}

std::shared_ptr<Region> Engine::new_region(void* base, std::uint64_t nbytes, std::uint32_t index) const {
    if (nbytes == 0) throw Error(ErrorKind::kConfig, "a region of 0 bytes cannot be registered");
    auto region = std::make_shared<Region>();
    region->epoch = address_.epoch;
    region->base = static_cast<std::byte*>(base);
    region->nbytes = nbytes;
    region->group = index;
    return region;
}

// Where a NIC finds the parts too large they are halved, and its limit is kept for the group's next regions.
void Engine::register_parts(Region& region) {
    auto& owner = group(region.group);
    const auto whole = region.part_ends.size() ? region.part_ends : Segments({region.nbytes});
    region.segments = whole.cut(owner.max_registration_bytes());
    std::optional<Error> first;
    for (;;) {
        try {
            region.rails = register_on_rails(region, region.parts);
            if (first) owner.limit_registrations(region.segments.largest());
            return;
        } catch (const Error& error) {
            const auto largest = region.segments.largest();
            if (!first) first.emplace(error);
            if (!may_be_too_large(error.op()) || largest <= kLeastRegistration) throw Error(*first);
            region.segments = whole.cut(std::bit_ceil(largest) / 2);
        }
    }
}

void Engine::enter(const std::shared_ptr<Region>& region) {
    std::lock_guard lock(mutex_);
    if (regions_.size() >= tidy_at_) {
        std::erase_if(regions_, [](const auto& weak) { return weak.expired(); });
        tidy_at_ = std::max<std::size_t>(64, 2 * regions_.size());  // so that a region costs the same however many
    }
    regions_.push_back(region);
}

std::shared_ptr<Region> Engine::register_region(void* base, std::uint64_t nbytes, std::uint32_t index) {
    std::shared_lock registering(registering_);
    check_open();
    auto region = new_region(base, nbytes, index);
    register_parts(*region);
    enter(region);
    return region;
}

std::shared_ptr<Region> Engine::register_device(const std::vector<DeviceMemory>& parts, std::uint32_t index) {
    std::shared_lock registering(registering_);
    check_open();
    std::vector<std::uint64_t> ends;
    std::uint64_t end = 0;
    for (const auto& part : parts) {
        if (part.nbytes == 0 || static_cast<std::byte*>(parts[0].base) + end != part.base)
            throw Error(ErrorKind::kConfig, "the parts of a device region must follow each other");
        ends.push_back(end += part.nbytes);
    }
    auto region = new_region(parts.empty() ? nullptr : parts[0].base, end, index);
    region->parts = parts;
    region->part_ends = Segments(std::move(ends));
    register_parts(*region);
    // The descriptors are the caller's: a registration for one peer is given others, or does without.
    for (auto& part : region->parts) part.dmabuf_fd = -1;
    enter(region);
    return region;
}

std::shared_ptr<Region> Engine::register_again(const std::shared_ptr<Region>& like) {
    std::shared_lock registering(registering_);
    check_open();
    if (like->epoch != address_.epoch) throw Error(ErrorKind::kConfig, "the region was registered with another engine");
    auto region = new_region(like->base, like->nbytes, like->group);
    region->segments = like->segments;
    region->parts = like->parts;
    region->part_ends = like->part_ends;
    {
        std::lock_guard lock(mutex_);
        if (like->rails.empty()) throw Error(ErrorKind::kClosed, "the region was deregistered");
        region->rails = like->rails;
    }
    enter(region);
    return region;
}

Engine::RegionFigures Engine::region_figures(std::uint32_t index) const {
    RegionFigures figures;
    std::set<const MemoryHandle*> seen;
    std::lock_guard lock(mutex_);
    for (const auto& weak : regions_) {
        const auto region = weak.lock();
        if (!region || region->group != index || region->rails.empty()) continue;
        ++figures.regions;
        for (const auto& rail : region->rails)
            for (std::size_t i = 0; i < rail.size(); ++i)
                if (seen.insert(rail[i].get()).second && &rail == &region->rails[0])
                    figures.bytes += region->segments.ends()[i] - region->segments.begin_of(i);
    }
    figures.registrations = seen.size();
    return figures;
}

// A failure drops the registrations already made.
Registrations Engine::register_on_rails(const Region& region, const std::vector<DeviceMemory>& parts) {
    Registrations rails;
    for (auto& rail : group(region.group).rails()) {
        auto& handles = rails.emplace_back();
        std::uint64_t begin = 0;
        for (const auto end : region.segments.ends()) {
            if (parts.empty()) {
                handles.push_back(rail->nic().register_memory(region.base + begin, end - begin));
            } else {
                const auto index = region.part_ends.index_of(begin);
                auto part = parts[index];
                part.base = region.base + begin;
                part.nbytes = end - begin;
                part.dmabuf_offset += begin - region.part_ends.begin_of(index);
                handles.push_back(rail->nic().register_device(part));
            }
            begin = end;
        }
    }
    return rails;
}

void Engine::deregister(const std::shared_ptr<Region>& region) {
    if (in_child()) return;
    if (region->epoch != address_.epoch)
        throw Error(ErrorKind::kConfig, "the region was registered with another engine");
    if (region->is_stuck.load())
        throw Error(ErrorKind::kStuck, "the region cannot be deregistered: its NIC has not returned from a call");
    if (const auto uses = region->drop())
        throw Error(ErrorKind::kConfig, "the region of " + std::to_string(region->nbytes) + " bytes is in use by " +
                                            std::to_string(uses) + " part(s) of transfers in flight");
    // Closed without the lock: a provider may take long.
    Registrations rails;
    decltype(region->shares) shares;
    std::lock_guard lock(mutex_);
    rails.swap(region->rails);
    shares.swap(region->shares);
}

RemoteRegion Engine::describe_region(const Region& region) const {
    std::lock_guard lock(mutex_);
    return describe_registrations(region, region.rails);
}

std::shared_ptr<Peer> Engine::add_peer(const EngineAddress& address, bool monitor) {
    check_open();
    if (address.groups.empty() ||
        std::any_of(address.groups.begin(), address.groups.end(), [](const auto& rails) { return rails.empty(); }))
        throw Error(ErrorKind::kUnreachable, "a peer's address names no group, or a group without NICs");
    const auto peer = peers_->add(address.epoch, [&] {
        auto made = std::make_shared<Peer>();
        made->epoch = address.epoch;
        made->owner = address_.epoch;
        made->groups = address.groups;
        made->process = address.process;
        made->keys = keys_of(address.epoch);
        for (std::size_t i = 0; i < groups_.size(); ++i) {
            made->sides.push_back(std::make_unique<Peer::Side>());
            made->sides.back()->links.resize(address.groups.size());
            made->sides.back()->goodbyes.resize(address.groups.size());
        }
        return made;
    });
    if (monitor) {
        if (!groups_[0]->run_soon([group = groups_[0].get(), peer] { group->monitor(peer); }))
            throw Error(ErrorKind::kWouldBlock, "the engine's queue of calls is full");
        peer->watched.store(true);  // not before: close() waits for an answer of those
    }
    return peer;
}

// What is queued for it fails when its turn comes, and the heartbeat lets go of it at its next check.
void Engine::remove_peer(const std::shared_ptr<Peer>& peer) { peers_->remove(peer); }

void Engine::check_remote(const Peer& peer, const RemoteRegion& region) const {
    if (region.epoch != peer.epoch)
        throw Error(ErrorKind::kConfig,
                    "the remote region belongs to another engine (or to an earlier life of this peer)");
    if (region.group >= peer.groups.size() || region.rails.size() != peer.groups[region.group].size())
        throw Error(ErrorKind::kConfig, "the remote region does not fit the peer's NICs: it names group " +
                                            std::to_string(region.group) + " with " +
                                            std::to_string(region.rails.size()) + " rails");
}

void Engine::check_piece(const Peer& peer, const PagePiece& piece, std::uint32_t index, const CounterToken& token) {
    if (piece.src->epoch != address_.epoch)
        throw Error(ErrorKind::kConfig, "the source region was registered with another engine");
    if (piece.src->group != index)
        throw Error(ErrorKind::kConfig, "all source regions of a submission must belong to one group");
    check_remote(peer, *piece.dst);
    const auto largest = group(index).sender().max_write_bytes();
    if (token.unit_bytes > largest)
        throw Error(ErrorKind::kConfig, "unit_bytes=" + std::to_string(token.unit_bytes) +
                                            " is above the largest write of " + std::to_string(largest) +
                                            " bytes, and writes are split at units");
    check_bounds(piece);
}

namespace {

void check_token(const CounterToken& token) {
    if (token.slot >= kUserSlot || token.generation >= kNumGenerations)
        throw Error(ErrorKind::kConfig, "counter token out of range: slot " + std::to_string(token.slot) + " (limit " +
                                            std::to_string(kUserSlot - 1) + "), generation " +
                                            std::to_string(token.generation) + " (limit " +
                                            std::to_string(kNumGenerations - 1) + ")");
}

void check_layers(const std::vector<PagePiece>& pieces, std::uint64_t step) {
    if (step >> (64 - Watch::kLayerBits))
        throw Error(ErrorKind::kConfig,
                    "step=" + std::to_string(step) + " does not fit into the watch's word: it has 48 bits");
    for (std::size_t i = 1; i < pieces.size(); ++i)
        if (pieces[i].layer < pieces[i - 1].layer)
            throw Error(ErrorKind::kConfig, "pieces[" + std::to_string(i) + "] is of layer " +
                                                std::to_string(pieces[i].layer) + " and comes after one of layer " +
                                                std::to_string(pieces[i - 1].layer) +
                                                ": with a watch, pieces come in the order of their layers");
}

std::uint64_t total_bytes(const std::vector<PagePiece>& pieces) {
    std::uint64_t bytes = 0;
    for (const auto& piece : pieces) bytes += piece.nbytes * piece.rows * piece.num_pages();
    return bytes;
}

}  // namespace

std::shared_ptr<Transfer> Engine::new_transfer(Transfer::Kind kind, const std::shared_ptr<Peer>& peer) {
    if (peer->owner != address_.epoch) throw Error(ErrorKind::kConfig, "the peer was added to another engine");
    if (peer->removed.load()) throw Error(ErrorKind::kClosed, "the peer was removed");
    auto transfer = std::make_shared<Transfer>();
    transfer->id = next_id_.fetch_add(1);
    transfer->kind = kind;
    transfer->peer = peer;
    return transfer;
}

Engine::Submission Engine::with_pages(Prepared prepared, const PageLists& lists) {
    Submission submission{std::move(prepared.peer), std::move(prepared.pieces), {}};
    for (std::size_t i = 0; i < submission.pieces.size(); ++i) {
        const auto index = prepared.lists[i];
        if (index >= lists.size())
            throw Error(ErrorKind::kConfig, "pieces[" + std::to_string(i) + "] uses page lists " +
                                                std::to_string(index) + ", but " + std::to_string(lists.size()) +
                                                " pair(s) were given");
        std::tie(submission.pieces[i].src_pages, submission.pieces[i].dst_pages) = lists[index];
    }
    return submission;
}

std::vector<std::shared_ptr<Transfer>> Engine::submit_pages(Transfer::Kind kind, std::vector<Submission> submissions,
                                                            std::int64_t deadline_ns) {
    check_open();
    std::uint32_t index = 0;
    for (const auto& submission : submissions)
        if (!submission.pieces.empty()) index = submission.pieces[0].src->group;
    std::vector<std::shared_ptr<Transfer>> transfers;
    for (auto& submission : submissions) {
        check_token(submission.token);
        for (const auto& piece : submission.pieces) check_piece(*submission.peer, piece, index, submission.token);
        if (submission.watch) check_layers(submission.pieces, submission.step);
        auto transfer = new_transfer(kind, submission.peer);
        transfer->nbytes = total_bytes(submission.pieces);
        transfer->urgent = transfer->nbytes <= kUrgentBytes;
        transfer->pieces = std::move(submission.pieces);
        transfer->token = submission.token;
        transfer->watch = std::move(submission.watch);
        transfer->step = submission.step;
        transfer->deadline_ns = deadline_ns;
        transfers.push_back(std::move(transfer));
    }
    submit_to(group(index), transfers);
    return transfers;
}

void Engine::submit_to(Group& group, const std::vector<std::shared_ptr<Transfer>>& transfers) {
    std::vector<Region*> used;
    const auto let_go = [&] {
        for (auto* region : used) region->end_use();
    };
    for (const auto& transfer : transfers) {
        for (const auto& piece : transfer->pieces) {
            if (!piece.src->begin_use()) {
                let_go();
                throw Error(ErrorKind::kClosed, "the source region was deregistered");
            }
            used.push_back(piece.src.get());
        }
    }
    try {
        if (group.submit(transfers)) return;
    } catch (...) {
        let_go();
        throw;
    }
    let_go();
    throw Error(ErrorKind::kWouldBlock,
                "the group may have " + std::to_string(group.options().max_transfers) + " transfers in flight");
}

std::shared_ptr<Transfer> Engine::submit_message(const std::shared_ptr<Peer>& peer,
                                                 std::span<const std::byte> payload) {
    check_open();
    if (payload.size() > kMaxMessageBytes)
        throw Error(ErrorKind::kConfig, "a message of " + std::to_string(payload.size()) +
                                            " bytes is above the limit of " + std::to_string(kMaxMessageBytes));
    auto transfer = new_transfer(Transfer::Kind::kMessage, peer);
    transfer->message.assign(payload.begin(), payload.end());
    transfer->nbytes = payload.size();
    submit_to(*groups_[0], {transfer});
    return transfer;
}

std::vector<std::shared_ptr<Transfer>> Engine::submit_signals(std::vector<Signal> signals, std::uint32_t index) {
    check_open();
    std::vector<std::shared_ptr<Transfer>> transfers;
    for (auto& signal : signals) {
        check_token(signal.token);
        check_remote(*signal.peer, *signal.dst);
        auto transfer = new_transfer(Transfer::Kind::kSignal, signal.peer);
        transfer->token = signal.token;
        transfer->signal_dst = std::move(signal.dst);
        transfer->signal_units = signal.units;
        transfer->user_value = signal.user_value;
        transfer->urgent = true;
        transfers.push_back(std::move(transfer));
    }
    submit_to(group(index), transfers);
    return transfers;
}

std::shared_ptr<Transfer> Engine::submit_on_all_rails(Transfer::Kind kind, const std::shared_ptr<Peer>& peer,
                                                      std::shared_ptr<const RemoteRegion> dst, std::uint32_t index) {
    check_open();
    check_remote(*peer, *dst);
    auto transfer = new_transfer(kind, peer);
    transfer->signal_dst = std::move(dst);
    transfer->urgent = true;
    submit_to(group(index), {transfer});
    return transfer;
}

void Engine::cancel(Transfer& transfer) {
    transfer.cancelled.store(true);
    for (auto& group : groups_) group->wake();
}

void Engine::set_watch(Watch& watch, std::uint64_t step, std::uint64_t layers) {
    if (step >> (64 - Watch::kLayerBits) || layers >> Watch::kLayerBits)
        throw Error(ErrorKind::kConfig, "step=" + std::to_string(step) + ", layers=" + std::to_string(layers) +
                                            ": the watch's word has 48 bits for the step and 16 for the layers");
    watch.set(step, layers);
    for (auto& group : groups_) group->wake();
}

CounterToken Engine::allocate_counter(std::uint32_t index, std::uint64_t unit_bytes) {
    check_open();
    return group(index).counters().allocate(unit_bytes);
}

void Engine::arm_counter(std::uint32_t index, const CounterToken& token, std::uint64_t expected_units) {
    const auto verdict = group(index).counters().arm(token, expected_units);
    if (verdict == CounterVerdict::kNothing) return;
    Event event;
    event.kind = Event::kCounter;
    event.verdict = verdict;
    event.group = index;
    event.slot = token.slot;
    event.generation = token.generation;
    events_->post(std::move(event));
}

void Engine::check_stuck() {
    if (in_child()) return;
    const auto now = now_ns();
    for (auto& group : groups_) group->check_stuck(now);
}

void Engine::close(std::int64_t drain_ns) {
    if (in_child()) return;
    closed_.store(true);
    {
        // A NIC must not be closed under a registration.
        std::unique_lock wait(registering_, std::chrono::nanoseconds(groups_[0]->options().end_ns));
        if (!wait)
            throw Error(
                ErrorKind::kStuck,
                "the engine could not be closed: a registration, or its end, has not returned from the provider");
    }
    // All groups drain at the same time.
    for (auto& group : groups_) group->begin_close(drain_ns);
    std::vector<bool> is_closed;
    OpError stuck;
    for (auto& group : groups_) {
        is_closed.push_back(group->close());
        if (is_closed.back()) continue;
        if (auto where = group->stuck(now_ns(), 0)) stuck = std::move(where->where);
    }
    // Registrations go now that the endpoints are closed, and before the NICs' domains; the memory itself is the
    // caller's again.
    std::vector<Registrations> rails;
    std::vector<decltype(Region::shares)> shares;
    {
        std::lock_guard lock(mutex_);
        std::erase_if(regions_, [&](const auto& weak) {
            auto region = weak.lock();
            if (region && !is_closed[region->group]) {
                mark_stuck(region, true);
                return false;
            }
            if (region) {
                mark_stuck(region, false);
                rails.push_back(std::exchange(region->rails, {}));
                shares.push_back(std::exchange(region->shares, {}));
            }
            return true;
        });
    }
    peers_->clear();
    if (std::all_of(is_closed.begin(), is_closed.end(), [](bool is) { return is; })) return;
    const auto text = "the engine could not be closed: " +
                      (stuck.text.empty() ? std::string("a thread has not returned from its NIC")
                                          : stuck.provider + " NIC " + stuck.nic + ": " + stuck.text) +
                      ". Its memory stays registered, and peers may write into it, until the process ends";
    throw Error(ErrorKind::kStuck, text, std::move(stuck));
}

}  // namespace fkv
