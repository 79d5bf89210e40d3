// The process that has a remote NIC: does what the test asks, one call at a time.
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "ofi/discover.h"
#include "ofi/ofi_nic.h"
#include "remote_nic.h"
#include "remote_wire.h"

namespace fkv::test {
namespace {

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
    void posted(PostResult result, Reply& reply);
    void write(const Request& request, Reply& reply);

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
    reply.iov_limit = info.iov_limit;
    reply.rma_iov_limit = info.rma_iov_limit;
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

void Server::posted(PostResult result, Reply& reply) {
    reply.result = static_cast<int>(result);
    if (result == PostResult::kFailed) describe(reply, nic_->last_post_error());
}

void Server::write(const Request& request, Reply& reply) {
    std::vector<WritePart> parts;
    for (std::size_t i = 0; i < request.num_parts; ++i) {
        const auto& part = request.parts[i];
        parts.push_back(
            {arena_.base() + part.offset, reinterpret_cast<void*>(part.desc), part.nbytes, part.dst, part.rkey});
    }
    posted(
        nic_->post_write({parts, request.peer, request.has_imm, request.imm, ours(request.context), request.delivered}),
        reply);
}

void Server::answer(const Request& request, Reply& reply) {
    auto* memory = arena_.base() + request.offset;
    auto* desc = reinterpret_cast<void*>(request.desc);
    const auto posted = [&](PostResult result) { this->posted(result, reply); };
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
            return write(request, reply);
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

}  // namespace

std::optional<int> serve_if_asked(int argc, char** argv) {
    if (argc != 7 || std::string(argv[1]) != kFlag) return std::nullopt;
    const rlimit no_core{0, 0};  // this process may well crash
    ::setrlimit(RLIMIT_CORE, &no_core);
    Arena arena(std::stoi(argv[3]), std::stoull(argv[4]));
    return serve(std::stoi(argv[2]), arena, argv[5], argv[6]);
}

}  // namespace fkv::test
