// How many peers the completion queues of this machine's RDMA devices have room for.
//
// rxm asks for a queue in which all its connections could complete all that they have posted, for as many peers as
// libfabric's "universe" has: 1024, or FI_UNIVERSE_SIZE. A device with shorter queues does not open then, and the error
// does not say why. libfabric reads the variable once, before it opens any device.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace fkv::ofi {

// Nothing where libfabric's default fits, else the number of peers to set.
std::optional<std::uint64_t> universe_size(const std::vector<std::uint64_t>& queue_entries);

// The most entries of a completion queue (max_cqe of ibv_query_device(3)) on each InfiniBand or RoCE device here. Those
// that cannot be asked are left out, and so are EFA's, on which nothing connects.
std::vector<std::uint64_t> completion_queue_limits();

}  // namespace fkv::ofi
