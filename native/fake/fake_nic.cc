// One NIC of the fake fabric, as the engine sees it.
#include <atomic>
#include <cerrno>
#include <thread>

#include "fake/world.h"

namespace fkv::fake {
namespace {

// Addresses on the wire: which fabric, which NIC.
struct WireAddress {
    std::uint64_t magic;
    std::uint64_t nic;
};

class FakeMemory final : public MemoryHandle {
  public:
    FakeMemory(std::shared_ptr<World> world, NicId nic, std::uint64_t rkey, const Mr& mr)
        : world_(std::move(world)), nic_(nic), rkey_(rkey), id_(mr.id), remote_base_(mr.remote_base) {}
    ~FakeMemory() override { close(); }
    bool close() override {
        std::lock_guard lock(world_->mutex);
        if (std::exchange(closed_, true)) return true;
        auto& nic = world_->nics[nic_];
        if (nic.destroyed) world_->misused(nic, "a registration outlived its NIC");
        if (world_->call_fails(Call::kDeregister, nic_)) return false;
        world_->close_mr(nic, rkey_);
        return true;
    }
    FakeMemory(const FakeMemory&) = delete;
    FakeMemory& operator=(const FakeMemory&) = delete;

    std::uint64_t remote_base() const override { return remote_base_; }
    std::uint64_t rkey() const override { return rkey_; }
    void* local_desc() const override { return reinterpret_cast<void*>(id_); }

  private:
    std::shared_ptr<World> world_;
    NicId nic_;
    std::uint64_t rkey_, id_, remote_base_;
    bool closed_ = false;
};

class FakeNic final : public Nic {
  public:
    FakeNic(std::shared_ptr<World> world, NicId id) : world_(std::move(world)), id_(id), info_(world_->nics[id].info) {
        if (auto& bell = world_->nics[id].bell) wait_fd_ = bell->fd();
    }
    ~FakeNic() override;
    FakeNic(const FakeNic&) = delete;
    FakeNic& operator=(const FakeNic&) = delete;

    void close_endpoint() override;
    const NicInfo& info() const override { return info_; }
    std::vector<std::byte> address() const override;
    std::unique_ptr<MemoryHandle> register_memory(void* base, std::uint64_t nbytes) override;
    PeerAddress insert_peer(std::span<const std::byte> address) override;
    void remove_peer(PeerAddress peer) override;
    PostResult post_write(const WriteOp& op) override;
    PostResult post_read(const ReadOp& op) override;
    PostResult post_send(const MessageOp& op) override;
    PostResult post_recv(const MessageOp& op) override;
    OpError last_post_error() const override { return post_error_; }
    // Threads that spin here would keep the others from the world's mutex, which is not fair, for seconds.
    int poll(std::span<Completion> out) override {
        const int count = take_completions(out);
        if (count == 0) std::this_thread::yield();
        return count;
    }
    bool read_error(FailedCompletion& out) override;
    int wait_fd() const override { return wait_fd_; }
    bool may_sleep() override;

  private:
    class Use;
    enum : unsigned { kPosting = 1, kPolling = 2 };
    NicState& state() { return world_->nics[id_]; }
    PostResult refuse(const char* op, int fi_errno, const std::string& why, bool misuse);
    PostResult post(Op op, PeerAddress peer, std::span<const WritePart> parts);
    const Mr* local_mr(void* desc, const void* data, std::uint64_t nbytes);
    bool within_limits(std::span<const WritePart> parts) const;
    int take_completions(std::span<Completion> out);
    void read(const Entry& entry, OpContext* context);

    std::shared_ptr<World> world_;
    NicId id_;
    NicInfo info_;
    int wait_fd_ = -1;
    OpError post_error_;
    std::atomic<unsigned> in_use_{0};  // kPosting, kPolling
};

// Locks the world and notices a second thread that posts, or that polls: one may do the one while another does the
// other.
class FakeNic::Use {
  public:
    Use(FakeNic& nic, unsigned what) : nic_(nic), taken_(what & ~nic.in_use_.fetch_or(what)), lock_(nic.world_->mutex) {
        if (taken_ != what) nic_.world_->misused(nic_.state(), "used by two threads at once");
    }
    ~Use() { nic_.in_use_ &= ~taken_; }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

  private:
    FakeNic& nic_;
    const unsigned taken_;
    std::lock_guard<std::mutex> lock_;
};

FakeNic::~FakeNic() {
    std::lock_guard lock(world_->mutex);
    auto& nic = state();
    world_->close_endpoint(nic);
    nic.destroyed = true;
    nic.bell.reset();
}

void FakeNic::close_endpoint() {
    const Use use(*this, kPosting | kPolling);
    world_->close_endpoint(state());
}

std::vector<std::byte> FakeNic::address() const {
    const WireAddress wire{world_->magic, id_};
    std::vector<std::byte> bytes(sizeof wire);
    std::memcpy(bytes.data(), &wire, sizeof wire);
    return bytes;
}

std::unique_ptr<MemoryHandle> FakeNic::register_memory(void* base, std::uint64_t nbytes) {
    std::lock_guard lock(world_->mutex);
    auto& nic = state();
    const auto& profile = nic.profile;
    auto refuse_with = [&](int fi_errno, const std::string& why) {
        auto error = world_->error_of(nic, "fi_mr_reg", fi_errno, why);
        throw Error(ErrorKind::kRegistration,
                    "fi_mr_reg failed for " + std::to_string(nbytes) + " bytes: " + error.text, error);
    };
    if (const int fi_errno = world_->call_fails(Call::kRegister, id_)) refuse_with(fi_errno, "failed by a fault");
    if (nbytes > profile.max_mr_bytes)
        refuse_with(EINVAL, "the largest registration has " + std::to_string(profile.max_mr_bytes) + " bytes");
    if (nic.mrs.size() >= profile.max_mrs)
        refuse_with(ENOSPC, "no more than " + std::to_string(profile.max_mrs) + " registrations");
    std::uint64_t rkey = 0;
    do {
        rkey = world_->random() >> 1;
    } while (nic.mrs.contains(rkey));
    const Mr mr{.id = world_->next_id++,
                .base = static_cast<std::byte*>(base),
                .nbytes = nbytes,
                .remote_base = profile.virtual_addresses ? reinterpret_cast<std::uint64_t>(base) : 0};
    nic.mrs.emplace(rkey, mr);
    return std::make_unique<FakeMemory>(world_, id_, rkey, mr);
}

PeerAddress FakeNic::insert_peer(std::span<const std::byte> address) {
    const Use use(*this, kPosting);
    auto& nic = state();
    auto refuse_with = [&](int fi_errno, const std::string& why) {
        auto error = world_->error_of(nic, "fi_av_insert", fi_errno, why);
        throw Error(ErrorKind::kUnreachable, "fi_av_insert failed on " + info_.domain + ": " + error.text, error);
    };
    WireAddress wire{};
    if (address.size() != sizeof wire)
        refuse_with(EINVAL, "addresses have 16 bytes, not " + std::to_string(address.size()));
    std::memcpy(&wire, address.data(), sizeof wire);
    if (wire.magic != world_->magic || wire.nic >= world_->nics.size())
        refuse_with(EADDRNOTAVAIL, "no such NIC in this fabric");
    if (const int fi_errno = world_->call_fails(Call::kInsert, id_)) refuse_with(fi_errno, "failed by a fault");
    const auto peer = static_cast<NicId>(wire.nic);
    world_->broken.erase({id_, peer});
    nic.peers.push_back(peer);
    return nic.peers.size() - 1;
}

void FakeNic::remove_peer(PeerAddress peer) {
    const Use use(*this, kPosting);
    auto& peers = state().peers;
    if (peer >= peers.size() || peers[peer] == kAnyNic)
        world_->misused(state(), "removed a peer that is not in the address table");
    else
        peers[peer] = kAnyNic;
}

PostResult FakeNic::refuse(const char* op, int fi_errno, const std::string& why, bool misuse) {
    if (misuse) world_->misused(state(), std::string(op) + ": " + why);
    post_error_ = world_->error_of(state(), op, fi_errno, why);
    return PostResult::kFailed;
}

const Mr* FakeNic::local_mr(void* desc, const void* data, std::uint64_t nbytes) {
    const auto* begin = static_cast<const std::byte*>(data);
    for (const auto& [rkey, mr] : state().mrs)
        if (mr.id == reinterpret_cast<std::uint64_t>(desc) && begin >= mr.base && begin + nbytes <= mr.base + mr.nbytes)
            return &mr;
    return nullptr;
}

// Parts that continue each other on a side are one place there.
bool FakeNic::within_limits(std::span<const WritePart> parts) const {
    std::size_t sources = 1, targets = 1;
    for (std::size_t i = 1; i < parts.size(); ++i) {
        const auto &one = parts[i - 1], &next = parts[i];
        sources += static_cast<const std::byte*>(one.src) + one.nbytes != next.src || one.local_desc != next.local_desc;
        targets += one.dst + one.nbytes != next.dst || one.rkey != next.rkey;
    }
    return !parts.empty() && parts.size() <= kMaxParts && sources <= info_.iov_limit && targets <= info_.rma_iov_limit;
}

PostResult FakeNic::post(Op op, PeerAddress peer, std::span<const WritePart> parts) {
    auto& nic = state();
    const char* name = op.view.kind == OpKind::kWrite ? "write" : op.view.kind == OpKind::kRead ? "read" : "send";
    if (!op.context) return refuse(name, EINVAL, "no context", true);
    if (nic.gone) return refuse(name, ENODEV, "this NIC was killed or closed", nic.closed);
    if (peer >= nic.peers.size() || nic.peers[peer] == kAnyNic) return refuse(name, EINVAL, "no such peer", true);
    if (op.view.nbytes > info_.max_msg_bytes) return refuse(name, EMSGSIZE, "longer than max_msg_bytes", false);
    if (!within_limits(parts)) return refuse(name, EINVAL, "more places than one operation may have", true);
    for (const auto& part : parts) {
        const Mr* mr = nullptr;
        if (info_.local_mr && part.nbytes) {
            mr = local_mr(part.local_desc, part.src, part.nbytes);
            if (!mr) return refuse(name, EINVAL, "the source is not within the registration of local_desc", true);
        }
        op.parts.push_back({.source = static_cast<const std::byte*>(part.src),
                            .nbytes = part.nbytes,
                            .dst_address = part.dst,
                            .rkey = part.rkey,
                            .local_mr = mr ? mr->id : 0});
    }
    if (nic.storm == 0 && world_->percent(nic.profile.eagain_percent))
        nic.storm = 1 + static_cast<unsigned>(world_->below(nic.profile.eagain_polls));
    const bool refused = world_->refused.contains({id_, nic.peers[peer]});
    if (refused || nic.frozen || nic.storm || nic.tx_used >= nic.profile.tx_depth) {
        ++world_->stats.again;
        return PostResult::kAgain;
    }
    if (const int fi_errno = world_->call_fails(Call::kPost, id_))
        return refuse(name, fi_errno, "failed by a fault", false);
    if (!nic.contexts.insert(op.context).second) return refuse(name, EINVAL, "the context is in use", true);

    op.view.id = world_->stats.posts++;
    op.view.src = id_;
    op.view.dst = nic.peers[peer];
    op.checksum = checksum_of(op.parts);
    op.target.due = world_->clock + world_->below(nic.profile.max_delay + 1);
    op.back.due = world_->clock + world_->below(3 * nic.profile.max_delay + 1);
    op.early = (op.view.kind == OpKind::kSend || world_->is_ordered(op)) && world_->percent(nic.profile.early_percent);
    op.back_after = static_cast<Step>(static_cast<std::uint64_t>(Step::kArrive) + world_->below(4));
    if (op.delivered) {
        op.early = false;
        op.back_after = std::max(op.back_after, Step::kLandLast);
    }
    ++nic.tx_used;
    // A target that sleeps has to poll for this operation where software moves the data.
    if (auto& dst = world_->nics[op.view.dst]; dst.bell && !dst.closed) dst.bell->ring();
    world_->ops.push_back(std::move(op));
    return PostResult::kOk;
}

PostResult FakeNic::post_write(const WriteOp& op) {
    const Use use(*this, kPosting);
    Op posted{};
    const auto dst = op.parts.empty() ? 0 : op.parts.front().dst;
    posted.view = {0, OpKind::kWrite, 0, 0, op.nbytes(), dst, op.has_imm, op.has_imm ? op.imm : 0};
    posted.context = op.context;
    posted.delivered = op.delivered;
    return post(std::move(posted), op.peer, op.parts);
}

PostResult FakeNic::post_read(const ReadOp& op) {
    const Use use(*this, kPosting);
    Op posted{};
    posted.view = {0, OpKind::kRead, 0, 0, op.nbytes, op.src, false, 0};
    posted.local = static_cast<std::byte*>(op.dst);
    posted.context = op.context;
    posted.delivered = true;
    const WritePart part{op.dst, op.local_desc, op.nbytes, op.src, op.rkey};
    return post(std::move(posted), op.peer, {&part, 1});
}

PostResult FakeNic::post_send(const MessageOp& op) {
    const Use use(*this, kPosting);
    Op posted{};
    posted.view = {0, OpKind::kSend, 0, 0, op.nbytes, 0, false, 0};
    posted.context = op.context;
    const WritePart part{op.buffer, op.local_desc, op.nbytes, 0, 0};
    return post(std::move(posted), op.peer, {&part, 1});
}

PostResult FakeNic::post_recv(const MessageOp& op) {
    const Use use(*this, kPosting);
    auto& nic = state();
    if (!op.context) return refuse("recv", EINVAL, "no context", true);
    if (nic.gone) return refuse("recv", ENODEV, "this NIC was killed or closed", nic.closed);
    const Mr* mr = info_.local_mr && op.nbytes ? local_mr(op.local_desc, op.buffer, op.nbytes) : nullptr;
    if (info_.local_mr && op.nbytes && !mr)
        return refuse("recv", EINVAL, "the buffer is not within the registration of local_desc", true);
    if (nic.frozen || nic.rx_used >= nic.profile.rx_depth) {
        ++world_->stats.again;
        return PostResult::kAgain;
    }
    if (!nic.contexts.insert(op.context).second) return refuse("recv", EINVAL, "the context is in use", true);
    ++nic.rx_used;
    nic.receives.push_back({op, mr ? mr->id : 0});
    return PostResult::kOk;
}

void FakeNic::read(const Entry& entry, OpContext* context) {
    auto& nic = state();
    nic.tx_used -= entry.frees_tx;
    nic.rx_used -= entry.receive;
    if (context) nic.contexts.erase(context);
}

int FakeNic::take_completions(std::span<Completion> out) {
    const Use use(*this, kPolling);
    auto& nic = state();
    if (nic.frozen) return 0;
    if (nic.storm) --nic.storm;
    world_->advance(id_);
    std::size_t count = 0;
    while (count < out.size() && !nic.cq.empty()) {
        const auto& entry = nic.cq.front();
        if (entry.failed) break;
        out[count++] = entry.done;
        read(entry, entry.done.context);
        nic.cq.pop_front();
    }
    if (count == 0 && !out.empty() && !nic.cq.empty()) return -1;
    return static_cast<int>(count);
}

bool FakeNic::read_error(FailedCompletion& out) {
    const Use use(*this, kPolling);
    auto& nic = state();
    if (nic.frozen || nic.cq.empty() || !nic.cq.front().failed) return false;
    const auto entry = std::move(nic.cq.front());
    nic.cq.pop_front();
    out = entry.failure;
    read(entry, out.context);
    return true;
}

bool FakeNic::may_sleep() {
    const Use use(*this, kPolling);
    auto& nic = state();
    if (nic.bell) nic.bell->clear();
    return world_->may_sleep(nic);
}

}  // namespace

std::unique_ptr<Nic> make_nic(std::shared_ptr<World> world, NicId id) {
    return std::make_unique<FakeNic>(std::move(world), id);
}

NicId FakeFabric::id_of(const Nic& nic) {
    WireAddress wire{};
    const auto address = nic.address();
    std::memcpy(&wire, address.data(), sizeof wire);
    return static_cast<NicId>(wire.nic);
}

}  // namespace fkv::fake
