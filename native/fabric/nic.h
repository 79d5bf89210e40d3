// What the engine needs of a network: one opened NIC with its endpoint, address table and completion queue.
//
// Implemented by ofi/ (libfabric) and by the fake fabric of the tests. The engine sees nothing else, so whatever
// holds for this interface (the contract suite) holds for every provider.
//
// Threads:  posts, peer calls and last_post_error() from one thread; poll(), read_error() and may_sleep() from one
//           thread, too, which may be another, at the same time; register_memory() from any. close_endpoint() while
//           neither is at it.
// Blocking: no call blocks; a full queue is kAgain.
// Failure:  set-up calls throw Error; posts return a PostResult; completions that failed are read with read_error().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"

namespace fkv {

// Facts about an opened NIC, as the provider granted them: fi_getinfo(3), fi_endpoint(3), fi_domain(3).
struct NicInfo {
    std::string provider;
    std::string fabric;
    std::string domain;
    std::string source;           // the endpoint's own address, readable
    std::uint64_t max_msg_bytes;  // largest single operation
    std::size_t tx_depth;         // operations that may be posted at once
    std::size_t rx_depth;
    std::size_t cq_data_bytes;  // at least 4
    std::size_t iov_limit;      // places that one operation may read from
    std::size_t rma_iov_limit;  // places that one operation may write to
    std::uint64_t link_bps;     // 0 where the provider does not say
    bool virtual_addresses;     // remote addresses are the target's virtual addresses, else offsets
    bool provider_keys;         // the provider picks the rkey
    bool local_mr;              // send and receive buffers must be registered
    bool endpoint_mr;           // registrations are bound to the endpoint
    bool ordered_writes;        // write-after-write order is granted on both sides
    bool fail_stop = false;     // ... and a write that fails is never reported as done, and keeps those from arriving
                                // that were posted right behind it, without a poll in between
    bool imm_uses_recv;         // every immediate uses up a posted receive
    std::uint64_t max_mr_bytes = ~std::uint64_t{0};  // largest registration
    bool wait_fd;                                    // the completion queue has a file descriptor to sleep on

    // What proves that a peer can write no more; see docs/providers.md, "Fences".
    bool nic_checks_keys = false;  // the NIC checks the key of whatever comes in, so that closing a registration stops
                                   // even a payload under way. Software checks when a payload begins, if at all
    bool shared_memory = false;    // peers are processes of this host that copy into our memory themselves or leave it
                                   // to poll(): of one that has exited, nothing is anywhere but in our queue

    // Whether register_device() may be called, and whether it takes dma-bufs.
    bool device_memory = false;
    bool dmabuf = false;
};

// A range of a CUDA device's memory, within one allocation.
struct DeviceMemory {
    void* base;
    std::uint64_t nbytes;
    int device;                       // CUDA's index in this process
    int dmabuf_fd = -1;               // the allocation as a dma-buf; -1: there is none
    std::uint64_t dmabuf_offset = 0;  // of `base` in it
};

// First member of whatever a caller passes as context: providers scribble in it until completion (FI_CONTEXT2).
struct OpContext {
    std::uint64_t scratch[8];
};

using PeerAddress = std::uint64_t;

enum class PostResult : std::uint8_t {
    kOk,
    kAgain,   // queue full: poll, then post again
    kFailed,  // nothing was posted; Nic::last_post_error() says why
};

// A registration on one NIC; the destructor deregisters.
class MemoryHandle {
  public:
    virtual ~MemoryHandle() = default;
    // Deregisters now. False if the provider would not: peers may still use it. Nothing else may be called afterwards.
    virtual bool close() = 0;
    virtual std::uint64_t remote_base() const = 0;  // what a peer adds an offset to
    virtual std::uint64_t rkey() const = 0;
    virtual void* local_desc() const = 0;
};

// A run of bytes within one registration on either side.
struct WritePart {
    const void* src;
    void* local_desc;
    std::uint64_t nbytes;
    std::uint64_t dst;
    std::uint64_t rkey;
};

constexpr std::size_t kMaxParts = 8;

// One operation with one completion and at most one immediate, which tells of all parts. Parts that continue each other
// on a side are one place there: no more places than iov_limit on the source's side and rma_iov_limit on the target's.
struct WriteOp {
    std::span<const WritePart> parts;  // 1 to kMaxParts
    PeerAddress peer;
    bool has_imm;
    std::uint32_t imm;
    OpContext* context;
    bool delivered = false;  // complete only when the data is in the target's memory (FI_DELIVERY_COMPLETE)

    std::uint64_t nbytes() const {
        std::uint64_t sum = 0;
        for (const auto& part : parts) sum += part.nbytes;
        return sum;
    }
};

struct ReadOp {
    void* dst;
    void* local_desc;
    std::uint64_t nbytes;
    PeerAddress peer;
    std::uint64_t src;
    std::uint64_t rkey;
    OpContext* context;
};

struct MessageOp {  // send: reads buffer; recv: writes it (peer is ignored)
    void* buffer;
    void* local_desc;
    std::uint64_t nbytes;
    PeerAddress peer;
    OpContext* context;
};

struct Completion {
    enum Kind : std::uint8_t { kSent, kReceived, kRemoteWrite };
    OpContext* context;  // null for a remote write that used up no receive
    Kind kind;
    bool has_imm;
    std::uint32_t imm;
    std::uint64_t nbytes;  // of a received message
};

struct FailedCompletion {
    OpContext* context;  // may be null: the provider does not know which operation it was
    OpError error;
    bool inbound = false;  // a peer's operation on our memory failed, none of ours: the context is null
};

class Nic {
  public:
    virtual ~Nic() = default;  // registrations must be gone by then

    // Closes the endpoint: when it returns, nothing touches caller memory any more and no completion will come.
    // Registrations may (and must) be dropped after it and before the destructor. Calling it twice is fine.
    virtual void close_endpoint() = 0;
    // The same where all peers have said that they post nothing more: a NIC need not wait for what may still come.
    virtual void close_quiet_endpoint() { close_endpoint(); }

    virtual const NicInfo& info() const = 0;
    virtual std::vector<std::byte> address() const = 0;

    virtual std::unique_ptr<MemoryHandle> register_memory(void* base, std::uint64_t nbytes) = 0;
    // Of a dma-buf where there is one and the NIC takes it, else by address. The descriptor is the caller's, and may be
    // closed afterwards.
    virtual std::unique_ptr<MemoryHandle> register_device(const DeviceMemory& memory) {
        OpError detail;
        detail.op = "register";
        detail.provider = info().provider;
        detail.nic = info().domain;
        throw Error(ErrorKind::kRegistration,
                    "memory of cuda:" + std::to_string(memory.device) + " cannot be registered: provider " +
                        info().provider + " on NIC " + info().domain + " was opened without device memory",
                    std::move(detail));
    }

    virtual PeerAddress insert_peer(std::span<const std::byte> address) = 0;
    // Only once nothing is outstanding to it, and it can send nothing any more: shm crashes otherwise.
    virtual void remove_peer(PeerAddress peer) = 0;

    virtual PostResult post_write(const WriteOp& op) = 0;
    virtual PostResult post_read(const ReadOp& op) = 0;
    virtual PostResult post_send(const MessageOp& op) = 0;
    virtual PostResult post_recv(const MessageOp& op) = 0;
    virtual OpError last_post_error() const = 0;

    // Fills `out` and returns how many; -1 when a failed completion is next: read_error() takes it.
    virtual int poll(std::span<Completion> out) = 0;
    virtual bool read_error(FailedCompletion& out) = 0;

    // The descriptor to sleep on, -1 if there is none, and whether that is safe right now (fi_trywait(3)).
    virtual int wait_fd() const = 0;
    virtual bool may_sleep() = 0;
    // Whether something may come without it: then who sleeps must look by the clock as well. info().wait_fd is false.
    virtual bool wait_is_hint() const { return false; }
};

}  // namespace fkv
