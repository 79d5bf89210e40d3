// A NIC behind libfabric: fabric, domain, completion queue, address table and an RDM endpoint.
//
// Owns:     every fid it opened; they close in reverse order of opening.
// Threads:  as Nic; libfabric is opened with FI_THREAD_SAFE because of register_memory().
#pragma once

#include <memory>

#include "fabric/nic.h"
#include "ofi/discover.h"

namespace fkv::ofi {

// `sleeps`: whether its owner ever does. Where the provider has no descriptor for that, peers of this host ring a bell.
std::unique_ptr<Nic> open_nic(InfoPtr info, bool sleeps = true);

}  // namespace fkv::ofi
