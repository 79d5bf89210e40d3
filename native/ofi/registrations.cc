#include "ofi/registrations.h"

#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>

#include <algorithm>
#include <limits>
#include <random>

#include "ofi/limits.h"

namespace fkv::ofi {
namespace {

// What is registered may be read and written from either side.
constexpr std::uint64_t kAccess = FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;

// Of newer headers than 1.17's: a flag of fi_mr_regattr(3), and what fi_mr_attr then points to in place of mr_iov.
constexpr std::uint64_t kMrDmabuf = std::uint64_t{1} << 40;
struct Dmabuf {
    int fd;
    std::uint64_t offset;
    std::size_t len;
    void* base_addr;
};
// fi_mr_attr has grown at its end, and providers may read all that their version has.
struct MrAttr {
    fi_mr_attr attr{};
    std::uint64_t later[16] = {};
};

}  // namespace

class Registrations::Handle final : public MemoryHandle {
  public:
    Handle(Fid<fid_mr> mr, std::uint64_t base, std::shared_ptr<Open> open)
        : mr_(std::move(mr)),
          base_(base),
          rkey_(fi_mr_key(mr_.get())),
          desc_(fi_mr_desc(mr_.get())),
          open_(std::move(open)) {
        std::lock_guard lock(open_->mutex);
        open_->handles.insert(this);
    }
    ~Handle() override { close(); }
    Handle(const Handle&) = delete;
    Handle& operator=(const Handle&) = delete;

    bool close() override {
        {
            std::lock_guard lock(open_->mutex);
            open_->handles.erase(this);
        }
        return close_mr();
    }
    bool close_mr() { return !mr_ || close_fid(mr_.release(), mr_.get_deleter().what); }

    std::uint64_t remote_base() const override { return base_; }
    std::uint64_t rkey() const override { return rkey_; }
    void* local_desc() const override { return desc_; }

  private:
    Fid<fid_mr> mr_;
    const std::uint64_t base_;
    const std::uint64_t rkey_;
    void* const desc_;
    const std::shared_ptr<Open> open_;
};

Registrations::Registrations(const NicInfo& facts, const fi_domain_attr& attr, fid_domain* domain, fid_ep* endpoint)
    : facts_(facts), attr_(attr), domain_(domain), endpoint_(endpoint) {}

std::size_t Registrations::num_open() const {
    std::lock_guard lock(open_->mutex);
    return open_->handles.size();
}

void Registrations::close_all(const std::set<void*>& kept) {
    std::lock_guard lock(open_->mutex);
    std::erase_if(open_->handles, [&](Handle* handle) {
        if (kept.contains(handle->local_desc())) return false;
        handle->close_mr();
        return true;
    });
}

// Registers by call(key, &mr).
template <typename Call>
std::unique_ptr<MemoryHandle> Registrations::registered(const char* op, const std::string& what, void* base,
                                                        std::uint64_t nbytes, Call&& call) {
    // Keys that a peer cannot guess, also not from those that it was given, as wide as the provider takes; where the
    // provider picks keys this one is ignored.
    thread_local std::random_device device;
    static_assert(std::numeric_limits<std::random_device::result_type>::digits == 32);
    const auto random = [] { return std::uint64_t{device()} << 32 | device(); };
    const std::size_t key_bytes = std::min<std::size_t>(attr_.mr_key_size, 8);
    const std::uint64_t mask = key_bytes >= 8 ? ~std::uint64_t{0} >> 1 : (std::uint64_t{1} << (8 * key_bytes)) - 1;
    fid_mr* mr = nullptr;
    int rc = 0;
    for (int attempt = 0; attempt < 8; ++attempt) {
        rc = call(facts_.provider_keys ? 0 : random() & mask, &mr);
        if (rc != -FI_ENOKEY) break;  // taken: draw another
    }
    if (rc) {
        auto failure = call_failed(op, rc, facts_.provider, facts_.domain);
        throw Error(ErrorKind::kRegistration,
                    std::string(failure.what()) + " for " + what + ": " +
                        explain_refusal({-rc, nbytes, num_open(), attr_.mr_cnt, memory_limits()}),
                    failure.op());
    }
    Fid<fid_mr> owned(mr, Closer{"memory registration"});
    if (facts_.endpoint_mr) {
        rc = fi_mr_bind(owned.get(), &endpoint_->fid, 0);
        if (!rc) rc = fi_mr_enable(owned.get());
        if (rc) {
            auto failure = call_failed("fi_mr_enable", rc, facts_.provider, facts_.domain);
            throw Error(ErrorKind::kRegistration, failure.what(), failure.op());
        }
    }
    return std::make_unique<Handle>(std::move(owned),
                                    facts_.virtual_addresses ? reinterpret_cast<std::uint64_t>(base) : 0, open_);
}

std::unique_ptr<MemoryHandle> Registrations::add(void* base, std::uint64_t nbytes) {
    return registered("fi_mr_reg", std::to_string(nbytes) + " bytes", base, nbytes, [&](auto key, fid_mr** out) {
        return fi_mr_reg(domain_, base, nbytes, kAccess, 0, key, 0, out, nullptr);
    });
}

std::unique_ptr<MemoryHandle> Registrations::add_device(const DeviceMemory& memory) {
    // fi_mr(3): what is registered begins `offset` bytes behind base_addr, where the dma-buf itself is mapped.
    auto* const mapped = static_cast<std::byte*>(memory.base) - memory.dmabuf_offset;
    const Dmabuf dmabuf{memory.dmabuf_fd, memory.dmabuf_offset, memory.nbytes, mapped};
    const iovec range{memory.base, memory.nbytes};
    const auto what = std::to_string(memory.nbytes) + " bytes on cuda:" + std::to_string(memory.device);
    const auto try_by = [&](const char* op, const void* place, std::uint64_t flags) {
        MrAttr wide;
        auto& attr = wide.attr;
        attr.mr_iov = static_cast<const iovec*>(place);
        attr.iov_count = 1;
        attr.access = kAccess;
        attr.iface = FI_HMEM_CUDA;
        attr.device.cuda = memory.device;
        return registered(op, what, memory.base, memory.nbytes, [&](auto key, fid_mr** out) {
            attr.requested_key = key;
            return fi_mr_regattr(domain_, &attr, flags, out);
        });
    };
    if (!facts_.dmabuf || memory.dmabuf_fd < 0) return try_by("fi_mr_regattr(FI_HMEM_CUDA)", &range, 0);
    try {
        return try_by("fi_mr_regattr(FI_MR_DMABUF)", &dmabuf, kMrDmabuf);
    } catch (const Error& by_dmabuf) {
        // The version of libfabric has them, its provider or the kernel's driver may not; what they say then differs.
        try {
            return try_by("fi_mr_regattr(FI_HMEM_CUDA)", &range, 0);
        } catch (const Error& by_address) {
            throw Error(ErrorKind::kRegistration, std::string(by_address.what()) + "; before that: " + by_dmabuf.what(),
                        by_address.op());
        }
    }
}

}  // namespace fkv::ofi
