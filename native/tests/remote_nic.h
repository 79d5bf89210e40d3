// A NIC that lives in a process of its own, driven call by call from the test, so that one thread of one test can play
// two processes: kill one, stop one, and see what the other is told.
//
// The other process is this program again (fork and exec: nothing of libfabric is carried over). Registered memory
// must lie in the arena that both map. Descriptors to sleep on stay there: info().wait_fd is false.
//
// Blocking: every call waits for the answer of the other process, unless that is stopped or dead: then polls find
//           nothing and posts fail.
// Failure:  a process that dies of a call (providers crash) is seen by alive(), nothing is thrown.
#pragma once

#include <sys/types.h>

#include <optional>

#include "arena.h"
#include "fabric/nic.h"

namespace fkv::test {

class RemoteNic : public Nic {
  public:
    virtual bool alive() const = 0;
    virtual void stop() = 0;      // SIGSTOP
    virtual void go_on() = 0;     // SIGCONT
    virtual void kill_now() = 0;  // SIGKILL, and waits until the process is gone
};

// How many such processes have died of closing their endpoint, so far.
int num_crashes_in_close();

// `nic` may be empty. Throws Error as opening it here would.
std::unique_ptr<RemoteNic> open_remote_nic(const std::string& provider, const std::string& nic, const Arena& arena);

// In main(), first of all: serves a NIC if this process was started for that; the exit status then.
std::optional<int> serve_if_asked(int argc, char** argv);

}  // namespace fkv::test
