// Registered memory on this side and what a peer knows of memory on the other.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/fork.h"
#include "fabric/nic.h"

namespace fkv {

// Identity of one life of an engine: a restarted process is another peer.
using Epoch = std::array<std::byte, 16>;

// A registration on every rail of a group. The memory is the caller's and must outlive this object.
struct Region {
    Region() = default;
    ~Region() {
        // The kernel's side of a registration is shared with the parent: a child must leave it alone.
        if (fork_.in_child())
            for (auto& rail : rails) (void)rail.release();
    }

    std::byte* base;
    std::uint64_t nbytes;
    std::uint32_t group;
    std::vector<std::unique_ptr<MemoryHandle>> rails;  // emptied by Engine::close(), after the endpoints

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

  private:
    static constexpr std::uint32_t kDropped = ~std::uint32_t{0};
    std::atomic<std::uint32_t> uses_{0};
    ForkGuard fork_;
};

struct RemoteRail {
    std::uint64_t base;
    std::uint64_t rkey;
};

struct RemoteRegion {
    Epoch epoch;
    std::uint32_t group;
    std::uint64_t nbytes;
    std::vector<RemoteRail> rails;  // indexed by the receiver's rail
};

}  // namespace fkv
