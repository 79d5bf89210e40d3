// Tells a forked child from its parent: threads and NICs that were made before the fork belong to the parent alone.
//
// A child that joined such a thread would wait for ever, and one that closed such a NIC would close the parent's.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace fkv {

class ForkGuard {
  public:
    ForkGuard() : made_in_(generation()) {}
    // Whether this process is a child of the one that made this object.
    bool in_child() const { return generation() != made_in_; }

  private:
    static std::uint64_t generation() {
        static std::atomic<std::uint64_t> forks{0};
        [[maybe_unused]] static const int registered = pthread_atfork(nullptr, nullptr, [] { ++forks; });
        return forks.load(std::memory_order_relaxed);
    }

    std::uint64_t made_in_;
};

}  // namespace fkv
