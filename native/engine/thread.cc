#include "engine/thread.h"

#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>

#include "base/error.h"

namespace fkv {
namespace {

constexpr std::size_t kMaxName = 15;  // pthread_setname_np(3)

// The cpus as the kernel wants them. Throws Error(kConfig) for one that this process may not use.
cpu_set_t checked_cpus(const std::vector<int>& cpus) {
    cpu_set_t allowed, set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof allowed, &allowed)) CPU_ZERO(&allowed);
    for (const int cpu : cpus) {
        if (cpu < 0 || cpu >= CPU_SETSIZE || !CPU_ISSET(cpu, &allowed))
            throw Error(ErrorKind::kConfig,
                        "cpu " + std::to_string(cpu) +
                            " is not among the cpus that this process may use (taskset, cgroup cpuset)");
        CPU_SET(cpu, &set);
    }
    return set;
}

}  // namespace

// Named and pinned from here, so that it is so when this returns.
std::thread start_thread(const std::string& name, const std::vector<int>& cpus, std::function<void()> fn) {
    const auto set = checked_cpus(cpus);
    std::thread thread([fn = std::move(fn)] {
        // The default slack of 50 us would double our shortest naps: prctl(2).
        prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);
        fn();
    });
    pthread_setname_np(thread.native_handle(), name.substr(0, kMaxName).c_str());
    if (CPU_COUNT(&set) > 0) pthread_setaffinity_np(thread.native_handle(), sizeof set, &set);
    return thread;
}

}  // namespace fkv
