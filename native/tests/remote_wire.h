// What a test and the process of a remote NIC say to each other: one request, one reply, both of fixed size.
#pragma once

#include <cstdio>
#include <string>

#include "fabric/nic.h"

namespace fkv::test {

constexpr std::size_t kBatch = 16;
constexpr const char* kFlag = "--serve-nic";  // then: socket, arena, its size, provider, NIC

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
    struct Part {
        std::uint64_t offset, desc, nbytes, dst, rkey;
    };
    Part parts[kMaxParts]{};  // of a write
    std::size_t num_parts = 0;
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
    std::uint64_t max_msg_bytes = 0, tx_depth = 0, rx_depth = 0, cq_data_bytes = 0, iov_limit = 0, rma_iov_limit = 0;
    bool virtual_addresses = false, provider_keys = false, local_mr = false, endpoint_mr = false,
         ordered_writes = false, imm_uses_recv = false, inbound = false;
};

}  // namespace fkv::test
