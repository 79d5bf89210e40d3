// The peers of an engine, by epoch, for all its groups.
//
// Threads: any.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "base/clock.h"
#include "engine/peer.h"

namespace fkv {

class Peers {
  public:
    // The one that is known by this epoch, or else what make() returns.
    template <typename Make>
    std::shared_ptr<Peer> add(const Epoch& epoch, Make&& make) {
        std::lock_guard lock(mutex_);
        auto& known = known_[epoch];
        if (!known) known = make();
        return known;
    }

    // It is another one if it is added again.
    void remove(const std::shared_ptr<Peer>& peer) {
        peer->removed.store(true);
        std::lock_guard lock(mutex_);
        const auto it = known_.find(peer->epoch);
        if (it == known_.end() || it->second != peer) return;
        known_.erase(it);
        if (removed_.size() == kMostRemoved) removed_.pop_front();
        removed_.push_back({peer, now_ns()});
    }

    // Removed ones, too: they have a goodbye to say, and to hear, all the same.
    std::shared_ptr<Peer> find(const Epoch& epoch) const {
        std::lock_guard lock(mutex_);
        if (const auto it = known_.find(epoch); it != known_.end()) return it->second;
        for (auto it = removed_.rbegin(); it != removed_.rend(); ++it)
            if (it->peer->epoch == epoch) return it->peer;
        return nullptr;
    }
    // One for each epoch. Of the removed ones those that may still be there: who was removed long ago may have died
    // since, and nobody would know.
    std::vector<std::shared_ptr<Peer>> all(std::int64_t now) const {
        std::lock_guard lock(mutex_);
        std::vector<std::shared_ptr<Peer>> peers;
        for (const auto& [epoch, peer] : known_) peers.push_back(peer);
        for (auto it = removed_.rbegin(); it != removed_.rend() && now - it->since_ns < kRecentNs; ++it) {
            const auto same = [&](const auto& peer) { return peer->epoch == it->peer->epoch; };
            if (std::none_of(peers.begin(), peers.end(), same)) peers.push_back(it->peer);
        }
        return peers;
    }
    // Removed ones of the same epoch: what was posted to them may still be under way.
    std::vector<std::shared_ptr<Peer>> before(const Peer& peer) const {
        std::lock_guard lock(mutex_);
        std::vector<std::shared_ptr<Peer>> before;
        for (const auto& old : removed_)
            if (old.peer.get() != &peer && old.peer->epoch == peer.epoch) before.push_back(old.peer);
        return before;
    }

    void clear() {
        std::lock_guard lock(mutex_);
        known_.clear();
        removed_.clear();
    }

  private:
    static constexpr std::size_t kMostRemoved = 1024;  // the last ones: an engine may outlive any number of peers
    static constexpr std::int64_t kRecentNs = 5 * kSecond;

    struct Removed {
        std::shared_ptr<Peer> peer;
        std::int64_t since_ns;
    };

    mutable std::mutex mutex_;
    std::map<Epoch, std::shared_ptr<Peer>> known_;  // guarded by mutex_
    std::deque<Removed> removed_;                   // guarded by mutex_
};

}  // namespace fkv
