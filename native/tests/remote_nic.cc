#include "remote_nic.h"

#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <utility>

#include "remote_wire.h"

extern char** environ;

namespace fkv::test {
namespace {

int crashes_in_close = 0;

class Client;

class RemoteMemoryHandle final : public MemoryHandle {
  public:
    RemoteMemoryHandle(Client& client, const Reply& reply) : client_(client), reply_(reply) {}
    ~RemoteMemoryHandle() override { close(); }
    bool close() override;
    RemoteMemoryHandle(const RemoteMemoryHandle&) = delete;
    RemoteMemoryHandle& operator=(const RemoteMemoryHandle&) = delete;
    std::uint64_t remote_base() const override { return reply_.base; }
    std::uint64_t rkey() const override { return reply_.rkey; }
    void* local_desc() const override { return reinterpret_cast<void*>(reply_.desc); }

  private:
    Client& client_;
    Reply reply_;
    bool closed_ = false;
};

class Client final : public RemoteNic {
  public:
    Client(const std::string& provider, const std::string& nic, const Arena& arena);
    ~Client() override;
    Client(const Client&) = delete;
    Client& operator=(const Client&) = delete;

    void close_endpoint() override { call({.ask = Ask::kClose}); }
    const NicInfo& info() const override { return info_; }
    std::vector<std::byte> address() const override { return address_; }
    std::unique_ptr<MemoryHandle> register_memory(void* base, std::uint64_t nbytes) override {
        return std::make_unique<RemoteMemoryHandle>(
            *this, call({.ask = Ask::kRegister, .offset = offset(base), .nbytes = nbytes}));
    }
    void deregister(std::uint64_t handle) { call({.ask = Ask::kDeregister, .offset = handle}); }
    PeerAddress insert_peer(std::span<const std::byte> address) override {
        Request request{.ask = Ask::kInsert, .nbytes = std::min(address.size(), sizeof request.bytes)};
        std::copy_n(address.begin(), request.nbytes, request.bytes);
        return call(request).handle;
    }
    void remove_peer(PeerAddress peer) override { call({.ask = Ask::kRemove, .peer = peer}); }
    PostResult post_write(const WriteOp& op) override {
        Request request{.ask = Ask::kWrite,
                        .peer = op.peer,
                        .context = number(op.context),
                        .has_imm = op.has_imm,
                        .delivered = op.delivered,
                        .imm = op.imm};
        for (const auto& part : op.parts)
            request.parts[request.num_parts++] = {offset(part.src), number(part.local_desc), part.nbytes, part.dst,
                                                  part.rkey};
        return post(request);
    }
    PostResult post_read(const ReadOp& op) override {
        return post({.ask = Ask::kRead,
                     .offset = offset(op.dst),
                     .nbytes = op.nbytes,
                     .desc = number(op.local_desc),
                     .peer = op.peer,
                     .dst = op.src,
                     .rkey = op.rkey,
                     .context = number(op.context)});
    }
    PostResult post_send(const MessageOp& op) override {
        return post({.ask = Ask::kSend,
                     .offset = offset(op.buffer),
                     .nbytes = op.nbytes,
                     .desc = number(op.local_desc),
                     .peer = op.peer,
                     .context = number(op.context)});
    }
    PostResult post_recv(const MessageOp& op) override {
        return post({.ask = Ask::kRecv,
                     .offset = offset(op.buffer),
                     .nbytes = op.nbytes,
                     .desc = number(op.local_desc),
                     .context = number(op.context)});
    }
    OpError last_post_error() const override { return post_error_; }
    int poll(std::span<Completion> out) override;
    bool read_error(FailedCompletion& out) override;
    int wait_fd() const override { return -1; }
    bool may_sleep() override { return false; }

    bool alive() const override { return !dead_; }
    void stop() override;
    void go_on() override;
    void kill_now() override;

  private:
    static std::uint64_t number(const void* pointer) { return reinterpret_cast<std::uint64_t>(pointer); }
    std::uint64_t offset(const void* pointer) const {
        return pointer ? static_cast<std::uint64_t>(static_cast<const std::byte*>(pointer) - base_) : 0;
    }
    Reply call(const Request& request);
    PostResult post(const Request& request);
    OpError error_of(const Reply& reply) const {
        return {reply.fi_errno, reply.prov_errno, reply.op.bytes, info_.provider, info_.domain, reply.text.bytes};
    }

    const std::byte* base_;
    int socket_ = -1;
    pid_t pid_ = -1;
    bool stopped_ = false, dead_ = false;
    NicInfo info_{};
    std::vector<std::byte> address_;
    OpError post_error_;
};

bool RemoteMemoryHandle::close() {
    if (!std::exchange(closed_, true)) client_.deregister(reply_.handle);
    return true;
}

Client::Client(const std::string& provider, const std::string& nic, const Arena& arena) : base_(arena.base()) {
    int sockets[2];
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets))
        throw Error(ErrorKind::kInternal, "socketpair failed");
    socket_ = sockets[0];
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    // Onto itself: that clears close-on-exec.
    for (const int fd : {sockets[1], arena.fd()}) posix_spawn_file_actions_adddup2(&actions, fd, fd);
    std::string words[] = {
        "nic",    kFlag, std::to_string(sockets[1]), std::to_string(arena.fd()), std::to_string(arena.size()),
        provider, nic};
    std::vector<char*> argv;
    for (auto& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    const int rc = ::posix_spawn(&pid_, "/proc/self/exe", &actions, nullptr, argv.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    ::close(sockets[1]);
    if (rc) throw Error(ErrorKind::kInternal, std::string("posix_spawn failed: ") + std::strerror(rc));
    try {
        const auto reply = call({.ask = Ask::kHello});
        if (dead_) throw Error(ErrorKind::kInternal, "the process that has the NIC crashed at once");
        info_ = {.provider = reply.provider.bytes,
                 .fabric = "",
                 .domain = reply.domain.bytes,
                 .source = "",
                 .max_msg_bytes = reply.max_msg_bytes,
                 .tx_depth = reply.tx_depth,
                 .rx_depth = reply.rx_depth,
                 .cq_data_bytes = reply.cq_data_bytes,
                 .iov_limit = reply.iov_limit,
                 .rma_iov_limit = reply.rma_iov_limit,
                 .link_bps = 0,
                 .virtual_addresses = reply.virtual_addresses,
                 .provider_keys = reply.provider_keys,
                 .local_mr = reply.local_mr,
                 .endpoint_mr = reply.endpoint_mr,
                 .ordered_writes = reply.ordered_writes,
                 .imm_uses_recv = reply.imm_uses_recv,
                 .wait_fd = false};
        address_.assign(reply.bytes, reply.bytes + reply.num_bytes);
    } catch (...) {
        kill_now();
        ::close(socket_);
        throw;
    }
}

Client::~Client() {
    if (stopped_) go_on();
    ::close(socket_);  // it leaves by itself
    if (!dead_) ::waitpid(pid_, nullptr, 0);
}

Reply Client::call(const Request& request) {
    Reply reply{};
    if (stopped_ || dead_) return reply;
    if (::send(socket_, &request, sizeof request, MSG_NOSIGNAL) != sizeof request ||
        ::recv(socket_, &reply, sizeof reply, 0) != sizeof reply) {
        kill_now();  // it has crashed: buries it
        crashes_in_close += request.ask == Ask::kClose;
        return Reply{.result = request.ask == Ask::kPoll ? 0 : static_cast<int>(PostResult::kFailed)};
    }
    if (reply.result == -1 && request.ask != Ask::kPoll) throw Error(reply.kind, reply.text.bytes, error_of(reply));
    return reply;
}

PostResult Client::post(const Request& request) {
    if (stopped_ || dead_) return PostResult::kFailed;
    const auto reply = call(request);
    const auto result = static_cast<PostResult>(reply.result);
    if (result == PostResult::kFailed) post_error_ = error_of(reply);
    return result;
}

int Client::poll(std::span<Completion> out) {
    const auto reply = call({.ask = Ask::kPoll});
    for (int i = 0; i < reply.result; ++i) out[i] = reply.done[i];
    return reply.result;
}

bool Client::read_error(FailedCompletion& out) {
    const auto reply = call({.ask = Ask::kReadError});
    if (reply.result != 1 || dead_) return false;
    out = {reinterpret_cast<OpContext*>(reply.context), error_of(reply), reply.inbound};
    return true;
}

void Client::stop() {
    ::kill(pid_, SIGSTOP);
    ::waitpid(pid_, nullptr, WUNTRACED);
    stopped_ = true;
}

void Client::go_on() {
    ::kill(pid_, SIGCONT);
    stopped_ = false;
}

void Client::kill_now() {
    if (dead_) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    dead_ = true;
}

}  // namespace

int num_crashes_in_close() { return crashes_in_close; }

std::unique_ptr<RemoteNic> open_remote_nic(const std::string& provider, const std::string& nic, const Arena& arena) {
    return std::make_unique<Client>(provider, nic, arena);
}

}  // namespace fkv::test
