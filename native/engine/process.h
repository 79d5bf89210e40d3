// Which process an engine lives in, and whether that process has ended: pidfd_open(2), proc_pid_stat(5).
//
// Threads:  any.
// Blocking: ProcessWatch::exited() for its wait.
// Failure:  where /proc or the kernel does not tell, there is no identity, and nobody counts as exited.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace fkv {

struct ProcessId {
    // The machine since it was started (boot_id), and the pid namespace: where `pid` means something.
    std::array<std::byte, 16> host{};
    std::int64_t pid = 0;
    std::uint64_t start_ticks = 0;  // since the machine's start; tells it from a later process with that pid

    bool operator==(const ProcessId&) const = default;
};

std::optional<ProcessId> this_process();

// A process of this host, for as long as one waits for its end. It counts as exited once the kernel has ended all its
// threads, so that none of its system calls is under way any more; its parent need not have noticed.
class ProcessWatch {
  public:
    explicit ProcessWatch(const ProcessId& process);
    ~ProcessWatch();
    ProcessWatch(const ProcessWatch&) = delete;
    ProcessWatch& operator=(const ProcessWatch&) = delete;

    // Why the kernel cannot tell; empty if it can.
    const std::string& unknown() const { return unknown_; }
    // Waits for at most `wait_ns`. False where the kernel cannot tell.
    bool exited(std::int64_t wait_ns);

  private:
    int fd_ = -1;
    bool exited_ = false;
    std::string unknown_;
};

}  // namespace fkv
