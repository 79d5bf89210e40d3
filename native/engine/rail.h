// One NIC of a group with its operation contexts, its posted receives and its figures.
//
// Owns:     the NIC, and every buffer that the NIC may touch on its own account (message frames).
// Threads:  the group's progress thread only, except the figures, which anyone may read.
#pragma once

#include <memory>
#include <vector>

#include "engine/message.h"
#include "engine/transfer.h"
#include "fabric/nic.h"

namespace fkv {

// A posted operation. `context` comes first: the NIC hands back its address.
struct Op {
    enum class Kind : std::uint8_t { kFree, kWrite, kMessage, kNotice, kRecv };
    OpContext context;
    Kind kind = Kind::kFree;
    bool plain = false;  // without an immediate; a later one answers for it
    Transfer* transfer = nullptr;
    Peer::Link* link = nullptr;  // where it goes; a transfer keeps its peer alive
    std::shared_ptr<Peer> keep;  // kNotice, which is a ping or a goodbye: nobody else does
    std::byte* frame = nullptr;  // kMessage, kNotice and kRecv: the frame buffer in use
    std::uint64_t nbytes = 0;
    std::int64_t posted_ns = 0;
    PageRange pages;
    Op* next_free = nullptr;
};

class Rail {
  public:
    Rail(std::unique_ptr<Nic> nic, std::size_t num_frames);
    ~Rail();

    Nic& nic() { return *nic_; }
    const NicInfo& info() const { return nic_->info(); }

    // Null when the link has its share of the tx_depth operations, and of the frames if it wants one, in flight.
    //
    // The share is as many as are free, and the last quarter is for links that have nothing in flight: peers that take
    // nothing never have them all, and while there are fewer of them than a quarter of tx_depth, the others go on. One
    // peer alone gets half.
    Op* take_op(Op::Kind kind, Peer::Link& link, Transfer* transfer, std::uint64_t nbytes, std::int64_t now_ns);
    void free_op(Op* op);
    // Whether the link may have `n` writes more.
    bool has_room(const Peer::Link& link, std::size_t n) const;
    PostResult post_frame(Op* op);

    // Posts the receives that the engine starts with, and posts one again after its frame was handled.
    void post_receives();
    bool repost(Op* recv);

    // Closes the endpoint; every operation in flight counts as retired afterwards.
    void close_endpoint(bool quiet) { quiet ? nic_->close_quiet_endpoint() : nic_->close_endpoint(); }

    // Calls fn(op) for each operation in flight.
    template <typename Fn>
    void for_each_in_flight(Fn&& fn) {
        for (auto& op : ops_)
            if (op.kind != Op::Kind::kFree) fn(op);
    }

    // A registered address for operations without data.
    const std::byte* no_data() const { return frames_.data(); }
    void* frames_desc() const { return frames_mr_ ? frames_mr_->local_desc() : nullptr; }
    std::size_t num_free_ops() const { return ops_.size() - outstanding_ops; }

    // How long it takes to send `nbytes` more, in bytes of the group's fastest rail.
    double busy_for(std::uint64_t nbytes) const { return static_cast<double>(outstanding_bytes + nbytes) * slowness; }

    double slowness = 1.0;  // of its link, beside the fastest of the group
    std::uint64_t outstanding_bytes = 0;
    std::uint32_t outstanding_ops = 0;
    std::int64_t last_progress_ns = 0;  // the last completion, or the first post after idleness
    bool stalled = false;               // reported, until the next completion
    std::int64_t look_again_ns = 0;     // for links that complete nothing
    RailStats stats;

  private:
    std::unique_ptr<Nic> nic_;
    const std::size_t num_frames_;
    std::vector<std::byte> frames_;  // receive frames first, then send frames
    std::unique_ptr<MemoryHandle> frames_mr_;
    std::vector<Op> ops_;
    std::vector<Op> receives_;
    std::vector<Op*> unposted_;  // receives that the NIC had no room for
    std::vector<std::byte*> free_frames_;
    Op* free_ops_ = nullptr;
};

}  // namespace fkv
