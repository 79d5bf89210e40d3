#include "ofi/universe.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <string>
#include <type_traits>

#if __has_include(<infiniband/verbs.h>)
#include <infiniband/verbs.h>
#endif

namespace fkv::ofi {
namespace {

constexpr std::uint64_t kDefaultUniverse = 1024;
// Sends and receives that rxm posts on a connection: RXM_MSG_RXTX_SIZE of prov/rxm/src/rxm.h for each direction.
constexpr std::uint64_t kPerPeer = 2 * 128;

// ibv_device_attr as far as it is read here, so that the build needs no other headers than libfabric's. Its layout is
// part of libibverbs's ABI.
struct DeviceAttr {
    char fw_ver[64];
    std::uint64_t node_guid, sys_image_guid, max_mr_size, page_size_cap;
    std::uint32_t vendor_id, vendor_part_id, hw_ver;
    int max_qp, max_qp_wr;
    unsigned device_cap_flags;
    int max_sge, max_sge_rd, max_cq, max_cqe;
    std::byte rest[256];
};
#if __has_include(<infiniband/verbs.h>)
static_assert(offsetof(DeviceAttr, max_cqe) == offsetof(ibv_device_attr, max_cqe));
static_assert(sizeof(DeviceAttr) >= sizeof(ibv_device_attr));
#endif

// libibverbs, which libfabric's verbs provider brings along.
struct Verbs {
    void** (*get_device_list)(int* count) = nullptr;
    void (*free_device_list)(void** list) = nullptr;
    const char* (*get_device_name)(void* device) = nullptr;
    void* (*open_device)(void* device) = nullptr;
    int (*query_device)(void* context, DeviceAttr* attr) = nullptr;
    int (*close_device)(void* context) = nullptr;

    bool load() {
        void* handle = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
        if (!handle) return false;
        const auto find = [&](const char* name, auto& out) {
            out = reinterpret_cast<std::remove_reference_t<decltype(out)>>(dlsym(handle, name));
            return out != nullptr;
        };
        return find("ibv_get_device_list", get_device_list) && find("ibv_free_device_list", free_device_list) &&
               find("ibv_get_device_name", get_device_name) && find("ibv_open_device", open_device) &&
               find("ibv_query_device", query_device) && find("ibv_close_device", close_device);
    }
};

// "1: CA" is InfiniBand or RoCE; iWARP has 4, EFA 7: Documentation/ABI/stable/sysfs-class-infiniband.
bool is_channel_adapter(const char* device) {
    std::ifstream file("/sys/class/infiniband/" + std::string(device) + "/node_type");
    return file.get() == '1';
}

}  // namespace

std::optional<std::uint64_t> universe_size(const std::vector<std::uint64_t>& queue_entries) {
    std::optional<std::uint64_t> size;
    for (const auto entries : queue_entries)
        if (const auto peers = std::max<std::uint64_t>(entries / kPerPeer, 1); peers < size.value_or(kDefaultUniverse))
            size = peers;
    return size;
}

std::vector<std::uint64_t> completion_queue_limits() {
    std::vector<std::uint64_t> limits;
    Verbs verbs;
    if (!verbs.load()) return limits;
    int count = 0;
    void** const list = verbs.get_device_list(&count);
    if (!list) return limits;
    for (int i = 0; i < count; ++i) {
        if (!is_channel_adapter(verbs.get_device_name(list[i]))) continue;
        void* const context = verbs.open_device(list[i]);
        if (!context) continue;
        DeviceAttr attr{};
        if (verbs.query_device(context, &attr) == 0 && attr.max_cqe > 0)
            limits.push_back(static_cast<std::uint64_t>(attr.max_cqe));
        verbs.close_device(context);
    }
    verbs.free_device_list(list);
    return limits;
}

}  // namespace fkv::ofi
