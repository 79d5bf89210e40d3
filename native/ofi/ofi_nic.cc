#include "ofi/ofi_nic.h"

#include <fcntl.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string_view>
#include <thread>

#include "base/clock.h"
#include "ofi/doorbell.h"
#include "ofi/fid.h"
#include "ofi/hang_up.h"
#include "ofi/layers.h"
#include "ofi/neighbours.h"
#include "ofi/registrations.h"
#include "ofi/signals.h"

namespace fkv::ofi {
namespace {

// More operations than this in flight per NIC gain nothing and cost memory for their contexts.
constexpr std::size_t kMaxDepth = 2048;

// Longer names than this are nobody's address: libfabric's own buffers for them have 64 to 256 bytes.
constexpr std::size_t kMaxName = 256;
// What follows it in the name of an shm endpoint names its queue, for shm_open(3).
constexpr std::string_view kShmScheme = "fi_shm://";
// Before connections end that end badly.
constexpr std::int64_t kReadNs = 20 * kMillisecond;   // read for so long
constexpr std::int64_t kNextNs = 250 * kMillisecond;  // where something has come of late, the next comes by then

static_assert(sizeof(OpContext) >= sizeof(fi_context2), "providers may use all of fi_context2");

// What an endpoint needs that stays open after it has left, for its neighbours: neighbours.h.
struct Remains {
    Fid<fid_fabric> fabric{nullptr, Closer{"fabric"}};
    Fid<fid_domain> domain{nullptr, Closer{"domain"}};
    Fid<fid_cq> cq{nullptr, Closer{"completion queue"}};
    Fid<fid_av> av{nullptr, Closer{"address table"}};
    Fid<fid_ep> endpoint{nullptr, Closer{"endpoint"}};
};

class OfiNic final : public Nic {
  public:
    OfiNic(InfoPtr info, bool sleeps);
    ~OfiNic() override;

    void close_endpoint() override { close_endpoint(now_ns() - came_ns_ < kNextNs ? kNextNs : kReadNs); }
    void close_quiet_endpoint() override { close_endpoint(kReadNs); }
    const NicInfo& info() const override { return facts_; }
    std::vector<std::byte> address() const override { return address_; }
    std::unique_ptr<MemoryHandle> register_memory(void* base, std::uint64_t nbytes) override {
        return registrations_->add(base, nbytes);
    }
    std::unique_ptr<MemoryHandle> register_device(const DeviceMemory& memory) override {
        return facts_.device_memory ? registrations_->add_device(memory) : Nic::register_device(memory);
    }
    PeerAddress insert_peer(std::span<const std::byte> address) override;
    void remove_peer(PeerAddress peer) override;
    PostResult post_write(const WriteOp& op) override;
    PostResult post_read(const ReadOp& op) override;
    PostResult post_send(const MessageOp& op) override;
    PostResult post_recv(const MessageOp& op) override;
    OpError last_post_error() const override { return post_error_; }
    int poll(std::span<Completion> out) override;
    bool read_error(FailedCompletion& out) override;
    int wait_fd() const override { return wait_is_hint() ? bell_->fd() : wait_fd_; }
    bool may_sleep() override;
    bool wait_is_hint() const override { return bell_ && bell_->fd() >= 0; }

  private:
    void close_endpoint(std::int64_t read_ns);
    template <typename F, typename Open>
    Fid<F> open(const char* what, Open&& call, const std::string& hint = {});
    void open_cq();
    void check_peer_address(std::span<const std::byte> address) const;
    template <typename Call>
    PostResult post(const char* op, PeerAddress peer, Call&& call);
    void await_connections();
    // Whether rxm may read what has come in on a connection after it has freed that.
    bool ends_badly() const { return facts_.fail_stop && facts_.nic_checks_keys; }
    void answer_neighbours();
    void leave();
    bool discard(std::size_t max_reads = 64, std::size_t max_empty = 2);
    OpError error(const char* op, int fi_errno, int prov_errno = 0, std::string text = {}) const;

    InfoPtr info_;
    NicInfo facts_;
    const std::shared_ptr<Remains> remains_ = std::make_shared<Remains>();
    Fid<fid_fabric> fabric_;
    Fid<fid_domain> domain_;
    Fid<fid_cq> cq_;
    Fid<fid_av> av_;
    Fid<fid_ep> endpoint_;
    std::vector<std::byte> address_;
    std::array<fi_cq_data_entry, 64> entries_{};
    OpError post_error_;
    std::optional<Neighbour> self_;                        // where addresses are names, as shm's
    std::map<PeerAddress, Neighbour::Closed> neighbours_;  // peers in this process
    std::set<PeerAddress> connecting_;  // the last post to them was refused: they may not know us yet
    std::unique_ptr<Doorbell> bell_;    // where peers are of this host and the provider has no descriptor
    int wait_fd_ = -1;
    std::int64_t came_ns_ = 0;  // when the last completions came, where a connection ends badly after that
    std::unique_ptr<Registrations> registrations_;
    std::set<void*> receive_descs_;  // of all receives that were ever posted
};

NicInfo facts_of(const fi_info& info) {
    NicInfo facts{};
    const auto mr_mode = static_cast<std::uint64_t>(info.domain_attr->mr_mode);
    facts.provider = info.fabric_attr->prov_name;
    facts.fabric = info.fabric_attr->name ? info.fabric_attr->name : "";
    facts.domain = info.domain_attr->name ? info.domain_attr->name : "";
    facts.source = source_text(&info);
    facts.max_msg_bytes = info.ep_attr->max_msg_size;
    facts.tx_depth = std::min<std::size_t>(info.tx_attr->size ? info.tx_attr->size : 128, kMaxDepth);
    facts.rx_depth = std::min<std::size_t>(info.rx_attr->size ? info.rx_attr->size : 128, kMaxDepth);
    facts.cq_data_bytes = info.domain_attr->cq_data_size;
    facts.iov_limit = info.tx_attr->iov_limit;
    facts.rma_iov_limit = info.tx_attr->rma_iov_limit;
    facts.link_bps = info.nic && info.nic->link_attr ? info.nic->link_attr->speed : 0;
    facts.virtual_addresses = mr_mode & FI_MR_VIRT_ADDR;
    facts.provider_keys = mr_mode & FI_MR_PROV_KEY;
    facts.local_mr = mr_mode & FI_MR_LOCAL;
    facts.endpoint_mr = mr_mode & FI_MR_ENDPOINT;
    // FI_ORDER_RMA_WAW and a size that covers large writes: fi_endpoint(3). EFA sets the size although its order is 0.
    const std::uint64_t waw = FI_ORDER_WAW | FI_ORDER_RMA_WAW;
    facts.ordered_writes = (info.tx_attr->msg_order & waw) && (info.rx_attr->msg_order & waw) &&
                           info.ep_attr->max_order_waw_size >= info.ep_attr->max_msg_size;
    facts.fail_stop = facts.ordered_writes && Layers().is_fail_stop(info);
    facts.imm_uses_recv = (info.mode | info.rx_attr->mode | info.domain_attr->mode) & FI_RX_CQ_DATA;
    // The NIC has a table of keys where it picks them and wants memory that is there: fi_mr(3). EFA may do without, and
    // carries out writes in software then. A cache keeps closed registrations, see library.cc.
    const char* cache = std::getenv("FI_MR_CACHE_MAX_COUNT");  // NOLINT(concurrency-mt-unsafe)
    facts.nic_checks_keys = facts.provider_keys && (mr_mode & FI_MR_ALLOCATED) &&
                            info.ep_attr->protocol != FI_PROTO_EFA && cache && std::string_view(cache) == "0";
    facts.shared_memory = info.ep_attr->protocol == FI_PROTO_SHM;
    facts.device_memory = info.caps & FI_HMEM;
    facts.dmabuf = facts.device_memory && !FI_VERSION_LT(Library::get().version, kDmabufVersion);
    return facts;
}

// Without what comes after the zero byte that ends an address of the FI_ADDR_STR kind.
std::string name_of(std::span<const std::byte> address) {
    const std::string_view text(reinterpret_cast<const char*>(address.data()), address.size());
    return std::string(text.substr(0, text.find('\0')));
}

// libfabric opens RDMA devices when it is first used, and keeps them. A child by fork() can open endpoints on them as
// well, but their connections never stand.
void refuse_in_fork(const fi_info* info, const NicInfo& facts) {
    const auto opener = Library::get().process;
    if (opener == getpid() || !is_rdma(info)) return;
    OpError detail;
    detail.op = "open";
    detail.provider = facts.provider;
    detail.nic = facts.domain;
    throw Error(ErrorKind::kFabric,
                facts.provider + " NIC " + facts.domain + " cannot be opened in process " + std::to_string(getpid()) +
                    ": it was forked after process " + std::to_string(opener) +
                    " had used libfabric, whose RDMA devices serve only the process that opened them. Hint: start "
                    "processes by spawn, or fork before anything of fabric_kv is used",
                std::move(detail));
}

template <typename F, typename Open>
Fid<F> OfiNic::open(const char* what, Open&& call, const std::string& hint) {
    F* object = nullptr;
    if (const int rc = call(&object)) throw call_failed(what, rc, facts_.provider, facts_.domain, hint);
    return Fid<F>(object, Closer{what});
}

OfiNic::OfiNic(InfoPtr info, bool sleeps)
    : info_(std::move(info)),
      facts_(facts_of(*info_)),
      fabric_(nullptr, Closer{"fabric"}),
      domain_(nullptr, Closer{"domain"}),
      cq_(nullptr, Closer{"completion queue"}),
      av_(nullptr, Closer{"address table"}),
      endpoint_(nullptr, Closer{"endpoint"}) {
    refuse_in_fork(info_.get(), facts_);
    // Else a thread of rxm's puts a new connection in a broken one's place at any time, also between two posts.
    if (facts_.fail_stop) info_->domain_attr->data_progress = FI_PROGRESS_MANUAL;
    info_->tx_attr->size = facts_.tx_depth;
    info_->rx_attr->size = facts_.rx_depth;
    fabric_ = open<fid_fabric>(
        "fi_fabric", [&](fid_fabric** out) { return Library::get().fabric(info_->fabric_attr, out, nullptr); });
    domain_ = open<fid_domain>("fi_domain",
                               [&](fid_domain** out) { return fi_domain(fabric_.get(), info_.get(), out, nullptr); });
    open_cq();
    av_ = open<fid_av>("fi_av_open", [&](fid_av** out) {
        fi_av_attr attr{};
        attr.type = info_->domain_attr->av_type == FI_AV_UNSPEC ? FI_AV_TABLE : info_->domain_attr->av_type;
        return fi_av_open(domain_.get(), &attr, out, nullptr);
    });
    endpoint_ = open<fid_ep>("fi_endpoint", [&](fid_ep** out) {
        const EndpointSignals kept_signals;
        return fi_endpoint(domain_.get(), info_.get(), out, nullptr);
    });
    auto check = [&](const char* op, int rc) {
        if (rc) throw call_failed(op, rc, facts_.provider, facts_.domain);
    };
    check("fi_ep_bind(cq)", fi_ep_bind(endpoint_.get(), &cq_->fid, FI_TRANSMIT | FI_RECV));
    check("fi_ep_bind(av)", fi_ep_bind(endpoint_.get(), &av_->fid, 0));
    check("fi_enable", fi_enable(endpoint_.get()));
    registrations_ = std::make_unique<Registrations>(facts_, *info_->domain_attr, domain_.get(), endpoint_.get());
    std::size_t size = 0;
    int rc = fi_getname(&endpoint_->fid, nullptr, &size);
    if (rc && rc != -FI_ETOOSMALL) check("fi_getname", rc);
    address_.resize(size);
    check("fi_getname", fi_getname(&endpoint_->fid, address_.data(), &size));
    address_.resize(size);
    if (info_->addr_format == FI_ADDR_STR) self_.emplace(name_of(address_));
    if (facts_.shared_memory && !facts_.wait_fd) bell_ = std::make_unique<Doorbell>(name_of(address_), sleeps);
}

// Its registrations close before what is handed over here.
OfiNic::~OfiNic() {
    remains_->fabric = std::move(fabric_);
    remains_->domain = std::move(domain_);
    remains_->cq = std::move(cq_);
    remains_->av = std::move(av_);
}

void OfiNic::open_cq() {
    fi_cq_attr attr{};
    attr.format = FI_CQ_FORMAT_DATA;
    attr.size = facts_.tx_depth + facts_.rx_depth;
    fid_cq* cq = nullptr;
    // Not every provider has a descriptor to sleep on (shm has none): then the progress thread sleeps by the clock.
    attr.wait_obj = FI_WAIT_FD;
    int rc = fi_cq_open(domain_.get(), &attr, &cq, nullptr);
    facts_.wait_fd = rc == 0;
    if (rc) {
        attr.wait_obj = FI_WAIT_NONE;
        rc = fi_cq_open(domain_.get(), &attr, &cq, nullptr);
    }
    if (rc) throw call_failed("fi_cq_open", rc, facts_.provider, facts_.domain);
    cq_ = Fid<fid_cq>(cq, Closer{"completion queue"});
    if (facts_.wait_fd && fi_control(&cq_->fid, FI_GETWAIT, &wait_fd_) != 0) facts_.wait_fd = false;
}

// What libfabric's address tables take badly. Each of these would harm other peers, so none may reach fi_av_insert.
void OfiNic::check_peer_address(std::span<const std::byte> address) const {
    // Providers read as many bytes as their own addresses have, or up to a zero byte where addresses are names (shm's
    // hold the process id, so their lengths differ): a peer's must not be read past its end.
    const bool names = info_->addr_format == FI_ADDR_STR;
    if (names && (address.empty() || address.size() > kMaxName || address.back() != std::byte{0}))
        throw Error(ErrorKind::kUnreachable, "a peer's NIC address is not a name of up to " + std::to_string(kMaxName) +
                                                 " bytes, which " + facts_.provider +
                                                 " uses. Hint: both sides must open the same provider");
    if (!names && address.size() != address_.size())
        throw Error(ErrorKind::kUnreachable, "a peer's NIC address has " + std::to_string(address.size()) +
                                                 " bytes, but " + facts_.provider + " on " + facts_.domain + " uses " +
                                                 std::to_string(address_.size()) +
                                                 ". Hint: both sides must open the same provider");
    // 1.17 sizes its table by the first address: after one of an unknown family it takes no other.
    const auto format = info_->addr_format;
    const bool sockets = format == FI_SOCKADDR || format == FI_SOCKADDR_IN || format == FI_SOCKADDR_IN6;
    if (sockets && std::memcmp(address.data(), address_.data(), sizeof(sa_family_t)) != 0)
        throw Error(ErrorKind::kUnreachable, "a peer's NIC address is of another address family than that of " +
                                                 facts_.provider + " on " + facts_.domain +
                                                 ". Hint: both sides must use IPv4, or both IPv6");
    if (!names) return;
    const std::string_view theirs(reinterpret_cast<const char*>(address.data()), address.size() - 1);
    const std::string_view ours(reinterpret_cast<const char*>(address_.data()), address_.size());
    const auto scheme = ours.substr(0, ours.find("://") + 3);
    if (!theirs.starts_with(scheme))
        throw Error(ErrorKind::kUnreachable, "a peer's NIC address does not begin with '" + std::string(scheme) +
                                                 "'. Hint: both sides must open the same provider");
    // 1.17 gives a name without shared memory behind it the place of the peer that is inserted next: what is sent to
    // the one arrives at the other, or crashes.
    if (scheme == kShmScheme) {
        const int fd = shm_open(theirs.data() + scheme.size(), O_RDWR, 0);
        if (fd < 0)
            throw Error(ErrorKind::kUnreachable,
                        "nobody is there at a peer's NIC address '" + std::string(theirs) +
                            "': " + std::strerror(errno) +
                            ". Hint: the peer's process has ended, or runs in another container");
        ::close(fd);
    }
}

PeerAddress OfiNic::insert_peer(std::span<const std::byte> address) {
    // Whoever has left before they could meet has removed its name, which is looked for next.
    auto neighbour = self_ ? self_->meet(name_of(address)) : nullptr;
    check_peer_address(address);
    if (neighbour && *neighbour)
        throw Error(ErrorKind::kUnreachable, "the endpoint at a peer's NIC address was closed by this process");
    fi_addr_t peer = FI_ADDR_UNSPEC;
    const int count = fi_av_insert(av_.get(), address.data(), 1, &peer, 0, nullptr);
    if (count != 1 || peer == FI_ADDR_UNSPEC) {
        auto failure =
            call_failed("fi_av_insert", count < 0 ? count : -FI_EADDRNOTAVAIL, facts_.provider, facts_.domain);
        throw Error(ErrorKind::kUnreachable, failure.what(), failure.op());
    }
    if (neighbour) neighbours_[peer] = std::move(neighbour);
    if (bell_) bell_->add(peer, name_of(address));
    return peer;
}

void OfiNic::remove_peer(PeerAddress peer) {
    neighbours_.erase(peer);
    connecting_.erase(peer);
    if (bell_) bell_->remove(peer);
    fi_addr_t address = peer;
    fi_av_remove(av_.get(), &address, 1, 0);
}

OpError OfiNic::error(const char* op, int fi_errno, int prov_errno, std::string text) const {
    if (text.empty()) text = Library::get().strerror(fi_errno);
    return {fi_errno, prov_errno, op, facts_.provider, facts_.domain, std::move(text)};
}

// Runs call(), a libfabric post to `peer`, and says how it went.
template <typename Call>
PostResult OfiNic::post(const char* op, PeerAddress peer, Call&& call) {
    const auto neighbour = neighbours_.empty() ? neighbours_.end() : neighbours_.find(peer);
    const ssize_t rc = self_ && neighbour != neighbours_.end()
                           ? self_->post_to(*neighbour->second, call, static_cast<ssize_t>(-FI_ENOTCONN))
                           : call();
    if (rc == 0) {
        if (!connecting_.empty()) connecting_.erase(peer);
        if (bell_ && peer != FI_ADDR_UNSPEC) bell_->posted(peer);
        return PostResult::kOk;
    }
    if (rc == -FI_EAGAIN) {
        if (peer != FI_ADDR_UNSPEC) connecting_.insert(peer);
        return PostResult::kAgain;
    }
    const bool gone = neighbour != neighbours_.end() && *neighbour->second;
    post_error_ = error(op, static_cast<int>(-rc), 0, gone ? "the peer's endpoint was closed by this process" : "");
    return PostResult::kFailed;
}

// A write's places on both sides, as libfabric wants them: parts that continue each other are one.
struct Places {
    explicit Places(std::span<const WritePart> parts) {
        for (const auto& part : parts) {
            auto* src = const_cast<void*>(part.src);
            if (num_local > 0 && local_end() == src && descs[num_local - 1] == part.local_desc) {
                local[num_local - 1].iov_len += part.nbytes;
            } else {
                descs[num_local] = part.local_desc;
                local[num_local++] = {src, part.nbytes};
            }
            auto* last = num_remote > 0 ? &remote[num_remote - 1] : nullptr;
            if (last && last->addr + last->len == part.dst && last->key == part.rkey)
                last->len += part.nbytes;
            else
                remote[num_remote++] = {part.dst, part.nbytes, part.rkey};
        }
    }
    const void* local_end() const {
        return static_cast<const std::byte*>(local[num_local - 1].iov_base) + local[num_local - 1].iov_len;
    }

    std::array<iovec, kMaxParts> local;
    std::array<void*, kMaxParts> descs;
    std::array<fi_rma_iov, kMaxParts> remote;
    std::size_t num_local = 0, num_remote = 0;
};

PostResult OfiNic::post_write(const WriteOp& op) {
    // verbs;ofi_rxm takes it and fails later, with the connection.
    if (op.nbytes() > facts_.max_msg_bytes) return post("write", op.peer, [] { return -FI_EMSGSIZE; });
    const auto& part = op.parts.front();
    if (op.delivered || op.parts.size() > 1) {
        Places places(op.parts);
        const fi_msg_rma message{places.local.data(),  places.descs.data(), places.num_local, op.peer,
                                 places.remote.data(), places.num_remote,   op.context,       op.imm};
        const std::uint64_t flags =
            FI_COMPLETION | (op.delivered ? FI_DELIVERY_COMPLETE : 0) | (op.has_imm ? FI_REMOTE_CQ_DATA : 0);
        return post("write", op.peer, [&] { return fi_writemsg(endpoint_.get(), &message, flags); });
    }
    if (op.has_imm)
        return post("write", op.peer, [&] {
            return fi_writedata(endpoint_.get(), part.src, part.nbytes, part.local_desc, op.imm, op.peer, part.dst,
                                part.rkey, op.context);
        });
    return post("write", op.peer, [&] {
        return fi_write(endpoint_.get(), part.src, part.nbytes, part.local_desc, op.peer, part.dst, part.rkey,
                        op.context);
    });
}

PostResult OfiNic::post_read(const ReadOp& op) {
    return post("read", op.peer, [&] {
        return fi_read(endpoint_.get(), op.dst, op.nbytes, op.local_desc, op.peer, op.src, op.rkey, op.context);
    });
}

PostResult OfiNic::post_send(const MessageOp& op) {
    if (op.nbytes > facts_.max_msg_bytes) return post("send", op.peer, [] { return -FI_EMSGSIZE; });
    return post("send", op.peer,
                [&] { return fi_send(endpoint_.get(), op.buffer, op.nbytes, op.local_desc, op.peer, op.context); });
}

PostResult OfiNic::post_recv(const MessageOp& op) {
    if (receive_descs_.empty() || *receive_descs_.rbegin() != op.local_desc) receive_descs_.insert(op.local_desc);
    return post("recv", FI_ADDR_UNSPEC, [&] {
        return fi_recv(endpoint_.get(), op.buffer, op.nbytes, op.local_desc, FI_ADDR_UNSPEC, op.context);
    });
}

// Whoever receives an shm endpoint's first words crashes (1.17) if its shared memory is gone by then: it maps that and
// does not look whether it could. So we stay until those whom we spoke to have heard us: from then on they accept a
// post, here a write to nowhere. A peer that is stopped for longer than this is not saved.
void OfiNic::await_connections() {
    constexpr int kTries = 500;
    if (!self_) return;  // elsewhere a connection that breaks off harms nobody
    std::erase_if(connecting_, [&](PeerAddress peer) { return neighbours_.contains(peer); });
    OpContext context;
    for (int tries = 0; tries < kTries && !connecting_.empty(); ++tries) {
        if (tries > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        for (const auto peer : std::set(connecting_)) {
            const fi_msg_rma nothing{nullptr, nullptr, 0, peer, nullptr, 0, &context, 0};
            if (post("write", peer, [&] { return fi_writemsg(endpoint_.get(), &nothing, FI_COMPLETION); }) ==
                PostResult::kFailed)
                connecting_.erase(peer);
        }
    }
}

// What our neighbours have posted to us is answered, since behind what is not nothing completes at them any more. A
// poll stops at each command whose key it refuses, and the queue holds one for each receive.
void OfiNic::answer_neighbours() {
    if (self_ && self_->retire()) discard(facts_.rx_depth, facts_.rx_depth);
}

void OfiNic::leave() {
    if (!self_) return endpoint_.reset();
    // Closing does that, too; but nobody is to find one that is only kept.
    const auto name = name_of(address_);
    if (name.starts_with(kShmScheme)) shm_unlink(name.c_str() + kShmScheme.size());
    if (self_->leave(remains_))
        remains_->endpoint = std::move(endpoint_);
    else
        endpoint_.reset();
}

// Reads until nothing has come so many times in a row. Whether anything did.
bool OfiNic::discard(std::size_t max_reads, std::size_t max_empty) {
    bool any = false;
    for (std::size_t reads = 0, empty = 0; reads < max_reads && empty < max_empty; ++reads) {
        fi_cq_err_entry error{};
        const auto n = fi_cq_read(cq_.get(), entries_.data(), entries_.size());
        empty = n == -FI_EAGAIN ? empty + 1 : 0;
        if (n == -FI_EAVAIL) fi_cq_readerr(cq_.get(), &error, 0);
        any |= n > 0;
    }
    return any;
}

// `read_ns`: for so long it reads before connections end that end badly.
void OfiNic::close_endpoint(std::int64_t read_ns) {
    if (!endpoint_) return;
    await_connections();
    answer_neighbours();
    // rxm crashes when one of its own messages (a credit) is still unread as its connection closes: read first.
    discard();
    // On verbs it crashes when something comes in while a connection closes. Without its key no peer writes data any
    // more: the first that tries breaks its connection, and with that what it has posted behind. rxm looks at the
    // descriptors of receives as long as messages come, so these registrations stay. Peers that ping us go on with it:
    // right after a ping is the time to close.
    if (ends_badly()) {
        registrations_->close_all(receive_descs_);
        const auto begin = now_ns(), until = begin + read_ns;
        for (auto now = begin; now < until; now = now_ns()) {
            if (discard() && now > begin + kReadNs) break;
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        discard();
    }
    // It also crashes when a peer's write has arrived in part, since closing cancels that, but not when the connection
    // ends by itself: end it ourselves, and let it notice. What is in the kernel's buffers is still taken in.
    for (int tries = 0; tries < 200 && hang_up(facts_.wait_fd ? wait_fd_ : -1) > 0; ++tries) {
        discard();
        if (tries > 10) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    leave();
}

int OfiNic::poll(std::span<Completion> out) {
    // rxm reports errors of a closed endpoint, but crashes when asked what they mean.
    if (!endpoint_) return 0;
    const auto n = fi_cq_read(cq_.get(), entries_.data(), std::min(out.size(), entries_.size()));
    if (n == -FI_EAGAIN) return 0;
    if (n < 0) return -1;
    if (ends_badly()) came_ns_ = now_ns();
    for (ssize_t i = 0; i < n; ++i) {
        const auto& entry = entries_[i];
        auto& completion = out[i];
        // Whoever sends a message may add data to it, which we do not: it is a message all the same, and has used up
        // the receive of one.
        const bool message = (entry.flags & FI_RECV) && !(entry.flags & FI_REMOTE_WRITE);
        completion.has_imm = (entry.flags & FI_REMOTE_CQ_DATA) && !message;
        completion.imm = static_cast<std::uint32_t>(entry.data);  // providers may hand over 64 bits: keep 32
        completion.nbytes = entry.len;
        completion.context = static_cast<OpContext*>(entry.op_context);
        if (completion.has_imm)
            completion.kind = Completion::kRemoteWrite;
        else
            completion.kind = message ? Completion::kReceived : Completion::kSent;
        // Only where an immediate uses up a receive is its context ours: elsewhere it is stale or null.
        if (completion.has_imm && !facts_.imm_uses_recv) completion.context = nullptr;
    }
    return static_cast<int>(n);
}

bool OfiNic::read_error(FailedCompletion& out) {
    if (!endpoint_) return false;
    fi_cq_err_entry entry{};
    const auto n = fi_cq_readerr(cq_.get(), &entry, 0);
    if (n <= 0) return false;
    char buffer[256] = {};
    const char* text = fi_cq_strerror(cq_.get(), entry.prov_errno, entry.err_data, buffer, sizeof buffer);
    // A peer that leaves in the middle of writing to us is reported like this by net, and by tcp of 2.x.
    out.inbound = entry.flags & (FI_REMOTE_WRITE | FI_REMOTE_READ);
    out.context = out.inbound ? nullptr : static_cast<OpContext*>(entry.op_context);
    const int fi_errno = std::abs(entry.err);  // shm reports a message that is too long with -FI_ETRUNC
    std::string words = Library::get().strerror(fi_errno);
    if (text && *text && words != text) words += std::string(" / ") + text;
    const char* op = out.inbound             ? "remote write"
                     : entry.flags & FI_RECV ? "recv"
                     : entry.flags & FI_SEND ? "send"
                     : entry.flags & FI_READ ? "read"
                                             : "write";
    out.error = error(op, fi_errno, entry.prov_errno, words);
    return true;
}

bool OfiNic::may_sleep() {
    // What rang may not have been seen yet.
    if (wait_is_hint()) return !bell_->clear();
    fid* object = &cq_->fid;
    return fi_trywait(fabric_.get(), &object, 1) == 0;
}

}  // namespace

std::unique_ptr<Nic> open_nic(InfoPtr info, bool sleeps) { return std::make_unique<OfiNic>(std::move(info), sleeps); }

}  // namespace fkv::ofi
