#include "ofi/library.h"

#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <cstdlib>
#include <mutex>
#include <vector>

#include "ofi/signals.h"
#include "ofi/universe.h"

namespace fkv::ofi {
namespace {

std::vector<std::string> candidates() {
    if (const char* home = std::getenv("FABRIC_KV_LIBFABRIC_HOME"); home && *home) {
        // An explicit choice is the only one: falling back to another copy would hide a typo.
        const std::string base(home);
        return {base + "/lib/libfabric.so.1", base + "/lib64/libfabric.so.1", base + "/libfabric.so.1"};
    }
    return {"libfabric.so.1", "/opt/amazon/efa/lib/libfabric.so.1", "/opt/amazon/efa/lib64/libfabric.so.1"};
}

template <typename F>
void resolve(void* handle, const char* name, F& out, const std::string& path) {
    out = reinterpret_cast<F>(dlsym(handle, name));
    if (!out) throw Error(ErrorKind::kFabric, path + " has no symbol " + name + ": it is not a usable libfabric");
}

Library load() {
    const KeptSignals kept_signals;
    // verbs keeps registrations in a cache: a range within another gets the larger one's key and bounds, and closing it
    // closes nothing. Ours are few and long-lived, and closing them is how a lost peer is kept out. Read by libfabric
    // on its first use; whoever sets it himself knows better.
    setenv("FI_MR_CACHE_MAX_COUNT", "0", 0);  // NOLINT(concurrency-mt-unsafe): there is no other way to say so
    if (const auto size = universe_size(completion_queue_limits()))
        setenv("FI_UNIVERSE_SIZE", std::to_string(*size).c_str(), 0);  // NOLINT(concurrency-mt-unsafe): as above
    std::string tried;
    void* handle = nullptr;
    for (const auto& path : candidates()) {
        handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (handle) break;
        tried += "\n  " + path + ": " + dlerror();
    }
    if (!handle)
        throw Error(
            ErrorKind::kFabric,
            "libfabric could not be loaded; tried:" + tried +
                "\nHint: install it (Debian and Ubuntu: apt-get install libfabric1; AWS: the EFA installer), or "
                "set FABRIC_KV_LIBFABRIC_HOME to its prefix");
    Library lib{};
    lib.process = getpid();
    link_map* map = nullptr;
    if (dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map) lib.path = map->l_name;
    resolve(handle, "fi_getinfo", lib.getinfo, lib.path);
    resolve(handle, "fi_freeinfo", lib.freeinfo, lib.path);
    resolve(handle, "fi_dupinfo", lib.dupinfo, lib.path);
    resolve(handle, "fi_fabric", lib.fabric, lib.path);
    resolve(handle, "fi_strerror", lib.strerror, lib.path);
    resolve(handle, "fi_tostr", lib.tostr, lib.path);
    decltype(&::fi_version) version = nullptr;
    resolve(handle, "fi_version", version, lib.path);
    lib.version = version();
    if (FI_VERSION_LT(lib.version, kApiVersion))
        throw Error(ErrorKind::kFabric, lib.path + " is libfabric " + version_text(lib.version) + ", older than " +
                                            version_text(kApiVersion) + ", the oldest that fabric_kv supports");
    return lib;
}

}  // namespace

const Library& Library::get() {
    // A load that throws is tried again at the next call ([stmt.dcl]), so a user may set FABRIC_KV_LIBFABRIC_HOME and
    // go on in the same process.
    static const Library library = load();
    return library;
}

std::string version_text(std::uint32_t version) {
    return std::to_string(FI_MAJOR(version)) + "." + std::to_string(FI_MINOR(version));
}

Error call_failed(const std::string& op, long rc, const std::string& provider, const std::string& nic,
                  const std::string& hint) {
    OpError detail;
    detail.fi_errno = static_cast<int>(-rc);
    detail.op = op;
    detail.provider = provider;
    detail.nic = nic;
    detail.text = Library::get().strerror(static_cast<int>(-rc));
    std::string message = op + " failed on " + provider + " NIC " + nic + ": " + detail.text + " (" +
                          std::to_string(detail.fi_errno) + ")";
    if (!hint.empty()) message += ". Hint: " + hint;
    return Error(ErrorKind::kFabric, message, std::move(detail));
}

}  // namespace fkv::ofi
