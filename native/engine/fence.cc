// The part of Engine that keeps one peer out: registrations for it alone, and fences.
#include <algorithm>
#include <array>
#include <thread>

#include "engine/engine.h"

namespace fkv {
namespace {

constexpr std::int64_t kLookEveryNs = kMillisecond;
constexpr std::int64_t kLeastDrainNs = 200 * kMillisecond;
constexpr std::int64_t kLookForExitNs = 20 * kMillisecond;  // at a stretch: close() need not wait longer for us

// One would do but for payloads that come in parts: what is there of these is taken after the commands.
constexpr int kMarkers = 2;

}  // namespace

std::shared_ptr<PeerKeys> Engine::keys_of(const Epoch& peer) {
    std::lock_guard lock(mutex_);
    std::erase_if(keys_, [](const auto& entry) { return entry.second.expired(); });
    auto keys = keys_[peer].lock();
    if (!keys) keys_[peer] = keys = std::make_shared<PeerKeys>();
    return keys;
}

RemoteRegion Engine::share_region(const std::shared_ptr<Region>& region, const std::shared_ptr<Peer>& peer,
                                  const std::vector<DeviceMemory>& parts) {
    std::shared_lock registering(registering_);
    check_open();
    if (region->epoch != address_.epoch)
        throw Error(ErrorKind::kConfig, "the region was registered with another engine");
    if (peer->owner != address_.epoch) throw Error(ErrorKind::kConfig, "the peer was added to another engine");
    const auto is_same = [](const DeviceMemory& a, const DeviceMemory& b) {
        return a.base == b.base && a.nbytes == b.nbytes && a.device == b.device;
    };
    if (!parts.empty() && !std::ranges::equal(parts, region->parts, is_same))
        throw Error(ErrorKind::kConfig,
                    "the region's device memory does not consist of the allocations that were registered: what lies "
                    "there now is something else");
    // With mutex_ held: either fence() and deregister() see what is entered, or we see that they were here.
    const auto find = [&]() -> const Share* {
        if (peer->removed.load()) throw Error(ErrorKind::kClosed, "the peer was removed");
        if (region->rails.empty()) throw Error(ErrorKind::kClosed, "the region was deregistered");
        const auto found = region->shares.find(peer->epoch);
        return found == region->shares.end() ? nullptr : found->second.get();
    };
    {
        std::lock_guard lock(mutex_);
        if (const auto* share = find()) return describe_registrations(*region, share->rails);
    }
    if (!share_counts_->reserve(max_peer_registrations_))
        throw Error(ErrorKind::kWouldBlock, "regions are registered for one peer each " +
                                                std::to_string(max_peer_registrations_) +
                                                " times, which is max_peer_registrations");
    // Closed again, after the lock is released, where another thread was faster or something throws.
    auto fresh = std::make_unique<Share>(peer->keys, share_counts_, region->group);
    fresh->rails = register_on_rails(*region, parts.empty() ? region->parts : parts);
    std::lock_guard lock(mutex_);
    const auto* share = find();
    if (!share) {
        peer->keys->given.store(true);
        share = (region->shares[peer->epoch] = std::move(fresh)).get();
    }
    return describe_registrations(*region, share->rails);
}

// Also those that were made through another Peer of the same epoch: what is kept out is a life of an engine.
void Engine::close_shares(const std::shared_ptr<Peer>& peer) {
    std::shared_lock registering(registering_);
    check_open();
    std::vector<std::unique_ptr<Share>> shares;  // closed without the lock
    std::lock_guard lock(mutex_);
    for (auto& weak : regions_) {
        const auto region = weak.lock();
        if (!region) continue;
        if (auto share = region->shares.extract(peer->epoch)) shares.push_back(std::move(share.mapped()));
    }
}

bool Engine::wait_until(std::int64_t deadline_ns, const std::function<bool()>& done) {
    for (; !done(); std::this_thread::sleep_for(std::chrono::nanoseconds(kLookEveryNs))) {
        check_open();
        if (now_ns() >= deadline_ns) return false;
    }
    check_open();
    return true;
}

// A word of our own goes into each queue; when it comes out, whatever was in there before has been carried out. To find
// nothing in a poll is no proof: shm looks into its queue only when it is told to, and who dies may not get around to
// that; and it stops, saying nothing, at each command that it must refuse.
bool Engine::drain_queues(std::int64_t deadline_ns) {
    static std::array<std::byte, 8> nothing{};
    const auto self = add_peer(address_, false);
    for (std::uint32_t i = 0; i < groups_.size(); ++i) {
        const auto region = register_region(nothing.data(), nothing.size(), i);
        const auto remote = std::make_shared<const RemoteRegion>(describe_region(*region));
        for (int round = 0; round < kMarkers; ++round) {
            const auto token = allocate_counter(i, 1);  // never armed: it causes no event
            const auto marker = submit_signals({{self, remote, token, 1, 0}}, i)[0];
            const bool seen = wait_until(deadline_ns, [&] { return groups_[i]->counters().received(token) == 1; });
            if (!seen) cancel(*marker);
            groups_[i]->counters().release(token, seen);
            if (!seen) return false;
        }
    }
    return true;
}

Fence Engine::fence_by_registrations(const Peer& peer, std::int64_t deadline_ns) {
    const auto answer = [](bool proven, std::string why) {
        return Fence{proven, Fence::kRegistrations, std::move(why)};
    };
    if (!peer.keys->given.load())
        return answer(false, "it was given no memory by remote_for(), and MemoryRegion.remote's keys are still good");
    // Others may be closing them: a deregistration, or another fence.
    if (!wait_until(deadline_ns, [&] { return peer.keys->open.load() == 0; }))
        return answer(false, std::to_string(peer.keys->open.load()) + " of its registrations could not be closed");
    return answer(true,
                  "its registrations are closed and the NICs check keys: nothing lands in what it was given by "
                  "remote_for()");
}

Fence Engine::fence_by_exit(Peer& peer, std::int64_t deadline_ns) {
    const auto answer = [](bool proven, std::string why) { return Fence{proven, Fence::kExit, std::move(why)}; };
    const auto& here = address_.process;
    if (!here || !peer.process)
        return answer(false, here ? "its address does not say in which process it runs"
                                  : "this system does not tell in which processes engines run");
    if (peer.process->host != here->host) return answer(false, "it runs on another host, or in another pid namespace");
    // A marker takes any of a group's NICs: with several, one would have to be sent by each.
    if (std::any_of(groups_.begin(), groups_.end(), [](const auto& group) { return group->rails().size() > 1; }))
        return answer(false, "a group has several shared-memory NICs, and their queues cannot be seen to be drained");
    const auto who = "its process " + std::to_string(peer.process->pid);
    ProcessWatch process(*peer.process);
    if (!process.unknown().empty()) return answer(false, who + " cannot be watched: " + process.unknown());
    if (!wait_until(deadline_ns, [&] { return process.exited(std::min(deadline_ns - now_ns(), kLookForExitNs)); }))
        return answer(false, who + " has not exited in time");
    peer.silent.store(true);
    try {
        // A word of ours needs a moment to go round, however impatient the caller is.
        if (drain_queues(std::max(deadline_ns, now_ns() + kLeastDrainNs)))
            return answer(true, who + " has exited, and the NICs' queues were drained since");
    } catch (const Error& error) {
        check_open();
        return answer(false, who + " has exited, but the NICs' queues cannot be drained: " + error.what());
    }
    return answer(false, who + " has exited, but the NICs' queues were not drained in time");
}

Fence::Means Engine::fence_means() const {
    const auto all_nics = [&](bool NicInfo::* fact) {
        for (const auto& group : groups_)
            for (const auto& rail : group->rails())
                if (!(rail->info().*fact)) return false;
        return true;
    };
    if (all_nics(&NicInfo::nic_checks_keys)) return Fence::kRegistrations;
    return all_nics(&NicInfo::shared_memory) ? Fence::kExit : Fence::kNone;
}

Fence Engine::fence(const std::shared_ptr<Peer>& peer, std::int64_t timeout_ns) {
    check_open();
    if (peer->owner != address_.epoch) throw Error(ErrorKind::kConfig, "the peer was added to another engine");
    const auto deadline_ns = now_ns() + timeout_ns;
    remove_peer(peer);
    close_shares(peer);
    const auto means = fence_means();
    if (means == Fence::kRegistrations) return fence_by_registrations(*peer, deadline_ns);
    if (means == Fence::kExit) return fence_by_exit(*peer, deadline_ns);
    return {false, Fence::kNone,
            groups_[0]->rails()[0]->info().provider +
                " checks keys in software, if at all, when a payload begins: the rest of it may still come, even from "
                "a peer that has exited"};
}

}  // namespace fkv
