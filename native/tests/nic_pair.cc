#include "nic_pair.h"

#include <sched.h>

#include <algorithm>
#include <array>

namespace fkv::test {
namespace {
constexpr std::size_t kReceiveBytes = 4 << 20;
}

End::End(const Opener& open, std::size_t memory_bytes)
    : arena(memory_bytes + kReceiveBytes),
      nic(open(arena)),
      memory(arena.all().first(memory_bytes)),
      receive_memory_(arena.all().subspan(memory_bytes)) {
    mr = nic->register_memory(memory.data(), memory.size());
    receive_mr_ = nic->register_memory(receive_memory_.data(), receive_memory_.size());
}

End::~End() {
    nic->close_endpoint();
    receive_mr_.reset();
    mr.reset();
}

Posted* End::accept(PostResult result) {
    last_result = result;
    if (result == PostResult::kOk) {
        by_context_[&posted.back().context] = &posted.back();
        return &posted.back();
    }
    posted.pop_back();
    return nullptr;
}

Posted* End::try_write(std::uint64_t src_offset, std::uint64_t nbytes, std::uint64_t dst, std::uint64_t rkey,
                       std::optional<std::uint32_t> imm, bool delivered) {
    return try_write_parts({{{src_offset, nbytes, dst}}}, rkey, imm, delivered);
}

Posted* End::try_write_parts(const std::vector<Part>& parts, std::uint64_t rkey, std::optional<std::uint32_t> imm,
                             bool delivered) {
    posted.emplace_back();
    std::vector<WritePart> list;
    for (const auto& part : parts)
        list.push_back({memory.data() + part.src_offset, mr->local_desc(), part.nbytes, part.dst, rkey});
    return accept(nic->post_write({list, peer, imm.has_value(), imm.value_or(0), &posted.back().context, delivered}));
}

Posted* End::try_read(std::uint64_t dst_offset, std::uint64_t nbytes, std::uint64_t src, std::uint64_t rkey) {
    posted.emplace_back();
    return accept(nic->post_read(
        {memory.data() + dst_offset, mr->local_desc(), nbytes, peer, src, rkey, &posted.back().context}));
}

Posted* End::try_send(std::uint64_t src_offset, std::uint64_t nbytes) {
    posted.emplace_back();
    return accept(nic->post_send({memory.data() + src_offset, mr->local_desc(), nbytes, peer, &posted.back().context}));
}

Posted* End::post_recv(std::uint64_t nbytes) {
    // Buffers are never used twice: a message that lands late or twice shows.
    if (receive_used_ + nbytes > receive_memory_.size()) return nullptr;
    auto* buffer = receive_memory_.data() + receive_used_;
    receive_used_ += nbytes;
    posted.emplace_back();
    posted.back().buffer = {buffer, nbytes};
    return accept(nic->post_recv({buffer, receive_mr_->local_desc(), nbytes, 0, &posted.back().context}));
}

void End::keep_receives(std::size_t count, std::uint64_t nbytes) {
    if (!nic->info().imm_uses_recv) return;
    for (std::size_t i = 0; i < std::min(count, nic->info().rx_depth); ++i)
        if (auto* receive = post_recv(nbytes)) receive->keep = true;
}

void End::repost(Posted* receive) {
    nic->post_recv({receive->buffer.data(), receive_mr_->local_desc(), receive->buffer.size(), 0, &receive->context});
}

Posted* End::find(OpContext* context) {
    const auto found = by_context_.find(context);
    return found == by_context_.end() ? nullptr : found->second;
}

void End::poll() {
    std::array<Completion, 16> completions;
    int n;
    while ((n = nic->poll(completions)) != 0) {
        for (int i = 0; i < n; ++i) {
            const auto& completion = completions[i];
            auto* op = find(completion.context);
            if (completion.kind == Completion::kRemoteWrite) {
                imms.push_back(completion.imm);
                if (on_imm) on_imm(completion.imm);
                if (op) ++op->num_ends;
                if (op && op->keep) repost(op);
                continue;
            }
            if (!op) {
                ++num_unknown;
                continue;
            }
            ++op->num_ends;
            op->nbytes = completion.nbytes;
            if (completion.kind == Completion::kReceived)
                received.push_back(op);
            else {
                ++num_sent;
                if (on_sent) on_sent(*op);
            }
        }
        if (n > 0) continue;
        bool any = false;
        for (FailedCompletion failure; nic->read_error(failure); any = true) {
            if (auto* op = find(failure.context)) {
                ++op->num_ends;
                op->error = failure.error;
                ++num_failed;
            } else {
                stray_errors.push_back(failure);
            }
        }
        if (!any) return;
    }
}

NicPair::NicPair(const Opener& open, std::size_t memory_bytes)
    : a(std::make_unique<End>(open, memory_bytes)), b(std::make_unique<End>(open, memory_bytes)) {
    a->peer = a->nic->insert_peer(b->nic->address());
    b->peer = b->nic->insert_peer(a->nic->address());
}

bool NicPair::drive(const std::function<bool()>& done, milliseconds bound) {
    const auto deadline = std::chrono::steady_clock::now() + bound;
    while (!done()) {
        if (a) a->poll();
        if (b) b->poll();
        if (std::chrono::steady_clock::now() > deadline) return done();
        // Providers emulated in software need the processor as well.
        sched_yield();
    }
    return true;
}

void NicPair::drive_for(milliseconds time) {
    drive([] { return false; }, time);
}

Posted* NicPair::write(End& from, End& to, std::uint64_t src_offset, std::uint64_t nbytes, std::uint64_t dst_offset,
                       std::optional<std::uint32_t> imm, std::optional<RemoteMemory> where) {
    const auto remote = where.value_or(to.remote());
    return post(from, [&] { return from.try_write(src_offset, nbytes, remote.base + dst_offset, remote.rkey, imm); });
}

Posted* NicPair::read(End& to, End& from, std::uint64_t dst_offset, std::uint64_t nbytes, std::uint64_t src_offset,
                      std::optional<RemoteMemory> where) {
    const auto remote = where.value_or(from.remote());
    return post(to, [&] { return to.try_read(dst_offset, nbytes, remote.base + src_offset, remote.rkey); });
}

Posted* NicPair::send(End& from, std::uint64_t src_offset, std::uint64_t nbytes) {
    return post(from, [&] { return from.try_send(src_offset, nbytes); });
}

Posted* NicPair::post(End& end, const std::function<Posted*()>& attempt) {
    Posted* op = nullptr;
    drive([&] {
        op = attempt();
        return op || end.last_result == PostResult::kFailed;
    });
    return op;
}

std::byte stamp(std::uint64_t seed, std::uint64_t offset) {
    return static_cast<std::byte>((seed * 0x9e3779b97f4a7c15u + offset * 0x2545f4914f6cdd1du) >> 56);
}

void write_stamp(std::span<std::byte> range, std::uint64_t seed) {
    for (std::size_t i = 0; i < range.size(); ++i) range[i] = stamp(seed, i);
}

bool has_stamp(std::span<const std::byte> range, std::uint64_t seed) {
    for (std::size_t i = 0; i < range.size(); ++i)
        if (range[i] != stamp(seed, i)) return false;
    return true;
}

bool all_equal(std::span<const std::byte> range, std::byte value) {
    return std::all_of(range.begin(), range.end(), [&](std::byte byte) { return byte == value; });
}

}  // namespace fkv::test
