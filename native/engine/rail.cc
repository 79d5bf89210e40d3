#include "engine/rail.h"

#include <algorithm>

#include "base/clock.h"

namespace fkv {
namespace {

// Whether a link that holds `held` of `total` may take one of those that are free.
bool has_share(std::size_t held, std::size_t free, std::size_t total) {
    if (held == 0) return free > 0;
    return free > held && free > total / 4;
}

}  // namespace

Rail::Rail(std::unique_ptr<Nic> nic, std::size_t num_frames) : nic_(std::move(nic)), num_frames_(num_frames) {
    const auto num_receives = std::min(num_frames, nic_->info().rx_depth);
    frames_.resize((num_receives + num_frames) * kFrameBytes);
    if (nic_->info().local_mr) frames_mr_ = nic_->register_memory(frames_.data(), frames_.size());
    ops_ = std::vector<Op>(nic_->info().tx_depth);
    for (auto& op : ops_) {
        op.next_free = free_ops_;
        free_ops_ = &op;
    }
    receives_ = std::vector<Op>(num_receives);
    for (std::size_t i = 0; i < num_receives; ++i) {
        receives_[i].kind = Op::Kind::kRecv;
        receives_[i].frame = &frames_[i * kFrameBytes];
        unposted_.push_back(&receives_[i]);
    }
    for (std::size_t i = 0; i < num_frames; ++i) free_frames_.push_back(&frames_[(num_receives + i) * kFrameBytes]);
    post_receives();
}

Rail::~Rail() {
    // The NIC must not touch frames_ any more, and registrations must go before the domain.
    nic_->close_endpoint();
    frames_mr_.reset();
}

bool Rail::has_room(const Peer::Link& link, std::size_t n) const {
    return num_free_ops() >= n && has_share(link.ops_in_flight + n - 1, num_free_ops() - (n - 1), ops_.size());
}

Op* Rail::take_op(Op::Kind kind, Peer::Link& link, Transfer* transfer, std::uint64_t nbytes, std::int64_t now_ns) {
    const bool wants_frame = kind != Op::Kind::kWrite;
    if (!has_room(link, 1)) return nullptr;
    if (wants_frame && !has_share(link.frames_in_flight, free_frames_.size(), num_frames_)) return nullptr;
    Op* op = free_ops_;
    free_ops_ = op->next_free;
    if (wants_frame) {
        op->frame = free_frames_.back();
        free_frames_.pop_back();
        ++link.frames_in_flight;
    }
    if (link.ops_in_flight++ == 0) link.last_progress_ns = now_ns;
    link.bytes_in_flight += nbytes;
    op->kind = kind;
    op->link = &link;
    op->transfer = transfer;
    op->nbytes = nbytes;
    op->posted_ns = now_ns;
    outstanding_bytes += nbytes;
    if (outstanding_ops++ == 0) {
        last_progress_ns = now_ns;
        stats.busy.begin(now_ns);
    }
    return op;
}

void Rail::free_op(Op* op) {
    if (op->frame) {
        free_frames_.push_back(op->frame);
        --op->link->frames_in_flight;
    }
    --op->link->ops_in_flight;
    op->link->bytes_in_flight -= op->nbytes;
    op->frame = nullptr;
    op->transfer = nullptr;
    op->link = nullptr;
    op->keep.reset();
    op->plain = false;
    op->pages = {};
    op->kind = Op::Kind::kFree;
    op->next_free = free_ops_;
    free_ops_ = op;
    outstanding_bytes -= op->nbytes;
    if (--outstanding_ops == 0) stats.busy.end(now_ns());
}

PostResult Rail::post_frame(Op* op) {
    return nic_->post_send({op->frame, frames_desc(), op->nbytes, op->link->address, &op->context});
}

void Rail::post_receives() {
    while (!unposted_.empty()) {
        auto* recv = unposted_.back();
        if (nic_->post_recv({recv->frame, frames_desc(), kFrameBytes, 0, &recv->context}) != PostResult::kOk) return;
        unposted_.pop_back();
    }
}

bool Rail::repost(Op* recv) {
    unposted_.push_back(recv);
    post_receives();
    return unposted_.empty();
}

}  // namespace fkv
