#include "remote_nic.h"

#include <spawn.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <map>

#include "ofi/discover.h"
#include "ofi/ofi_nic.h"

extern char** environ;

namespace fkv::test {
namespace {

constexpr std::size_t kBatch = 16;
constexpr const char* kFlag = "--serve-nic";

enum class Ask : std::uint8_t {
    kHello,
    kRegister,
    kDeregister,
    kInsert,
    kRemove,
    kWrite,
    kRead,
    kSend,
    kRecv,
    kPoll,
    kReadError,
    kClose
};

struct Text {
    char bytes[200];
    void operator=(const std::string& text) { std::snprintf(bytes, sizeof bytes, "%s", text.c_str()); }
};

struct Request {
    Ask ask{};
    std::uint64_t offset = 0, nbytes = 0, desc = 0, peer = 0, dst = 0, rkey = 0, context = 0;
    bool has_imm = false, delivered = false;
    std::uint32_t imm = 0;
    std::byte bytes[256]{};
};

struct Reply {
    int result = 0;  // of polls: how many; of the rest: a PostResult, or -1 for an Error
    ErrorKind kind{};
    std::uint64_t handle = 0, base = 0, rkey = 0, desc = 0, context = 0;
    Completion done[kBatch]{};
    int fi_errno = 0, prov_errno = 0;
    Text op{}, provider{}, domain{}, text{};
    std::size_t num_bytes = 0;
    std::byte bytes[256]{};
    std::uint64_t max_msg_bytes = 0, tx_depth = 0, rx_depth = 0, cq_data_bytes = 0;
    bool virtual_addresses = false, provider_keys = false, local_mr = false, endpoint_mr = false,
         ordered_writes = false, imm_uses_recv = false, inbound = false;
};

// -- the process that has the NIC ------------------------------------------------------------------------------------

class Server {
  public:
    Server(const std::string& provider, const std::string& nic, Arena& arena) : arena_(arena) {
        ofi::NicRequest request{provider, {}};
        if (!nic.empty()) request.nics = {nic};
        nic_ = ofi::open_nic(std::move(ofi::find_nics(request).front()));
    }
    ~Server() {
        nic_->close_endpoint();
        memory_.clear();
    }
    Server(const Server&) = delete;
    Server& operator=(const Server&) = delete;

    void answer(const Request& request, Reply& reply);

  private:
    // What libfabric scribbles in, and the context that the test knows it by.
    struct Context {
        OpContext context{};
        std::uint64_t theirs = 0;
    };
    OpContext* ours(std::uint64_t theirs) {
        auto& context = contexts_[theirs];
        context.theirs = theirs;
        return &context.context;
    }
    static std::uint64_t theirs(OpContext* context) {
        return context ? reinterpret_cast<Context*>(context)->theirs : 0;
    }
    void hello(Reply& reply);

    Arena& arena_;
    std::unique_ptr<Nic> nic_;
    std::map<std::uint64_t, std::unique_ptr<MemoryHandle>> memory_;
    std::map<std::uint64_t, Context> contexts_;
    std::uint64_t next_ = 1;
};

void describe(Reply& reply, const OpError& error) {
    reply.fi_errno = error.fi_errno;
    reply.prov_errno = error.prov_errno;
    reply.op = error.op;
    reply.text = error.text;
}

void Server::hello(Reply& reply) {
    const auto& info = nic_->info();
    reply.provider = info.provider;
    reply.domain = info.domain;
    reply.max_msg_bytes = info.max_msg_bytes;
    reply.tx_depth = info.tx_depth;
    reply.rx_depth = info.rx_depth;
    reply.cq_data_bytes = info.cq_data_bytes;
    reply.virtual_addresses = info.virtual_addresses;
    reply.provider_keys = info.provider_keys;
    reply.local_mr = info.local_mr;
    reply.endpoint_mr = info.endpoint_mr;
    reply.ordered_writes = info.ordered_writes;
    reply.imm_uses_recv = info.imm_uses_recv;
    const auto address = nic_->address();
    reply.num_bytes = std::min(address.size(), sizeof reply.bytes);
    std::memcpy(reply.bytes, address.data(), reply.num_bytes);
}

void Server::answer(const Request& request, Reply& reply) {
    auto* memory = arena_.base() + request.offset;
    auto* desc = reinterpret_cast<void*>(request.desc);
    auto posted = [&](PostResult result) {
        reply.result = static_cast<int>(result);
        if (result == PostResult::kFailed) describe(reply, nic_->last_post_error());
    };
    switch (request.ask) {
        case Ask::kHello:
            return hello(reply);
        case Ask::kRegister: {
            auto handle = nic_->register_memory(memory, request.nbytes);
            reply.handle = next_++;
            reply.base = handle->remote_base();
            reply.rkey = handle->rkey();
            reply.desc = reinterpret_cast<std::uint64_t>(handle->local_desc());
            memory_[reply.handle] = std::move(handle);
            return;
        }
        case Ask::kDeregister:
            memory_.erase(request.offset);
            return;
        case Ask::kInsert:
            reply.handle = nic_->insert_peer({request.bytes, request.nbytes});
            return;
        case Ask::kRemove:
            return nic_->remove_peer(request.peer);
        case Ask::kWrite:
            return posted(nic_->post_write({memory, desc, request.nbytes, request.peer, request.dst, request.rkey,
                                            request.has_imm, request.imm, ours(request.context), request.delivered}));
        case Ask::kRead:
            return posted(nic_->post_read(
                {memory, desc, request.nbytes, request.peer, request.dst, request.rkey, ours(request.context)}));
        case Ask::kSend:
            return posted(nic_->post_send({memory, desc, request.nbytes, request.peer, ours(request.context)}));
        case Ask::kRecv:
            return posted(nic_->post_recv({memory, desc, request.nbytes, 0, ours(request.context)}));
        case Ask::kPoll:
            reply.result = nic_->poll(reply.done);
            for (int i = 0; i < reply.result; ++i)
                reply.done[i].context = reinterpret_cast<OpContext*>(theirs(reply.done[i].context));
            return;
        case Ask::kReadError: {
            FailedCompletion failure;
            reply.result = nic_->read_error(failure);
            if (!reply.result) return;
            reply.context = theirs(failure.context);
            reply.inbound = failure.inbound;
            return describe(reply, failure.error);
        }
        case Ask::kClose:
            return nic_->close_endpoint();
    }
}

int serve(int socket, Arena& arena, const std::string& provider, const std::string& nic) {
    std::unique_ptr<Server> server;
    Request request;
    while (::recv(socket, &request, sizeof request, 0) == sizeof request) {
        Reply reply;
        try {
            if (!server) server = std::make_unique<Server>(provider, nic, arena);
            server->answer(request, reply);
        } catch (const Error& error) {
            reply.result = -1;
            reply.kind = error.kind();
            describe(reply, error.op());
            reply.text = error.what();
        }
        if (::send(socket, &reply, sizeof reply, MSG_NOSIGNAL) != sizeof reply) return 1;
    }
    return 0;
}

// -- the process that has the test -----------------------------------------------------------------------------------

int crashes_in_close = 0;

class Client;

class RemoteMemoryHandle final : public MemoryHandle {
  public:
    RemoteMemoryHandle(Client& client, const Reply& reply) : client_(client), reply_(reply) {}
    ~RemoteMemoryHandle() override;
    RemoteMemoryHandle(const RemoteMemoryHandle&) = delete;
    RemoteMemoryHandle& operator=(const RemoteMemoryHandle&) = delete;
    std::uint64_t remote_base() const override { return reply_.base; }
    std::uint64_t rkey() const override { return reply_.rkey; }
    void* local_desc() const override { return reinterpret_cast<void*>(reply_.desc); }

  private:
    Client& client_;
    Reply reply_;
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
        return post({.ask = Ask::kWrite,
                     .offset = offset(op.src),
                     .nbytes = op.nbytes,
                     .desc = number(op.local_desc),
                     .peer = op.peer,
                     .dst = op.dst,
                     .rkey = op.rkey,
                     .context = number(op.context),
                     .has_imm = op.has_imm,
                     .delivered = op.delivered,
                     .imm = op.imm});
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

RemoteMemoryHandle::~RemoteMemoryHandle() { client_.deregister(reply_.handle); }

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
                 .iov_limit = 1,
                 .rma_iov_limit = 1,
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

std::optional<int> serve_if_asked(int argc, char** argv) {
    if (argc != 7 || std::string(argv[1]) != kFlag) return std::nullopt;
    const rlimit no_core{0, 0};  // this process may well crash
    ::setrlimit(RLIMIT_CORE, &no_core);
    Arena arena(std::stoi(argv[3]), std::stoull(argv[4]));
    return serve(std::stoi(argv[2]), arena, argv[5], argv[6]);
}

}  // namespace fkv::test
