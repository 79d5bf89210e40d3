// Registered memory on this side and what a peer knows of memory on the other.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "fabric/nic.h"

namespace fkv {

// Identity of one life of an engine: a restarted process is another peer.
using Epoch = std::array<std::byte, 16>;

// A registration on every rail of a group. The memory is the caller's and must outlive this object.
struct Region {
    std::byte* base;
    std::uint64_t nbytes;
    std::uint32_t group;
    std::vector<std::unique_ptr<MemoryHandle>> rails;  // emptied by Engine::close(), after the endpoints
    std::atomic<std::uint32_t> uses{0};                // pieces of transfers in flight that read it
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
