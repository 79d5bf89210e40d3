// Two NICs that know each other, with registered memory and everything that came out of their completion queues.
//
// Threads:  one. drive() polls both ends in turn, since most software providers move data only while both are polled.
#pragma once

#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <span>

#include "arena.h"
#include "fabric/nic.h"

namespace fkv::test {

using std::chrono::milliseconds;

struct Posted {
    OpContext context{};  // first: completions carry its address
    int num_ends = 0;     // completions so far, good or bad
    std::optional<OpError> error;
    std::uint64_t nbytes = 0;          // of a received message
    std::span<std::byte> buffer = {};  // of a receive
    bool keep = false;                 // a receive that is posted again when an immediate has used it up
};

struct RemoteMemory {
    std::uint64_t base, rkey;
};

using Opener = std::function<std::unique_ptr<Nic>(const Arena& arena)>;

class End {
  public:
    End(const Opener& open, std::size_t memory_bytes);
    ~End();
    End(const End&) = delete;
    End& operator=(const End&) = delete;

    RemoteMemory remote() const { return {mr->remote_base(), mr->rkey()}; }
    void fill(std::byte value) { std::fill(memory.begin(), memory.end(), value); }
    std::vector<std::byte> snapshot() const { return {memory.begin(), memory.end()}; }

    // One attempt. Null when the queue is full or the post failed; then last_result says which.
    Posted* try_write(std::uint64_t src_offset, std::uint64_t nbytes, std::uint64_t dst, std::uint64_t rkey,
                      std::optional<std::uint32_t> imm, bool delivered = false);
    struct Part {
        std::uint64_t src_offset, nbytes, dst;
    };
    Posted* try_write_parts(const std::vector<Part>& parts, std::uint64_t rkey, std::optional<std::uint32_t> imm,
                            bool delivered = false);
    Posted* try_read(std::uint64_t dst_offset, std::uint64_t nbytes, std::uint64_t src, std::uint64_t rkey);
    Posted* try_send(std::uint64_t src_offset, std::uint64_t nbytes);
    Posted* post_recv(std::uint64_t nbytes);  // with a buffer of its own
    // Where immediates use up receives: keeps so many posted. Elsewhere nothing.
    void keep_receives(std::size_t count, std::uint64_t nbytes);

    // Takes everything out of the completion queue.
    void poll();

    Arena arena;
    std::unique_ptr<Nic> nic;
    std::span<std::byte> memory;
    std::unique_ptr<MemoryHandle> mr;
    PeerAddress peer = 0;
    PostResult last_result = PostResult::kOk;

    std::deque<Posted> posted;
    std::vector<std::uint32_t> imms;             // in the order of arrival
    std::vector<FailedCompletion> stray_errors;  // without context
    std::size_t num_unknown = 0;                 // completions with a context that nobody posted
    std::size_t num_sent = 0, num_failed = 0;    // of what was posted
    std::function<void(std::uint32_t)> on_imm;
    std::function<void(const Posted&)> on_sent;
    std::vector<Posted*> received;  // messages, in the order of arrival

  private:
    Posted* accept(PostResult result);
    Posted* find(OpContext* context);

    std::span<std::byte> receive_memory_;
    std::unique_ptr<MemoryHandle> receive_mr_;
    std::size_t receive_used_ = 0;
    void repost(Posted* receive);

    std::map<OpContext*, Posted*> by_context_;
};

class NicPair {
  public:
    explicit NicPair(const Opener& open, std::size_t memory_bytes = 1 << 20);

    // Polls both ends until `done`; false when `bound` passed first.
    bool drive(const std::function<bool()>& done, milliseconds bound = milliseconds(10'000));
    // Polls for a while: for what must not happen.
    void drive_for(milliseconds time);

    // Retries while the queue is full, polling both ends. Null when the post failed.
    Posted* write(End& from, End& to, std::uint64_t src_offset, std::uint64_t nbytes, std::uint64_t dst_offset,
                  std::optional<std::uint32_t> imm, std::optional<RemoteMemory> where = {});
    Posted* read(End& to, End& from, std::uint64_t dst_offset, std::uint64_t nbytes, std::uint64_t src_offset,
                 std::optional<RemoteMemory> where = {});
    Posted* send(End& from, std::uint64_t src_offset, std::uint64_t nbytes);

    std::unique_ptr<End> a, b;

  private:
    // Retries `attempt` of `end` while its queue is full.
    Posted* post(End& end, const std::function<Posted*()>& attempt);
};

// What a byte at `offset` of a stamped range holds.
std::byte stamp(std::uint64_t seed, std::uint64_t offset);
void write_stamp(std::span<std::byte> range, std::uint64_t seed);
bool has_stamp(std::span<const std::byte> range, std::uint64_t seed);
bool all_equal(std::span<const std::byte> range, std::byte value);

}  // namespace fkv::test
