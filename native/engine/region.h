// Registered memory on this side and what a peer knows of memory on the other.
//
// A region may consist of several registrations (a NIC's limit, or memory made of several allocations). Their borders
// are the same on every rail; a write never crosses one.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "base/fork.h"
#include "engine/share.h"
#include "fabric/nic.h"

namespace fkv {

// Identity of one life of an engine: a restarted process is another peer.
using Epoch = std::array<std::byte, 16>;

// Where the parts of a region end, ascending; the last end is the region's length.
class Segments {
  public:
    Segments() = default;
    explicit Segments(std::vector<std::uint64_t> ends) : ends_(std::move(ends)) {}

    // Cuts `nbytes` every `most_bytes`.
    static Segments of(std::uint64_t nbytes, std::uint64_t most_bytes) { return Segments({nbytes}).cut(most_bytes); }
    // Cuts each segment every `most_bytes` as well.
    Segments cut(std::uint64_t most_bytes) const {
        std::vector<std::uint64_t> ends;
        std::uint64_t end = 0;
        for (const auto border : ends_)
            while (end < border) ends.push_back(end += std::min(most_bytes, border - end));
        return Segments(std::move(ends));
    }
    std::uint64_t largest() const {
        std::uint64_t most = 0;
        for (std::size_t i = 0; i < size(); ++i) most = std::max(most, ends_[i] - begin_of(i));
        return most;
    }

    std::size_t size() const { return ends_.size(); }
    const std::vector<std::uint64_t>& ends() const { return ends_; }
    std::uint64_t begin_of(std::size_t index) const { return index == 0 ? 0 : ends_[index - 1]; }

    std::size_t index_of(std::uint64_t offset) const {
        if (ends_.size() == 1) return 0;
        return static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), offset) - ends_.begin());
    }
    // Bytes from `offset` to the end of its segment.
    std::uint64_t room_at(std::uint64_t offset) const { return ends_[index_of(offset)] - offset; }

  private:
    std::vector<std::uint64_t> ends_;
};

// A registration on every rail of a group. The memory is the caller's and must outlive this object.
struct Region {
    Region() = default;
    Region(const Region&) = delete;
    Region& operator=(const Region&) = delete;
    ~Region() {
        if (fork_.in_child()) abandon(rails);
    }

    Epoch epoch{};  // of the engine that registered it
    std::byte* base = nullptr;
    std::uint64_t nbytes = 0;
    std::uint32_t group = 0;
    Segments segments;
    // Of device memory: the allocations that it consists of, and where each ends.
    std::vector<DeviceMemory> parts;
    Segments part_ends;
    // Emptied by deregistration and by Engine::close(), after the endpoints.
    Registrations rails;
    std::map<Epoch, std::unique_ptr<Share>> shares;  // by peer; guarded by the engine's mutex, and emptied like rails

    // Pieces of transfers in flight read it; once dropped nobody can begin to. Any thread.
    bool begin_use() {
        auto n = uses_.load();
        do {
            if (n == kDropped) return false;
        } while (!uses_.compare_exchange_weak(n, n + 1));
        return true;
    }
    void end_use() { uses_.fetch_sub(1); }
    // How many uses stand in the way; 0: dropped, now or before.
    std::uint32_t drop() {
        std::uint32_t n = 0;
        return uses_.compare_exchange_strong(n, kDropped) || n == kDropped ? 0 : n;
    }

    // Its NIC could not be closed, and may still use it.
    std::atomic<bool> is_stuck{false};

  private:
    static constexpr std::uint32_t kDropped = ~std::uint32_t{0};
    std::atomic<std::uint32_t> uses_{0};
    ForkGuard fork_;
};

struct RemoteSegment {
    std::uint64_t base;
    std::uint64_t rkey;
};

struct RemoteRegion {
    Epoch epoch{};
    std::uint32_t group = 0;
    std::uint64_t nbytes = 0;
    Segments segments;
    std::vector<std::vector<RemoteSegment>> rails;  // [the receiver's rail][segment]
};

inline RemoteRegion describe_registrations(const Region& region, const Registrations& rails) {
    RemoteRegion remote{region.epoch, region.group, region.nbytes, region.segments, {}};
    for (const auto& rail : rails) {
        auto& segments = remote.rails.emplace_back();
        for (const auto& handle : rail) segments.push_back({handle->remote_base(), handle->rkey()});
    }
    return remote;
}

}  // namespace fkv
