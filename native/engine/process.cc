#include "engine/process.h"

#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string_view>

namespace fkv {
namespace {

// Field 22 of /proc/PID/stat. The second one, the name, may hold blanks and brackets: count from its end.
std::optional<std::uint64_t> start_ticks(std::int64_t pid) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    const auto name_end = text.rfind(')');
    if (name_end == std::string::npos) return {};
    std::istringstream fields(text.substr(name_end + 1));
    std::string skipped;
    for (int field = 3; field < 22; ++field) fields >> skipped;
    std::uint64_t ticks = 0;
    if (!(fields >> ticks)) return {};
    return ticks;
}

// The 32 digits of a boot id as 16 bytes.
std::optional<std::array<std::byte, 16>> boot_id() {
    std::ifstream file("/proc/sys/kernel/random/boot_id");
    std::string text;
    if (!(file >> text)) return {};
    std::erase(text, '-');
    std::array<std::byte, 16> id{};
    if (text.size() != 2 * id.size()) return {};
    for (std::size_t i = 0; i < id.size(); ++i) {
        unsigned value = 0;
        const char* digits = text.data() + 2 * i;
        if (std::from_chars(digits, digits + 2, value, 16).ptr != digits + 2) return {};
        id[i] = static_cast<std::byte>(value);
    }
    return id;
}

}  // namespace

std::optional<ProcessId> this_process() {
    ProcessId process{.pid = getpid()};
    // A /proc of another pid namespace would speak of other processes.
    char self[32] = {};
    if (readlink("/proc/self", self, sizeof self - 1) <= 0 || std::to_string(process.pid) != self) return {};
    struct stat space{};
    const auto boot = boot_id();
    const auto ticks = start_ticks(process.pid);
    if (!boot || !ticks || stat("/proc/self/ns/pid", &space) != 0) return {};
    process.host = *boot;
    process.start_ticks = *ticks;
    const auto inode = static_cast<std::uint64_t>(space.st_ino);
    for (std::size_t i = 0; i < sizeof inode; ++i) process.host[i] ^= static_cast<std::byte>(inode >> (8 * i));
    return process;
}

ProcessWatch::ProcessWatch(const ProcessId& process) {
    if (process.pid <= 0 || process.pid != static_cast<pid_t>(process.pid)) {
        unknown_ = "there is no pid " + std::to_string(process.pid);
        return;
    }
    fd_ = static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(process.pid), 0));
    if (fd_ < 0) {
        exited_ = errno == ESRCH;
        if (!exited_) unknown_ = std::string("pidfd_open failed: ") + std::strerror(errno);
        return;
    }
    // The descriptor holds whoever has that pid now: the peer, or a successor if the peer has ended.
    const auto ticks = start_ticks(process.pid);
    if (ticks)
        exited_ = *ticks != process.start_ticks;
    else if (!exited(0))
        unknown_ = "/proc/" + std::to_string(process.pid) + "/stat cannot be read";
}

ProcessWatch::~ProcessWatch() {
    if (fd_ >= 0) close(fd_);
}

bool ProcessWatch::exited(std::int64_t wait_ns) {
    if (exited_ || !unknown_.empty()) return exited_;
    pollfd fd{fd_, POLLIN, 0};
    wait_ns = std::max<std::int64_t>(wait_ns, 0);
    const timespec wait{wait_ns / 1'000'000'000, wait_ns % 1'000'000'000};
    exited_ = ppoll(&fd, 1, &wait, nullptr) == 1 && (fd.revents & POLLIN);
    return exited_;
}

}  // namespace fkv
