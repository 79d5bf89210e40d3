#include "fake/world.h"

#include <algorithm>
#include <cassert>
#include <cerrno>

namespace fkv::fake {
namespace {

Step after(Step step) { return static_cast<Step>(static_cast<int>(step) + 1); }

}  // namespace

void World::advance(NicId poller) {
    ++clock;
    for (auto& op : ops) {
        run_to_target(op, poller);
        run_to_source(op);
    }
    // What failed up to now, in this very step too, the NIC has noticed: from here on it posts over another connection.
    if (nics[poller].profile.reconnects)
        for (auto& [pair, border] : broken)
            if (pair.first == poller) border = std::min(border, stats.posts);
    std::erase_if(ops, [](const Op& op) { return op.target_done && op.source_done; });
}

bool World::is_ordered(const Op& op) const {
    return nics[op.view.src].profile.ordered && nics[op.view.dst].profile.ordered;
}

bool World::is_cut_off(const Op& op) const {
    const auto found = broken.find({op.view.src, op.view.dst});
    return found != broken.end() && op.view.id < found->second;
}

bool World::waits_for_earlier(const Op& op, bool to_target) const {
    for (const auto& other : ops) {
        if (&other == &op) return false;
        const bool same_pair = other.view.src == op.view.src && other.view.dst == op.view.dst;
        if (same_pair && !(to_target ? other.target_done : other.source_done)) return true;
    }
    return false;
}

void World::run_to_target(Op& op, NicId poller) {
    if (op.target_done || op.target.held || clock < op.target.due) return;
    auto& src = nics[op.view.src];
    auto& dst = nics[op.view.dst];
    // Where software moves the data each side makes its own steps, and only while it is polled.
    const auto& runner = op.step == Step::kLeave ? src : dst;
    if (!runner.profile.offloaded && (runner.id != poller || runner.frozen) && !runner.gone) return;
    if (is_ordered(op)) {
        if (waits_for_earlier(op, true)) return;
        if (is_cut_off(op)) return fail(op, ENOTCONN, "the connection failed earlier");
    }
    if (!pass_rules(op, op.target, op.step)) return;
    if (dst.gone) {
        if (dst.death == Death::kSilent) {
            op.lost = op.target_done = true;
            return;
        }
        return fail(op, EHOSTDOWN, "the peer is gone");
    }
    switch (op.step) {
        case Step::kLeave:
            break;
        case Step::kArrive:
            arrive(op);
            if (!op.accepted && op.step == Step::kArrive) return;  // refused, or waits for a receive
            break;
        case Step::kLandFirst:
        case Step::kLandLast:
            land(op, op.step == Step::kLandFirst);
            break;
        default:
            if (!tell_target(op)) return;
            op.target_done = true;
    }
    op.step = after(op.step);
    op.target = {clock + below(src.profile.max_delay + 1), 0, false};
}

void World::run_to_source(Op& op) {
    if (op.source_done || op.back.held || clock < op.back.due) return;
    auto& src = nics[op.view.src];
    if (src.gone) {
        op.source_done = true;
        return;
    }
    const bool heard = op.failed || (op.target_done && !op.lost) || op.early || (!op.lost && op.step > op.back_after);
    if (!heard || src.frozen || src.cq_full()) return;
    if (is_ordered(op) && waits_for_earlier(op, false)) return;
    if (!op.failed && !pass_rules(op, op.back, Step::kTellSource)) return;
    if (op.source_done) return;  // a rule has killed the sender
    Entry entry;
    entry.failed = op.failed;
    entry.frees_tx = !op.reported;
    if (op.failed) {
        ++stats.failures;
        entry.failure = {op.with_context ? op.context : nullptr, op.error};
        if (op.as_receive) entry.failure.error.op = "recv";
        if (!op.with_context && !op.reported) src.contexts.erase(op.context);
    } else {
        take_onto_wire(op);  // from here on the source is the caller's again
        entry.done.context = op.context;
        entry.done.kind = Completion::kSent;
        op.reported = true;
    }
    op.source_done = true;
    push(src, std::move(entry));
}

void World::arrive(Op& op) {
    const bool accepted = op.view.kind != OpKind::kSend ? accept_remote(op) : accept_message(op);
    if (!accepted) return;
    op.accepted = true;
    op.split = op.view.nbytes;
    const auto& src = nics[op.view.src].profile;
    if (op.view.nbytes >= std::max<std::uint64_t>(src.split_bytes, 2)) op.split = 1 + below(op.view.nbytes - 1);
    op.back_to_front = !is_ordered(op) && percent(50);
}

// All parts or none: a provider that takes some before it looks at the others would be no worse, since nobody hears of
// them.
bool World::accept_remote(Op& op) {
    return std::all_of(op.parts.begin(), op.parts.end(), [&](auto& part) { return accept_part(op, part); });
}

bool World::accept_part(Op& op, Part& part) {
    auto& dst = nics[op.view.dst];
    if (part.nbytes == 0) return true;  // no byte, no check: so does InfiniBand
    if (!dst.profile.checks_keys) {
        part.landing = reinterpret_cast<std::byte*>(part.dst_address);
        return true;
    }
    const auto found = dst.mrs.find(part.rkey);
    if (found == dst.mrs.end()) {
        fail(op, EACCES, "the target knows no such rkey");
        return false;
    }
    const auto& mr = found->second;
    const std::uint64_t offset = part.dst_address - mr.remote_base;
    if (part.dst_address < mr.remote_base || offset > mr.nbytes || part.nbytes > mr.nbytes - offset) {
        fail(op, EACCES, "out of the target's registration");
        return false;
    }
    part.landing = mr.base + offset;
    part.mr = mr.id;
    return true;
}

bool World::accept_message(Op& op) {
    auto& dst = nics[op.view.dst];
    if (dst.receives.empty() || dst.cq_full()) return false;  // the message waits at the target
    op.receive = dst.receives.front();
    dst.receives.pop_front();
    if (op.view.nbytes <= op.receive.op.nbytes) {
        op.parts[0].landing = static_cast<std::byte*>(op.receive.op.buffer);
        return true;
    }
    // Too long: the receive fails, the sender never knows.
    op.target_done = true;
    Entry entry{true, true};
    entry.failure = {op.receive.op.context, error_of(dst, "recv", kErrTruncated, "message longer than its receive")};
    push(dst, std::move(entry));
    return false;
}

void World::land(Op& op, bool first) {
    const bool low_part = first != op.back_to_front;
    if (low_part)
        copy(op, 0, op.split);
    else
        copy(op, op.split, op.view.nbytes);
    if (!first && !op.on_wire && op.view.kind != OpKind::kRead) check_source(op);
}

void World::check_source(const Op& op) {
    if (checksum_of(op.parts) != op.checksum)
        misused(nics[op.view.src],
                "the source of operation " + std::to_string(op.view.id) + " changed before its completion");
}

void World::copy(Op& op, std::uint64_t begin, std::uint64_t end) {
    if (begin == end) return;
    if (op.view.kind == OpKind::kRead) {
        std::memmove(op.local + begin, op.parts[0].landing + begin, end - begin);
        return;
    }
    std::uint64_t start = 0;  // of the part within the payload
    for (const auto& part : op.parts) {
        const auto from = std::max(begin, start), to = std::min(end, start + part.nbytes);
        if (from < to) {
            const std::byte* source = op.on_wire ? op.wire.data() + from : part.source + (from - start);
            std::memmove(part.landing + (from - start), source, to - from);
        }
        start += part.nbytes;
    }
}

void World::take_onto_wire(Op& op) {
    if (op.on_wire || op.step > Step::kLandLast) return;
    for (const auto& part : op.parts) op.wire.insert(op.wire.end(), part.source, part.source + part.nbytes);
    op.on_wire = true;
    check_source(op);
}

bool World::tell_target(Op& op) {
    auto& dst = nics[op.view.dst];
    if (op.view.kind == OpKind::kRead || (op.view.kind == OpKind::kWrite && !op.view.has_imm)) return true;
    if (dst.cq_full()) return false;
    Entry entry;
    if (op.view.kind == OpKind::kSend) {
        entry.receive = true;
        entry.done = {op.receive.op.context, Completion::kReceived, false, 0, op.view.nbytes};
    } else {
        entry.done = {nullptr, Completion::kRemoteWrite, true, op.view.imm, op.view.nbytes};
        if (dst.profile.imm_uses_recv) {
            if (dst.receives.empty()) return false;
            entry.receive = true;
            entry.done.context = dst.receives.front().op.context;
            dst.receives.pop_front();
        }
    }
    push(dst, std::move(entry));
    return true;
}

void World::push(NicState& nic, Entry entry) {
    assert(!nic.cq_full() && "every path waits for room first");
    nic.cq.push_back(std::move(entry));
    if (nic.bell) nic.bell->ring();
}

bool World::may_sleep(const NicState& nic) const {
    if (!nic.cq.empty()) return false;
    if (nic.frozen) return true;
    // Whatever still moves needs polls: of this NIC, as far as it is concerned.
    return std::none_of(ops.begin(), ops.end(), [&](const Op& op) {
        const bool from = op.view.src == nic.id && !op.source_done && !op.back.held && !op.lost;
        const bool to = op.view.dst == nic.id && !op.target_done && !op.target.held;
        return from || to;
    });
}

}  // namespace fkv::fake
