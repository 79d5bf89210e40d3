// Which NICs libfabric offers, and which of them a request means.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ofi/library.h"

namespace fkv::ofi {

struct InfoDeleter {
    void operator()(fi_info* info) const { Library::get().freeinfo(info); }
};
using InfoPtr = std::unique_ptr<fi_info, InfoDeleter>;

struct NicRequest {
    std::string provider;           // empty: any provider that drives a real RDMA NIC
    std::vector<std::string> nics;  // domain names or IP addresses, each exactly one NIC; empty: the first offered
    bool device_memory = false;     // only what reaches a GPU's memory (FI_HMEM)
};

// One fi_info per requested NIC, in the order of the request. Throws Error(kFabric) that says what was found, or
// Error(kConfig) naming the NIC that matches nothing. Software providers (tcp, shm) come only when asked for by name:
// nobody should find out from a slow run that the fast NIC was not used.
std::vector<InfoPtr> find_nics(const NicRequest& request);

// Every (provider, domain, fabric) that has what fabric_kv needs, for messages and tools.
struct Offer {
    std::string provider, domain, fabric, source;
    bool rdma;
    // The device beneath, as far as the provider tells (fi_nic(3)): tcp and shm do not, Soft-RoCE has no PCI address.
    std::string device, pci;       // "mlx5_0", "0000:0c:00.0"; empty: not told
    std::uint64_t link_bps = 0;    // 0: not told
    std::string port = "unknown";  // "up", "down"
};
std::vector<Offer> list_offers(const std::string& provider);

std::string source_text(const fi_info* info);
// A real RDMA NIC, Soft-RoCE included, is one that the kernel's RDMA subsystem knows; no list of provider names to
// maintain.
bool is_rdma(const fi_info* info);

}  // namespace fkv::ofi
