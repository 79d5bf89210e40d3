#include "ofi/limits.h"

#include <sys/resource.h>

#include <cerrno>
#include <fstream>

namespace fkv::ofi {
namespace {

constexpr std::uint64_t kKiB = 1024;

std::string locked_text(const MemoryLimits& limits) {
    std::string text = "the limit on locked memory (RLIMIT_MEMLOCK) is ";
    text += limits.locked_limit_bytes ? std::to_string(*limits.locked_limit_bytes) + " bytes" : "unlimited";
    if (limits.pinned_bytes) text += ", of which " + std::to_string(*limits.pinned_bytes) + " are pinned already";
    return text;
}

}  // namespace

MemoryLimits memory_limits() {
    MemoryLimits limits;
    rlimit locked{};
    if (getrlimit(RLIMIT_MEMLOCK, &locked) == 0 && locked.rlim_cur != RLIM_INFINITY)
        limits.locked_limit_bytes = locked.rlim_cur;
    std::ifstream status("/proc/self/status");
    for (std::string word; status >> word;) {
        std::uint64_t kib = 0;
        if (word == "VmPin:" && status >> kib) {
            limits.pinned_bytes = kib * kKiB;
            break;
        }
    }
    return limits;
}

std::string explain_refusal(const RefusedRegistration& refused) {
    const auto asked = std::to_string(refused.nbytes) + " bytes";
    const auto open = std::to_string(refused.num_open) + " registrations are open on this NIC" +
                      (refused.limit_registrations ? ", whose limit is " + std::to_string(refused.limit_registrations)
                                                   : std::string());
    switch (refused.fi_errno) {
        case ENOMEM:
        case EPERM:
        case EAGAIN:
            if (refused.limits.locked_limit_bytes)
                return asked + " were to be locked; " + locked_text(refused.limits) +
                       ". Hint: it must cover everything registered: ulimit -l unlimited; docker run --ulimit "
                       "memlock=-1; LimitMEMLOCK=infinity in a systemd unit";
            return asked + " were to be locked, and " + locked_text(refused.limits) + "; " + open +
                   ". Hint: the machine or the NIC's tables have no room: register less, or fewer and larger regions";
        case ENOSPC:
        case ENOBUFS:
        case EMFILE:
        case ENFILE:
            return open + "; one more, of " + asked +
                   ", has no room. Hint: register whole caches instead of their parts, or raise the device's limit on "
                   "memory regions";
        case EINVAL:
        case E2BIG:
        case EMSGSIZE:
        case EFBIG:
            return asked +
                   " may be above the NIC's largest registration. Hint: EngineOptions(max_registration_bytes=...) "
                   "splits regions; else the range is not mapped, or not writable";
        case EFAULT:
            return "the range of " + asked + " is not mapped, or not writable";
        default:
            return asked + " were to be registered; " + open + "; " + locked_text(refused.limits);
    }
}

}  // namespace fkv::ofi
