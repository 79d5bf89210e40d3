// A registration for one peer alone: the same memory once more, with keys that nobody else is told.
//
// Closing it keeps that peer out and nobody else, where the NIC checks keys. PeerKeys counts those that may still be
// used, whoever closes them: a fence looks at it.
//
// Threads: any; the destructor closes.
#pragma once

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "fabric/nic.h"

namespace fkv {

// A registration on every NIC: [rail][segment]. Regions of the same memory may have them in common; the last closes
// them.
using Registrations = std::vector<std::vector<std::shared_ptr<MemoryHandle>>>;

// The kernel's side of a registration is shared with the parent: a forked child must leave it alone.
inline void abandon(Registrations& rails) {
    static_cast<void>(new Registrations(std::move(rails)));  // never freed: nobody closes what it holds
}

// What one life of a peer was given, over all regions.
struct PeerKeys {
    std::atomic<std::size_t> open{
        0};                          // registrations that are not closed: also those that the provider would not close
    std::atomic<bool> given{false};  // whether there ever was one
};

// How many pairs of a region and a peer there are. The pairs may outlive the engine.
struct ShareCounts {
    explicit ShareCounts(std::size_t num_groups) : by_group(num_groups) {}

    // False: there are `most` already.
    bool reserve(std::size_t most) {
        auto n = total.load();
        do {
            if (n >= most) return false;
        } while (!total.compare_exchange_weak(n, n + 1));
        return true;
    }

    std::atomic<std::size_t> total{0};
    std::vector<std::atomic<std::size_t>> by_group;
};

class Share {
  public:
    // Takes over a place that was reserved in `counts`.
    Share(std::shared_ptr<PeerKeys> keys, std::shared_ptr<ShareCounts> counts, std::uint32_t group)
        : keys_(std::move(keys)), counts_(std::move(counts)), group_(group) {
        keys_->open.fetch_add(1);
        counts_->by_group[group_].fetch_add(1);
    }
    ~Share() {
        if (fork_.in_child()) {
            abandon(rails);
            return;
        }
        bool closed = true;
        for (auto& rail : rails)
            for (auto& handle : rail) closed &= handle->close();
        if (!closed) return;  // it counts for ever: the peer may still write there
        counts_->by_group[group_].fetch_sub(1);
        counts_->total.fetch_sub(1);
        keys_->open.fetch_sub(1);
    }
    Share(const Share&) = delete;
    Share& operator=(const Share&) = delete;

    Registrations rails;

  private:
    const std::shared_ptr<PeerKeys> keys_;
    const std::shared_ptr<ShareCounts> counts_;
    const std::uint32_t group_;
    ForkGuard fork_;
};

}  // namespace fkv
