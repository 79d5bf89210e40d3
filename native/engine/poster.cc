#include "engine/poster.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <tuple>
#include <utility>

#include "base/clock.h"

namespace fkv {
namespace {

constexpr std::size_t kPostsPerTurn = 64;          // writes that a transfer may post before the next one's turn
constexpr std::uint64_t kMaxWriteBytes = 1 << 20;  // larger ones gain nothing and make others wait
constexpr std::uint64_t kMaxPeerBytes = 4 << 20;   // bulk in flight to one peer on one rail: above bandwidth x delay
constexpr std::size_t kMaxLinks = 64;              // rail pairs to one peer that are considered for a write
constexpr std::uint32_t kEnoughOps = 64;           // in flight to one peer on one rail to keep it busy
constexpr std::int64_t kKeptNs = kMillisecond;     // room that a batch waits for
constexpr std::uint32_t kMaxBatch = 16;  // writes with one immediate: it costs little more than one write then

OpError detail_of(const Error& error) {
    auto detail = error.op();
    detail.text = error.what();
    return detail;
}

std::uint64_t smallest_max_msg(const std::vector<std::unique_ptr<Rail>>& rails) {
    std::uint64_t bytes = kMaxWriteBytes;
    for (const auto& rail : rails) bytes = std::min(bytes, rail->info().max_msg_bytes);
    return bytes;
}

std::size_t fewest_places(const std::vector<std::unique_ptr<Rail>>& rails, std::size_t NicInfo::* limit) {
    std::size_t places = kMaxParts;
    for (const auto& rail : rails) places = std::min(places, rail->info().*limit);
    return std::max<std::size_t>(places, 1);
}

}  // namespace

Poster::Poster(std::uint32_t group, const Epoch& epoch, std::vector<std::unique_ptr<Rail>>& rails)
    : group_(group),
      epoch_(epoch),
      rails_(rails),
      max_write_bytes_(smallest_max_msg(rails)),
      max_src_runs_(fewest_places(rails, &NicInfo::iov_limit)),
      max_dst_runs_(fewest_places(rails, &NicInfo::rma_iov_limit)),
      max_frame_bytes_(std::min<std::uint64_t>(max_write_bytes_, kFrameBytes)),
      batches_(std::any_of(rails.begin(), rails.end(), [](const auto& rail) { return rail->info().fail_stop; })) {
    // A rail whose speed is not known counts as one of the fastest.
    std::uint64_t fastest = 1;
    for (const auto& rail : rails) fastest = std::max(fastest, rail->info().link_bps);
    for (auto& rail : rails)
        if (const auto bps = rail->info().link_bps)
            rail->slowness = static_cast<double>(fastest) / static_cast<double>(bps);
}

void Poster::begin(Transfer& t) const {
    if (t.kind != Transfer::Kind::kWrite && t.kind != Transfer::Kind::kRead) return;
    const bool counted = t.token.unit_bytes > 0;
    WriteLimits limits{max_write_bytes_, counted ? t.token.unit_bytes : 1, counted ? kMaxWeight : ~std::uint64_t{0}};
    if (t.kind == Transfer::Kind::kWrite) {
        limits.max_src_runs = max_src_runs_;
        limits.max_dst_runs = max_dst_runs_;
    }
    t.cursor = PageCursor(t.pieces, limits);
}

namespace {

// Whether the coming piece may be posted; otherwise the transfer knows what it waits for.
bool may_go_on(Transfer& transfer) {
    transfer.waits_for = 0;
    const auto* piece = transfer.cursor.next_piece();
    if (piece && piece->layer > 0) {
        const auto wanted = Watch::pack(transfer.step, piece->layer);
        if (!transfer.watch->has_reached(wanted)) {
            transfer.waits_for = wanted;
            return false;
        }
    }
    // After the word was read: who cancels before the word goes on is sure that nothing goes by it.
    return !transfer.cancelled.load();
}

}  // namespace

PostResult Poster::post_some(Transfer& transfer, std::int64_t now) {
    switch (transfer.kind) {
        case Transfer::Kind::kWrite:
        case Transfer::Kind::kRead:
            return post_pages(transfer, now);
        case Transfer::Kind::kMessage:
            return post_message(transfer, now);
        case Transfer::Kind::kSignal:
            return post_signal(transfer, now);
        case Transfer::Kind::kFlush:
        case Transfer::Kind::kConnect:
            return post_on_all_rails(transfer, now);
    }
    throw Error(ErrorKind::kInternal, "unknown kind of transfer");
}

PostResult Poster::post_pages(Transfer& transfer, std::int64_t now) {
    // The provider refused a write in the middle of a batch. Between then and now the connection may be another one, on
    // which the next write would arrive although one before it has not. So each is waited for.
    if (transfer.batch.link && transfer.outstanding_plain > 0) return PostResult::kAgain;
    const bool batches = batches_ && transfer.token.unit_bytes > 0;
    for (std::size_t n = 0; n < kPostsPerTurn; ++n) {
        if (transfer.watch && !transfer.has_planned && !may_go_on(transfer)) return PostResult::kAgain;
        if (!transfer.has_planned && !transfer.cursor.next(transfer.planned)) {
            transfer.all_posted = true;
            return PostResult::kOk;
        }
        transfer.has_planned = true;
        if (batches && !transfer.has_following && n + 1 < kPostsPerTurn) {
            const bool may = !transfer.watch || may_go_on(transfer);
            transfer.has_following = may && transfer.cursor.next(transfer.following);
            transfer.waits_for = 0;  // the planned one does not
        }
        if (const auto result = post_planned(transfer, now); result != PostResult::kOk) return result;
        transfer.has_planned = std::exchange(transfer.has_following, false);
        if (transfer.has_planned) transfer.planned = transfer.following;
    }
    return PostResult::kOk;
}

std::vector<Peer::Link>& Poster::links_to(Peer& peer, std::uint32_t remote_group) {
    auto& side = *peer.sides[group_];
    auto& links = side.links[remote_group];
    if (!links.empty()) return links;
    const auto& remote = peer.groups[remote_group];
    const auto num_local = rails_.size(), num_remote = remote.size();
    std::vector<Peer::Link> made;
    // Peers differ where they begin, so that transfers of one write each do not all meet on the first rail.
    const auto offset = static_cast<std::size_t>(peer.epoch[0]);
    for (std::size_t k = 0; k < std::max(num_local, num_remote); ++k) {
        const auto local = (k + offset) % num_local, other = (k + offset) % num_remote;
        made.push_back({.local_rail = static_cast<std::uint32_t>(local),
                        .remote_rail = static_cast<std::uint32_t>(other),
                        .address = rails_[local]->nic().insert_peer(remote[other]),
                        .stats = &side.stats});
    }
    links = std::move(made);
    return links;
}

PostResult Poster::post_planned(Transfer& transfer, std::int64_t now) {
    if (transfer.planned.after_plain && transfer.token.unit_bytes > 0 && transfer.outstanding_plain > 0)
        return PostResult::kAgain;
    try {
        if (transfer.batch.link) return post_write_on(transfer, *transfer.batch.link, now);
        auto& links = links_to(*transfer.peer, transfer.planned.piece->dst->group);
        if (links.size() == 1) return post_write_on(transfer, links[0], now);
        // The pair that would be through with it first takes it, by what is in flight and how fast its NIC is; if that
        // one is full, the next one. Pairs that have failed come last.
        std::array<Peer::Link*, kMaxLinks> order;
        const auto count = std::min(links.size(), order.size());
        for (std::size_t i = 0; i < count; ++i) order[i] = &links[i];
        std::sort(order.begin(), order.begin() + count, [&](const auto* a, const auto* b) {
            // The pair's number decides last: an order without ties, and no need for a stable sort, which allocates.
            const auto &one = *rails_[a->local_rail], &other = *rails_[b->local_rail];
            const auto nbytes = transfer.planned.nbytes;
            return std::tuple(now < a->avoided_until_ns, one.busy_for(nbytes), a->bytes_in_flight, a - links.data()) <
                   std::tuple(now < b->avoided_until_ns, other.busy_for(nbytes), b->bytes_in_flight, b - links.data());
        });
        for (std::size_t i = 0; i < count; ++i)
            if (const auto result = post_write_on(transfer, *order[i], now); result != PostResult::kAgain)
                return result;
        return PostResult::kAgain;
    } catch (const Error& error) {  // the provider refuses the peer's address
        transfer.fail(detail_of(error));
        return PostResult::kFailed;
    }
}

namespace {

WritePart part_of(const PagePiece& piece, const PlannedRun& run, const Peer::Link& link) {
    const auto src_segment = piece.src->segments.index_of(run.src_offset);
    const auto dst_segment = piece.dst->segments.index_of(run.dst_offset);
    const auto& dst = piece.dst->rails[link.remote_rail][dst_segment];
    return {piece.src->base + run.src_offset, piece.src->rails[link.local_rail][src_segment]->local_desc(), run.nbytes,
            dst.base + (run.dst_offset - piece.dst->segments.begin_of(dst_segment)), dst.rkey};
}

// No data, with a destination that the provider may check.
WritePart nothing_for(const RemoteRegion& region, const Rail& rail, const Peer::Link& link) {
    const auto& dst = region.rails[link.remote_rail][0];
    return {rail.no_data(), rail.frames_desc(), 0, dst.base, dst.rkey};
}

bool has_room(const Rail& rail, const Peer::Link& link, std::uint32_t writes) {
    return rail.has_room(link, writes) && link.ops_in_flight + writes <= link.most_ops;
}

// Whether the following write could answer for the planned one.
bool could_defer(const Transfer& transfer) {
    const auto &one = transfer.planned, &next = transfer.following;
    const auto& batch = transfer.batch;
    if (one.units == 0 || next.units == 0 || next.after_plain) return false;
    // A layer's last write speaks for itself and all before it.
    if (one.piece->layer != next.piece->layer || one.piece->dst->group != next.piece->dst->group) return false;
    return batch.num_writes + 1 < kMaxBatch && batch.nbytes + one.nbytes + next.nbytes <= kMaxWriteBytes &&
           batch.units + one.units + next.units <= kMaxWeight;
}

// Whether the planned write may leave its immediate to the following one, which will then be posted at once.
bool may_defer(const Transfer& transfer, const Rail& rail, const Peer::Link& link) {
    // A post behind messages that rxm holds back for lack of credits may poll, and so change the connection.
    return link.frames_in_flight == 0 && has_room(rail, link, 2) &&
           (transfer.urgent ||
            link.bytes_in_flight + transfer.planned.nbytes + transfer.following.nbytes <= kMaxPeerBytes);
}

// A full queue has room for one write after the other. While enough are under way, a batch waits until all of it has,
// and nobody takes the room away meanwhile: for a moment, since who waits may be gone the next time.
bool waits_for_room(const Transfer& transfer, const Rail& rail, Peer::Link& link, std::int64_t now) {
    if (transfer.urgent || transfer.batch.link || link.ops_in_flight == 0) return false;
    const bool is_free = link.ops_in_flight < kMaxBatch || rail.has_room(link, kMaxBatch);
    if (is_free && link.ops_in_flight + kMaxBatch <= link.most_ops) return false;
    link.kept_for = transfer.id;
    link.kept_until_ns = now + kKeptNs;
    return true;
}

// What became of a write of a batch, which its link and its transfer learn from.
void advance(Transfer& transfer, Peer::Link& link, bool defers, PostResult result) {
    auto& batch = transfer.batch;
    if (result == PostResult::kOk) {
        link.kept_until_ns = 0;
        const auto units = batch.units + transfer.planned.units, nbytes = batch.nbytes + transfer.planned.nbytes;
        batch = defers ? Batch{&link, batch.num_writes + 1, units, nbytes} : Batch{};
        if (!defers && link.most_ops < kEnoughOps) ++link.most_ops;
    } else if (result == PostResult::kAgain && batch.link && !batch.refused) {
        batch.refused = true;
        link.most_ops = std::max(kMaxBatch, link.ops_in_flight - 1);
    }
}

}  // namespace

PostResult Poster::post_write_on(Transfer& transfer, Peer::Link& link, std::int64_t now) {
    auto& rail = *rails_[link.local_rail];
    const auto& planned = transfer.planned;
    if (!transfer.urgent && link.bytes_in_flight > 0 && link.bytes_in_flight + planned.nbytes > kMaxPeerBytes)
        return PostResult::kAgain;
    const bool counted = transfer.token.unit_bytes > 0;
    if (!transfer.urgent && now < link.kept_until_ns && link.kept_for != transfer.id) return PostResult::kAgain;
    const bool batches = transfer.has_following && rail.info().fail_stop && could_defer(transfer);
    if (batches && link.ops_in_flight == 0) link.most_ops = Peer::Link::kNoBound;
    if (batches && waits_for_room(transfer, rail, link, now)) return PostResult::kAgain;
    const bool defers = batches && may_defer(transfer, rail, link);
    auto* op = rail.take_op(Op::Kind::kWrite, link, &transfer, planned.nbytes, now);
    if (!op) return PostResult::kAgain;
    std::array<WritePart, kMaxParts> parts;
    for (std::size_t i = 0; i < planned.num_runs; ++i) parts[i] = part_of(*planned.piece, planned.runs[i], link);
    op->pages = {static_cast<std::uint32_t>(planned.piece - transfer.pieces.data()), planned.first_page,
                 planned.num_pages};
    if (transfer.kind == Transfer::Kind::kRead) {
        const ReadOp read{planned.piece->src->base + planned.runs[0].src_offset,
                          parts[0].local_desc,
                          planned.nbytes,
                          link.address,
                          parts[0].dst,
                          parts[0].rkey,
                          &op->context};
        return posted(rail.nic().post_read(read), op, rail, transfer);
    }
    WriteOp write{};
    write.parts = {parts.data(), planned.num_runs};
    write.peer = link.address;
    const auto units = transfer.batch.units + planned.units;
    write.has_imm = counted && planned.units > 0 && !defers;
    write.imm = pack({transfer.token.slot, transfer.token.generation, static_cast<std::uint32_t>(units)});
    write.context = &op->context;
    op->plain = counted && !write.has_imm;
    write.delivered = counted && planned.units == 0;
    const bool sampled = rail.stats.ops.get() % kPostSample == 0;
    const auto begin = sampled ? now_ns() : 0;
    const auto result = rail.nic().post_write(write);
    if (sampled && result == PostResult::kOk) rail.stats.post_latency.add(static_cast<std::uint64_t>(now_ns() - begin));
    if (defers || transfer.batch.link) advance(transfer, link, defers, result);
    return posted(result, op, rail, transfer);
}

namespace {

// Takes back what was not posted, and books for its link what the NIC said.
void book(PostResult result, Op* op, Rail& rail) {
    auto& link = *op->link;
    const auto now = op->posted_ns;
    if (result != PostResult::kOk) rail.free_op(op);
    if (result == PostResult::kOk) link.posted(now);
    if (result == PostResult::kFailed) link.failed(now);
    if (result != PostResult::kAgain || link.ops_in_flight > 0)
        link.refused_ns = 0;
    else if (link.refused_ns == 0)
        link.refused_ns = now;
}

}  // namespace

PostResult Poster::posted(PostResult result, Op* op, Rail& rail, Transfer& transfer) {
    book(result, op, rail);
    if (result != PostResult::kOk) {
        if (result == PostResult::kAgain)
            rail.stats.again.add(1);
        else
            transfer.fail(rail.nic().last_post_error());
        return result;
    }
    ++transfer.outstanding;
    transfer.outstanding_plain += op->plain;
    rail.stats.ops.add(1);
    rail.stats.bytes.add(op->nbytes);
    op->link->stats->ops.add(1);
    op->link->stats->bytes.add(op->nbytes);
    return result;
}

PostResult Poster::post_nothing(Transfer& transfer, Peer::Link& link, WriteOp write, std::int64_t now) {
    auto& rail = *rails_[link.local_rail];
    auto* op = rail.take_op(Op::Kind::kWrite, link, &transfer, 0, now);
    if (!op) return PostResult::kAgain;
    const auto nothing = nothing_for(*transfer.signal_dst, rail, link);
    write.parts = {&nothing, 1};
    write.peer = link.address;
    write.context = &op->context;
    return posted(rail.nic().post_write(write), op, rail, transfer);
}

// An empty write that completes on delivery: on a rail that keeps writes in order it pushes all earlier ones ahead of
// itself. On the others nothing can be said after the fact.
PostResult Poster::post_on_all_rails(Transfer& transfer, std::int64_t now) {
    try {
        auto& links = links_to(*transfer.peer, transfer.signal_dst->group);
        for (; transfer.next_link < links.size(); ++transfer.next_link) {
            auto& link = links[transfer.next_link];
            auto& rail = *rails_[link.local_rail];
            if (transfer.kind == Transfer::Kind::kFlush && !rail.info().ordered_writes) {
                transfer.fail({0, 0, "flush", rail.info().provider, rail.info().domain,
                               "the rail does not keep writes in order, so a flush proves nothing"});
                return PostResult::kFailed;
            }
            // Where a failed write stops the next, nothing is left of what was posted before it.
            if (transfer.kind == Transfer::Kind::kFlush && link.has_failed && !rail.info().fail_stop) {
                transfer.fail(
                    {0, 0, "flush", rail.info().provider, rail.info().domain,
                     "an operation to the peer has failed on this rail: its connection may be another one now, "
                     "which proves nothing of what was written on the one before"});
                return PostResult::kFailed;
            }
            WriteOp write{};
            // Not to connect: it needs no proof, and a write of nothing that asks for one stops shm 1.17.
            write.delivered = transfer.kind == Transfer::Kind::kFlush;
            if (const auto result = post_nothing(transfer, link, write, now); result != PostResult::kOk) return result;
        }
    } catch (const Error& error) {
        transfer.fail(detail_of(error));
        return PostResult::kFailed;
    }
    transfer.all_posted = true;
    return PostResult::kOk;
}

PostResult Poster::post_signal(Transfer& transfer, std::int64_t now) {
    const bool counted = transfer.token.unit_bytes > 0;
    try {
        auto& link = links_to(*transfer.peer, transfer.signal_dst->group).front();
        do {
            const auto weight = static_cast<std::uint32_t>(std::min<std::uint64_t>(transfer.signal_units, kMaxWeight));
            WriteOp write{};
            write.has_imm = true;
            write.imm = counted ? pack({transfer.token.slot, transfer.token.generation, weight})
                                : pack_user(transfer.user_value);
            if (const auto result = post_nothing(transfer, link, write, now); result != PostResult::kOk) return result;
            transfer.signal_units -= counted ? weight : transfer.signal_units;
        } while (transfer.signal_units > 0);
    } catch (const Error& error) {
        transfer.fail(detail_of(error));
        return PostResult::kFailed;
    }
    transfer.all_posted = true;
    return PostResult::kOk;
}

PostResult Poster::post_message(Transfer& transfer, std::int64_t now) {
    Peer::Link* link;
    try {
        link = &frames_link(*transfer.peer);
    } catch (const Error& error) {  // the provider refuses the peer's address
        transfer.fail(detail_of(error));
        return PostResult::kFailed;
    }
    // An empty message is one frame without payload.
    do {
        const auto payload = std::span(transfer.message).subspan(transfer.message_offset);
        const auto nbytes = std::min(payload.size(), max_frame_bytes_ - sizeof(FrameHeader));
        auto header = header_of(FrameKind::kData, transfer.id);
        header.total_bytes = static_cast<std::uint32_t>(transfer.message.size());
        header.offset = static_cast<std::uint32_t>(transfer.message_offset);
        const auto result = post_frame(header, payload.first(nbytes), transfer.peer, *link, &transfer, now);
        if (result != PostResult::kOk) return result;
        ++transfer.outstanding;
        transfer.message_offset += nbytes;
    } while (transfer.message_offset < transfer.message.size());
    transfer.all_posted = true;
    return PostResult::kOk;
}

// A frame of a transfer's message, or one for which nobody waits.
PostResult Poster::post_frame(const FrameHeader& header, std::span<const std::byte> payload,
                              const std::shared_ptr<Peer>& peer, Peer::Link& link, Transfer* transfer,
                              std::int64_t now) {
    auto& rail = *rails_[link.local_rail];
    auto* op = rail.take_op(transfer ? Op::Kind::kMessage : Op::Kind::kNotice, link, transfer,
                            sizeof header + payload.size(), now);
    if (!op) return PostResult::kAgain;
    if (!transfer) op->keep = peer;
    std::memcpy(op->frame, &header, sizeof header);
    if (!payload.empty()) std::memcpy(op->frame + sizeof header, payload.data(), payload.size());
    const auto result = rail.post_frame(op);
    book(result, op, rail);
    if (result == PostResult::kFailed && transfer) transfer->fail(rail.nic().last_post_error());
    return result;
}

std::span<Peer::Link> Poster::next_links(const Transfer& transfer) {
    if (transfer.kind == Transfer::Kind::kMessage) return {&frames_link(*transfer.peer), 1};
    if (transfer.batch.link) return {transfer.batch.link, 1};
    if (!transfer.signal_dst && !transfer.has_planned) return {};  // it stops
    if (!transfer.signal_dst) return links_to(*transfer.peer, transfer.planned.piece->dst->group);
    return std::span(links_to(*transfer.peer, transfer.signal_dst->group)).subspan(transfer.next_link, 1);
}

std::string Poster::why_held_up(const Transfer& transfer, std::int64_t now, std::int64_t for_ns) {
    if (transfer.waits_since_ns == 0 || now - transfer.waits_since_ns < for_ns) return {};
    std::string why;
    for (const auto& link : next_links(transfer)) {
        const auto since = link.ops_in_flight > 0 ? link.last_progress_ns : link.refused_ns;
        if (since == 0 || now - since < for_ns) return {};
        const auto& info = rails_[link.local_rail]->info();
        why += (why.empty() ? "" : "; ") + info.provider + " NIC " + info.domain +
               (link.ops_in_flight > 0 ? " has completed nothing to the peer for "
                                       : " takes nothing for the peer, as if it could not connect, for ") +
               std::to_string((now - since) / kMillisecond) + " ms";
    }
    return why;
}

bool Poster::ping(const std::shared_ptr<Peer>& peer, std::int64_t now) {
    // A ping that fails is left out: a peer that cannot be reached is silent, and will be reported.
    try {
        return post_frame(header_of(FrameKind::kPing, 0), {}, peer, frames_link(*peer), nullptr, now) !=
               PostResult::kAgain;
    } catch (const Error&) {
        return true;
    }
}

std::vector<Peer::Link>* Poster::find_links(Peer& peer, std::uint32_t remote_group) {
    try {
        return &links_to(peer, remote_group);
    } catch (const Error&) {
        return nullptr;
    }
}

bool Poster::is_broken(const Peer::Link& link) const {
    return link.has_failed && rails_[link.local_rail]->info().fail_stop;
}

bool Poster::goodbye(const std::shared_ptr<Peer>& peer, Peer::Link& link, std::uint64_t id, std::int64_t now) {
    return post_frame(header_of(FrameKind::kGoodbye, id), {}, peer, link, nullptr, now) != PostResult::kAgain;
}

}  // namespace fkv
