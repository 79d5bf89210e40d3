// What a NIC has registered: made, counted and, at the latest with the endpoint, closed.
#pragma once

#include <memory>
#include <mutex>
#include <set>

#include "fabric/nic.h"
#include "ofi/fid.h"

namespace fkv::ofi {

// Threads: any. `facts`, `domain` and `endpoint` must outlive it and its handles.
class Registrations {
  public:
    Registrations(const NicInfo& facts, const fi_domain_attr& attr, fid_domain* domain, fid_ep* endpoint);

    // Both throw Error(kRegistration) that says how much was to be registered, why it was refused and how to mend it.
    std::unique_ptr<MemoryHandle> add(void* base, std::uint64_t nbytes);
    std::unique_ptr<MemoryHandle> add_device(const DeviceMemory& memory);

    // Closes what is open. Its handles stay valid, but their keys are nobody's.
    void close_all();
    std::size_t num_open() const;

  private:
    class Handle;
    // The handles that have not been closed. They share it, since the last of them may go after the NIC.
    struct Open {
        std::mutex mutex;
        std::set<Handle*> handles;
    };

    template <typename Call>
    std::unique_ptr<MemoryHandle> registered(const char* op, const std::string& what, void* base, std::uint64_t nbytes,
                                             Call&& call);

    const NicInfo& facts_;
    const fi_domain_attr& attr_;
    fid_domain* const domain_;
    fid_ep* const endpoint_;
    const std::shared_ptr<Open> open_ = std::make_shared<Open>();
};

}  // namespace fkv::ofi
