// What a transfer has to do next, as operations on the rails: pages, messages, immediates, pings.
//
// Threads:  the progress thread only.
// Failure:  the transfer's first error is kept in it; kAgain means that a rail has no room, or the layer is not done.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/rail.h"
#include "engine/transfer.h"

namespace fkv {

class Poster {
  public:
    Poster(std::uint32_t group, const Epoch& epoch, std::vector<std::unique_ptr<Rail>>& rails);

    std::uint64_t max_write_bytes() const { return max_write_bytes_; }

    // Before the first post_some(): how its pages will be cut.
    void begin(Transfer& transfer) const;
    // Posts a turn's worth; `all_posted` says when there is nothing left.
    PostResult post_some(Transfer& transfer, std::int64_t now);
    // False: there is no room for it now.
    bool ping(const std::shared_ptr<Peer>& peer, std::int64_t now);
    bool goodbye(const std::shared_ptr<Peer>& peer, Peer::Link& link, std::uint64_t id, std::int64_t now);
    // Null: the provider refuses the peer's address.
    std::vector<Peer::Link>* find_links(Peer& peer, std::uint32_t remote_group);
    // Whether a post there would go over another connection than those before.
    bool is_broken(const Peer::Link& link) const;
    // Why a transfer that waits for a rail cannot go on: all that it may go by take nothing, or complete nothing, for
    // `for_ns`. Empty if that is not so.
    std::string why_held_up(const Transfer& transfer, std::int64_t now, std::int64_t for_ns);

  private:
    PostResult post_pages(Transfer& transfer, std::int64_t now);
    PostResult post_planned(Transfer& transfer, std::int64_t now);
    PostResult post_write_on(Transfer& transfer, Peer::Link& link, std::int64_t now);
    PostResult post_on_all_rails(Transfer& transfer, std::int64_t now);
    // A write without data, of which `write` says what it carries.
    PostResult post_nothing(Transfer& transfer, Peer::Link& link, WriteOp write, std::int64_t now);
    PostResult post_signal(Transfer& transfer, std::int64_t now);
    PostResult post_message(Transfer& transfer, std::int64_t now);
    PostResult post_frame(const FrameHeader& header, std::span<const std::byte> payload,
                          const std::shared_ptr<Peer>& peer, Peer::Link& link, Transfer* transfer, std::int64_t now);
    // Books an operation that was just posted, or takes it back.
    PostResult posted(PostResult result, Op* op, Rail& rail, Transfer& transfer);
    FrameHeader header_of(FrameKind kind, std::uint64_t id) const {
        return {kFrameMagic, kFrameVersion, static_cast<std::uint16_t>(kind), epoch_, id, 0, 0};
    }
    std::vector<Peer::Link>& links_to(Peer& peer, std::uint32_t remote_group);
    // All of a peer's messages and pings go over its first pair of rails, in order.
    Peer::Link& frames_link(Peer& peer) { return links_to(peer, 0).front(); }
    // Those by which the next operation of a transfer may go.
    std::span<Peer::Link> next_links(const Transfer& transfer);

    const std::uint32_t group_;
    const Epoch epoch_;
    std::vector<std::unique_ptr<Rail>>& rails_;
    const std::uint64_t max_write_bytes_;
    const std::size_t max_src_runs_;  // places of one write on our side ...
    const std::size_t max_dst_runs_;  // ... and the peer's
    const std::size_t max_frame_bytes_;
    const bool batches_;  // any rail may
};

}  // namespace fkv
