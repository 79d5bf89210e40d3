// Who is alive: watched peers are pinged at an interval, and reported once when nothing was heard for too long, or when
// they have said goodbye.
//
// Both sides ping each other, so a ping needs no answer; any message counts as a sign of life. It runs on the
// progress thread, hence also while Python sleeps or holds the GIL.
//
// Threads: the progress thread only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>

#include "base/clock.h"
#include "engine/transfer.h"

namespace fkv {

struct HeartbeatOptions {
    std::int64_t interval_ns = 200 * kMillisecond;
    std::uint32_t misses = 5;
    std::int64_t connect_ns = 5 * kSecond;  // before the first sign of life
};

struct EpochHash {
    std::size_t operator()(const Epoch& epoch) const {
        std::size_t value;  // epochs are random: any part is a hash
        std::memcpy(&value, epoch.data(), sizeof value);
        return value;
    }
};

class Heartbeat {
  public:
    explicit Heartbeat(const HeartbeatOptions& options) : options_(options) {}

    // Again: nothing new, but for another Peer of the same epoch. The one before it was removed, and may not have been
    // let go of yet.
    void watch(std::shared_ptr<Peer> peer, std::int64_t now) {
        auto& entry = watched_[peer->epoch];
        if (entry.peer == peer) return;
        peer->silent.store(false);
        entry = {std::move(peer), now, now, false};
    }
    bool empty() const { return watched_.empty(); }
    std::int64_t interval_ns() const { return options_.interval_ns; }
    std::int64_t lost_after_ns() const { return options_.interval_ns * options_.misses; }

    void heard(const Epoch& epoch, std::int64_t now) {
        if (watched_.empty()) return;
        if (auto it = watched_.find(epoch); it != watched_.end()) {
            it->second.heard_ns = now;
            it->second.heard = true;
        }
    }

    // While we take nothing from the network, silence says nothing about the peers.
    void deaf(std::int64_t now) {
        for (auto& [epoch, entry] : watched_) entry.heard_ns = now;
    }

    // Calls ping(peer) for each peer that is due, again at the next check where that is false, lost(peer, silent_ns)
    // for each that was silent for too long, and left(peer) for each that said goodbye; those are forgotten. Where a
    // goodbye may overtake what was written before, it has to be silent as well.
    template <typename Ping, typename Lost, typename Left>
    void check(std::int64_t now, bool in_order, Ping&& ping, Lost&& lost, Left&& left) {
        // A round that comes late (the machine was suspended, or starved of CPU) says nothing about the peers.
        const bool late = last_check_ns_ && now - last_check_ns_ > 2 * options_.interval_ns;
        const auto gap = now - last_check_ns_;
        last_check_ns_ = now;
        for (auto it = watched_.begin(); it != watched_.end();) {
            auto& entry = it->second;
            if (entry.peer->removed.load()) {
                it = watched_.erase(it);
                continue;
            }
            const bool leaving = entry.peer->leaving.load();
            if (leaving && in_order && entry.peer->has_left()) {
                left(*entry.peer);
                it = watched_.erase(it);
                continue;
            }
            if (late) entry.heard_ns = std::min(now, entry.heard_ns + gap);
            const auto bound = entry.heard ? lost_after_ns() : options_.connect_ns;
            if (now - entry.heard_ns > bound) {
                entry.peer->silent.store(true);
                if (leaving)
                    left(*entry.peer);
                else
                    lost(*entry.peer, now - entry.heard_ns);
                it = watched_.erase(it);
                continue;
            }
            if (!leaving && now >= entry.next_ping_ns && ping(entry.peer))
                entry.next_ping_ns = now + options_.interval_ns;
            ++it;
        }
    }

  private:
    struct Entry {
        std::shared_ptr<Peer> peer;
        std::int64_t heard_ns;
        std::int64_t next_ping_ns;
        bool heard;
    };

    const HeartbeatOptions options_;
    std::unordered_map<Epoch, Entry, EpochHash> watched_;
    std::int64_t last_check_ns_ = 0;
};

}  // namespace fkv
