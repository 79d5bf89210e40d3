// Why a NIC may have refused a registration: the limit that applies, its value, and how to raise it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace fkv::ofi {

// What the process may lock and has locked.
struct MemoryLimits {
    std::optional<std::uint64_t> locked_limit_bytes;  // RLIMIT_MEMLOCK; none: unlimited
    std::optional<std::uint64_t> pinned_bytes;        // VmPin in proc_pid_status(5), which RDMA drivers count in
};
MemoryLimits memory_limits();

struct RefusedRegistration {
    int fi_errno;  // positive
    std::uint64_t nbytes;
    std::size_t num_open;             // registrations of this NIC
    std::size_t limit_registrations;  // of its domain: fi_domain(3), mr_cnt; 0: it does not say
    MemoryLimits limits;
};
// A sentence with the numbers, then a hint.
std::string explain_refusal(const RefusedRegistration& refused);

}  // namespace fkv::ofi
