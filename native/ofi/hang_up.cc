#include "ofi/hang_up.h"

#include <sys/socket.h>

#include <charconv>
#include <fstream>
#include <set>
#include <string>
#include <string_view>
#include <system_error>

namespace fkv::ofi {
namespace {

// Adds what `epoll_fd` watches to `found`, recursively: epoll descriptors nest. proc_pid_fdinfo(5)
void add_watched(int epoll_fd, std::set<int>& found) {
    std::ifstream info("/proc/self/fdinfo/" + std::to_string(epoll_fd));
    for (std::string line; std::getline(info, line);) {
        constexpr std::string_view kLabel = "tfd:";
        if (!line.starts_with(kLabel)) continue;
        const auto digits = line.find_first_not_of(' ', kLabel.size());
        int fd = -1;
        if (digits == std::string::npos ||
            std::from_chars(line.data() + digits, line.data() + line.size(), fd).ec != std::errc{})
            continue;
        if (found.insert(fd).second) add_watched(fd, found);
    }
}

bool is_connected(int fd) {
    sockaddr_storage peer{};
    socklen_t size = sizeof peer;
    return getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) == 0 && peer.ss_family != AF_UNIX;
}

}  // namespace

int hang_up(int wait_fd) {
    std::set<int> watched;
    if (wait_fd >= 0) add_watched(wait_fd, watched);
    int count = 0;
    for (const int fd : watched) {
        if (!is_connected(fd)) continue;
        shutdown(fd, SHUT_RDWR);
        ++count;
    }
    return count;
}

}  // namespace fkv::ofi
