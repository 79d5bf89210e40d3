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

#include "engine/peer.h"

namespace fkv {

class Peers {
  public:
    // The one that is known by this epoch, or else what make() returns.
    template <typename Make>
    std::shared_ptr<Peer> add(const Epoch& epoch, Make&& make) {
        std::lock_guard lock(mutex_);
        auto& known = known_[epoch];
        if (!known) {
            known = make();
            std::erase_if(parted_, [&](const auto& peer) { return peer->epoch == epoch; });
        }
        return known;
    }

    // It is another one if it is added again.
    void remove(const std::shared_ptr<Peer>& peer) {
        peer->removed.store(true);
        std::lock_guard lock(mutex_);
        const auto it = known_.find(peer->epoch);
        if (it == known_.end() || it->second != peer) return;
        known_.erase(it);
        std::erase_if(parted_, [](const auto& old) { return old->leaving.load() || old->silent.load(); });
        if (parted_.size() == kMostParted) parted_.pop_front();
        parted_.push_back(peer);
    }

    // Removed ones, too: they have a goodbye to say, and to hear, all the same.
    std::shared_ptr<Peer> find(const Epoch& epoch) const {
        std::lock_guard lock(mutex_);
        if (const auto it = known_.find(epoch); it != known_.end()) return it->second;
        const auto it =
            std::find_if(parted_.begin(), parted_.end(), [&](const auto& peer) { return peer->epoch == epoch; });
        return it == parted_.end() ? nullptr : *it;
    }
    std::vector<std::shared_ptr<Peer>> all() const {
        std::lock_guard lock(mutex_);
        std::vector<std::shared_ptr<Peer>> peers(parted_.begin(), parted_.end());
        for (const auto& [epoch, peer] : known_) peers.push_back(peer);
        return peers;
    }

    void clear() {
        std::lock_guard lock(mutex_);
        known_.clear();
        parted_.clear();
    }

  private:
    static constexpr std::size_t kMostParted = 1024;  // the last ones: an engine may outlive any number of peers

    mutable std::mutex mutex_;
    std::map<Epoch, std::shared_ptr<Peer>> known_;  // guarded by mutex_
    std::deque<std::shared_ptr<Peer>> parted_;      // guarded by mutex_
};

}  // namespace fkv
