// Memory that two processes may share: an anonymous file, mapped.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <span>
#include <stdexcept>

namespace fkv::test {

class Arena {
  public:
    explicit Arena(std::size_t nbytes) : Arena(create(nbytes), nbytes) {}
    // Maps what another process has created; takes `fd` over.
    Arena(int fd, std::size_t nbytes) : fd_(fd), nbytes_(nbytes) {
        void* base = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (base == MAP_FAILED) throw std::runtime_error("mmap failed");
        base_ = static_cast<std::byte*>(base);
    }
    ~Arena() {
        ::munmap(base_, nbytes_);
        ::close(fd_);
    }
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    int fd() const { return fd_; }
    std::byte* base() const { return base_; }
    std::size_t size() const { return nbytes_; }
    std::span<std::byte> all() const { return {base_, nbytes_}; }

  private:
    static int create(std::size_t nbytes) {
        const int fd = ::memfd_create("fabric_kv_test", MFD_CLOEXEC);
        if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(nbytes))) throw std::runtime_error("memfd_create failed");
        return fd;
    }

    int fd_;
    std::size_t nbytes_;
    std::byte* base_ = nullptr;
};

}  // namespace fkv::test
