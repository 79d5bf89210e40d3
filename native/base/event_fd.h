// A Linux eventfd used as a doorbell: ring() wakes whoever polls fd().
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "base/error.h"

namespace fkv {

class EventFd {
  public:
    EventFd() : fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
        if (fd_ < 0)
            throw Error(ErrorKind::kFabric, std::string("eventfd failed: ") + std::strerror(errno) +
                                                ". Hint: raise the limit on open files (ulimit -n)");
    }
    ~EventFd() { ::close(fd_); }
    EventFd(const EventFd&) = delete;
    EventFd& operator=(const EventFd&) = delete;

    int fd() const { return fd_; }

    void ring() {
        const std::uint64_t one = 1;
        // EAGAIN means that the counter is at its maximum: the bell is ringing already.
        [[maybe_unused]] auto n = ::write(fd_, &one, sizeof one);
    }

    void clear() {
        std::uint64_t value;
        [[maybe_unused]] auto n = ::read(fd_, &value, sizeof value);
    }

  private:
    int fd_;
};

}  // namespace fkv
