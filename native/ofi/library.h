// libfabric, loaded at run time: importing fabric_kv needs no libfabric, opening a NIC does.
//
// libfabric exports only a few real symbols, everything else is an inline call through operation tables
// (fi_guide(7)), so loading it by hand is small. Structures only grow at their end between 1.17 and 2.x, and every
// fi_info is allocated by the library itself, so one build runs on all of them.
#pragma once

#include <rdma/fabric.h>
#include <sys/types.h>

#include <cstdint>
#include <string>

#include "base/error.h"

namespace fkv::ofi {

struct Library {
    std::string path;
    std::uint32_t version;  // fi_version(3), of the loaded library
    pid_t process;          // that loaded it; its children by fork() have it, too

    decltype(&::fi_getinfo) getinfo;
    decltype(&::fi_freeinfo) freeinfo;
    decltype(&::fi_dupinfo) dupinfo;
    decltype(&::fi_fabric) fabric;
    decltype(&::fi_strerror) strerror;
    decltype(&::fi_tostr) tostr;

    // Loads on first use: from FABRIC_KV_LIBFABRIC_HOME if that is set, else by the loader's search path, else from
    // the folder of AWS's EFA installer. Throws Error(kFabric) that lists what was tried.
    static const Library& get();
};

// The API that we are written against; 1.17 is the oldest that is supported.
constexpr std::uint32_t kApiVersion = FI_VERSION(1, 17);
// The first with FI_MR_DMABUF: fi_mr(3).
constexpr std::uint32_t kDmabufVersion = FI_VERSION(1, 20);

std::string version_text(std::uint32_t version);

// An Error for the call `op` that returned `rc` (negative fi_errno) on `provider` and `nic`.
Error call_failed(const std::string& op, long rc, const std::string& provider, const std::string& nic,
                  const std::string& hint = {});

}  // namespace fkv::ofi
