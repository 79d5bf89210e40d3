// A NIC whose completion queue a thread of its own drives. To its owner it looks like any other NIC: poll() and
// read_error() take what that thread has brought, in order, and wait_fd() rings when there is something.
//
// libfabric's software providers move the data inside fi_cq_read, so this is how several NICs use several cores.
//
// Owns:     the NIC, the thread, and the ring between that thread and the owner.
// Threads:  as any Nic: posts and polls from the owner's progress thread. Only that thread's own polls reach the NIC.
// Blocking: close_endpoint() and the destructor wait for the thread, which ends after the poll that it is in.
// Failure:  what the thread throws comes out of read_error(), as a failure of no operation in particular.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "base/event_fd.h"
#include "base/ring.h"
#include "engine/rest.h"
#include "fabric/nic.h"

namespace fkv {

struct PollerOptions {
    std::string name = "fabric_kv-nic";  // the thread's
    std::vector<int> cpus;               // it is pinned to these; empty: it is not pinned
    bool spin = false;                   // never sleep
    std::size_t ring = 1024;             // completions that may wait for the owner; a full ring stops polling
};

class PolledNic final : public Nic {
  public:
    PolledNic(std::unique_ptr<Nic> nic, const PollerOptions& options);
    ~PolledNic() override;
    PolledNic(const PolledNic&) = delete;
    PolledNic& operator=(const PolledNic&) = delete;

    // Says whether completions are due, by which the thread decides how soon to sleep.
    void expect(bool completions) { expecting_.store(completions, std::memory_order_relaxed); }

    // Ends the thread, then closes the endpoint. What it had brought and nobody has taken is dropped.
    void close_endpoint() override;
    void close_quiet_endpoint() override;
    // The same NIC, but for `fail_stop`: here a poll may come in between any two posts.
    const NicInfo& info() const override { return info_; }
    std::vector<std::byte> address() const override { return nic_->address(); }
    std::unique_ptr<MemoryHandle> register_memory(void* base, std::uint64_t nbytes) override {
        return nic_->register_memory(base, nbytes);
    }
    std::unique_ptr<MemoryHandle> register_device(const DeviceMemory& memory) override {
        return nic_->register_device(memory);
    }
    PeerAddress insert_peer(std::span<const std::byte> address) override { return nic_->insert_peer(address); }
    void remove_peer(PeerAddress peer) override { nic_->remove_peer(peer); }
    PostResult post_write(const WriteOp& op) override { return posted(nic_->post_write(op)); }
    PostResult post_read(const ReadOp& op) override { return posted(nic_->post_read(op)); }
    PostResult post_send(const MessageOp& op) override { return posted(nic_->post_send(op)); }
    PostResult post_recv(const MessageOp& op) override { return posted(nic_->post_recv(op)); }
    OpError last_post_error() const override { return nic_->last_post_error(); }
    int poll(std::span<Completion> out) override;
    bool read_error(FailedCompletion& out) override;
    // Also where the NIC itself has none.
    int wait_fd() const override { return bell_.fd(); }
    bool may_sleep() override;

    std::uint64_t sleeps() const { return rest_.sleeps(); }
    // Since when the thread has been in one poll of the NIC; 0: it is not. Any thread.
    std::int64_t busy_since_ns() const { return busy_since_ns_.load(std::memory_order_relaxed); }

  private:
    struct Brought {
        Completion done;
        std::unique_ptr<FailedCompletion> failed;  // instead of `done`
    };

    PostResult posted(PostResult result);
    void stop();
    void drop_rest();
    void run();
    bool bring();
    void tell();
    Brought take();

    std::unique_ptr<Nic> nic_;
    NicInfo info_;
    Ring<Brought> ring_;

    // The owner's words to the thread.
    std::atomic<bool> stopping_{false};
    std::atomic<bool> expecting_{false};
    std::atomic<std::uint64_t> num_calls_{0};     // posts, also refused ones: each may need a poll to go on
    std::atomic<std::uint64_t> num_accepted_{0};  // posts that were not refused

    // The thread's words to the owner.
    EventFd bell_;
    std::atomic<bool> owner_sleeps_{false};  // so ring the bell
    std::atomic<bool> blocked_{false};       // by a full ring
    std::atomic<std::int64_t> busy_since_ns_{0};
    FailedCompletion last_words_;     // written before ended_ is set
    std::atomic<bool> ended_{false};  // by an exception
    bool last_words_read_ = false;    // the owner's

    Rest rest_;
    std::thread thread_;  // last: it uses everything above
};

}  // namespace fkv
