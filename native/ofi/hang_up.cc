#include "ofi/hang_up.h"

#include <sys/socket.h>

#include <cstdio>
#include <fstream>
#include <set>
#include <string>

namespace fkv::ofi {
namespace {

// Adds what `epoll_fd` watches to `found`, recursively: epoll descriptors nest. proc_pid_fdinfo(5)
void add_watched(int epoll_fd, std::set<int>& found) {
    std::ifstream info("/proc/self/fdinfo/" + std::to_string(epoll_fd));
    for (std::string line; std::getline(info, line);) {
        int fd = -1;
        if (std::sscanf(line.c_str(), "tfd: %d", &fd) == 1 && found.insert(fd).second) add_watched(fd, found);
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
