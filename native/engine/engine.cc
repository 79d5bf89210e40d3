#include "engine/engine.h"

#include <algorithm>
#include <random>

namespace fkv {
namespace {

Epoch random_epoch() {
    std::random_device source;
    Epoch epoch;
    for (auto& byte : epoch) byte = static_cast<std::byte>(source());
    return epoch;
}

}  // namespace

Engine::Engine(std::vector<std::vector<std::unique_ptr<Nic>>> nics, const std::vector<GroupOptions>& options) {
    if (nics.empty() || nics.size() != options.size())
        throw Error(ErrorKind::kConfig, "an engine needs at least one group, and options for each");
    address_.epoch = random_epoch();
    for (std::uint32_t i = 0; i < nics.size(); ++i) {
        std::vector<std::vector<std::byte>> rails;
        for (const auto& nic : nics[i]) rails.push_back(nic->address());
        address_.groups.push_back(std::move(rails));
        groups_.push_back(std::make_unique<Group>(i, address_.epoch, std::move(nics[i]), options[i], events_));
    }
}

Engine::~Engine() { close(0); }

void Engine::check_open() const {
    if (in_child())
        throw Error(ErrorKind::kClosed, "the engine belongs to the parent process: a forked child must open its own");
    if (closed_.load()) throw Error(ErrorKind::kClosed, "the engine is closed");
}

Group& Engine::group(std::uint32_t index) {
    if (index >= groups_.size())
        throw Error(ErrorKind::kConfig, "group " + std::to_string(index) + " does not exist: the engine has " +
                                            std::to_string(groups_.size()));
    return *groups_[index];
}

std::shared_ptr<Region> Engine::register_region(void* base, std::uint64_t nbytes, std::uint32_t index) {
    std::shared_lock registering(registering_);
    check_open();
    if (nbytes == 0) throw Error(ErrorKind::kConfig, "a region of 0 bytes cannot be registered");
    auto& owner = group(index);
    auto region = std::make_shared<Region>();
    region->base = static_cast<std::byte*>(base);
    region->nbytes = nbytes;
    region->group = index;
    // A failure on one rail drops the registrations already made on the others with `region`.
    for (auto& rail : owner.rails()) region->rails.push_back(rail->nic().register_memory(base, nbytes));
    std::lock_guard lock(mutex_);
    std::erase_if(regions_, [](const auto& weak) { return weak.expired(); });
    regions_.push_back(region);
    return region;
}

void Engine::deregister(const std::shared_ptr<Region>& region) {
    if (const auto uses = region->drop())
        throw Error(ErrorKind::kConfig, "the region of " + std::to_string(region->nbytes) + " bytes is in use by " +
                                            std::to_string(uses) + " part(s) of transfers in flight");
    std::lock_guard lock(mutex_);
    region->rails.clear();
}

RemoteRegion Engine::describe_region(const Region& region) const {
    RemoteRegion remote{address_.epoch, region.group, region.nbytes, {}};
    std::lock_guard lock(mutex_);
    for (const auto& rail : region.rails) remote.rails.push_back({rail->remote_base(), rail->rkey()});
    return remote;
}

std::shared_ptr<Peer> Engine::add_peer(const EngineAddress& address, bool monitor) {
    check_open();
    if (address.groups.empty() ||
        std::any_of(address.groups.begin(), address.groups.end(), [](const auto& rails) { return rails.empty(); }))
        throw Error(ErrorKind::kUnreachable, "a peer's address names no group, or a group without NICs");
    std::shared_ptr<Peer> peer;
    {
        std::lock_guard lock(mutex_);
        auto& known = peers_[address.epoch];
        if (!known) {
            known = std::make_shared<Peer>();
            known->epoch = address.epoch;
            known->groups = address.groups;
            known->links.assign(groups_.size(), std::vector<std::vector<Peer::Link>>(address.groups.size()));
        }
        peer = known;
    }
    if (monitor && !groups_[0]->run_soon([this, peer] { groups_[0]->monitor(peer); }))
        throw Error(ErrorKind::kWouldBlock, "the engine's queue of calls is full");
    return peer;
}

void Engine::remove_peer(const std::shared_ptr<Peer>& peer) {
    peer->removed.store(true);
    {
        std::lock_guard lock(mutex_);
        const auto it = peers_.find(peer->epoch);
        if (it != peers_.end() && it->second == peer) peers_.erase(it);
    }
    groups_[0]->run_soon([this, peer] { groups_[0]->forget(*peer); });
}

void Engine::check_piece(const Peer& peer, const PagePiece& piece, std::uint32_t index, const CounterToken& token) {
    if (piece.src->group != index)
        throw Error(ErrorKind::kConfig, "all source regions of a transfer must belong to one group");
    if (piece.dst->epoch != peer.epoch)
        throw Error(ErrorKind::kConfig,
                    "the remote region belongs to another engine (or to an earlier life of this peer)");
    if (piece.dst->group >= peer.groups.size() || piece.dst->rails.size() != peer.groups[piece.dst->group].size())
        throw Error(ErrorKind::kConfig, "the remote region does not fit the peer's NICs: it names group " +
                                            std::to_string(piece.dst->group) + " with " +
                                            std::to_string(piece.dst->rails.size()) + " rails");
    if (token.unit_bytes > group(index).max_write_bytes())
        throw Error(ErrorKind::kConfig,
                    "unit_bytes=" + std::to_string(token.unit_bytes) + " is above the largest write of " +
                        std::to_string(group(index).max_write_bytes()) + " bytes, and writes are split at units");
    check_bounds(piece);
}

std::shared_ptr<Transfer> Engine::submit_write(const std::shared_ptr<Peer>& peer, std::vector<PagePiece> pieces,
                                               const CounterToken& token) {
    check_open();
    if (peer->removed.load()) throw Error(ErrorKind::kClosed, "the peer was removed");
    if (token.slot >= kUserSlot || token.generation >= kNumGenerations)
        throw Error(ErrorKind::kConfig, "counter token out of range: slot " + std::to_string(token.slot) + " (limit " +
                                            std::to_string(kUserSlot - 1) + "), generation " +
                                            std::to_string(token.generation) + " (limit " +
                                            std::to_string(kNumGenerations - 1) + ")");
    const auto index = pieces.empty() ? 0 : pieces[0].src->group;
    for (const auto& piece : pieces) check_piece(*peer, piece, index, token);
    auto transfer = std::make_shared<Transfer>();
    transfer->id = next_id_.fetch_add(1);
    transfer->peer = peer;
    transfer->pieces = std::move(pieces);
    transfer->token = token;
    submit_to(group(index), transfer);
    return transfer;
}

void Engine::submit_to(Group& group, const std::shared_ptr<Transfer>& transfer) {
    std::size_t num_used = 0;
    auto let_go = [&] {
        for (std::size_t i = 0; i < num_used; ++i) transfer->pieces[i].src->end_use();
    };
    for (; num_used < transfer->pieces.size(); ++num_used) {
        if (transfer->pieces[num_used].src->begin_use()) continue;
        let_go();
        throw Error(ErrorKind::kClosed, "the source region was deregistered");
    }
    bool taken = false;
    try {
        taken = group.submit(transfer);
    } catch (...) {
        let_go();
        throw;
    }
    if (taken) return;
    let_go();
    throw Error(ErrorKind::kWouldBlock,
                "the group has its most transfers in flight, " + std::to_string(group.max_transfers()));
}

std::shared_ptr<Transfer> Engine::submit_message(const std::shared_ptr<Peer>& peer,
                                                 std::span<const std::byte> payload) {
    check_open();
    if (peer->removed.load()) throw Error(ErrorKind::kClosed, "the peer was removed");
    if (payload.size() > kMaxMessageBytes)
        throw Error(ErrorKind::kConfig, "a message of " + std::to_string(payload.size()) +
                                            " bytes is above the limit of " + std::to_string(kMaxMessageBytes));
    auto transfer = std::make_shared<Transfer>();
    transfer->id = next_id_.fetch_add(1);
    transfer->kind = Transfer::Kind::kMessage;
    transfer->peer = peer;
    transfer->message.assign(payload.begin(), payload.end());
    submit_to(*groups_[0], transfer);
    return transfer;
}

void Engine::cancel(Transfer& transfer) {
    transfer.cancelled.store(true);
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
    events_.post(std::move(event));
}

void Engine::close(std::int64_t drain_ns) {
    if (in_child()) return;
    closed_.store(true);
    // A NIC must not be closed under a registration: those that had begun end first, later ones see `closed_`.
    std::unique_lock(registering_).unlock();
    // All groups drain at the same time.
    for (auto& group : groups_) group->begin_close(drain_ns);
    for (auto& group : groups_) group->close();
    // Every endpoint is closed: registrations go now, before the NICs' domains; the memory itself is the caller's
    // again.
    std::lock_guard lock(mutex_);
    for (auto& weak : regions_)
        if (auto region = weak.lock()) region->rails.clear();
    regions_.clear();
    peers_.clear();
}

}  // namespace fkv
