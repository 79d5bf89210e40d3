// The process's signal handlers, which libfabric takes for itself here and there.
//
// Threads: one at a time for each class; what other threads do to handlers meanwhile is lost.
#pragma once

#include <csignal>

namespace fkv::ofi {

// Loading: Debian's libfabric brings libinfinipath along, which takes SIGINT, SIGTERM, SIGSEGV and others for itself,
// prints a backtrace and exits. Ctrl-C would not reach Python any more. All handlers stay as they are.
class KeptSignals {
  public:
    KeptSignals();
    ~KeptSignals();
    KeptSignals(const KeptSignals&) = delete;
    KeptSignals& operator=(const KeptSignals&) = delete;

  private:
    static constexpr int kCount = 32;  // real-time signals are left alone
    struct sigaction saved_[kCount]{};
    bool known_[kCount] = {};
};

// Opening an endpoint: shm (1.17) takes SIGINT, SIGTERM, SIGSEGV and SIGBUS each time. Its handler removes the queues
// of the process from /dev/shm and goes on with the handler before it, which after a second endpoint is itself, for
// ever: a process that ignores SIGINT crashed by it, with locks that its peers then waited for. So handlers of the
// process stay; where there is none, and the signal ends it, shm may tidy up, once.
class EndpointSignals {
  public:
    EndpointSignals();
    ~EndpointSignals();
    EndpointSignals(const EndpointSignals&) = delete;
    EndpointSignals& operator=(const EndpointSignals&) = delete;

  private:
    static constexpr int kNumbers[] = {SIGINT, SIGTERM, SIGSEGV, SIGBUS};
    static constexpr int kCount = sizeof kNumbers / sizeof *kNumbers;
    struct sigaction saved_[kCount]{};
};

}  // namespace fkv::ofi
