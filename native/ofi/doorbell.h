// Wakes the owner of a NIC that has no descriptor to sleep on, such as shm's: who posts to it rings.
//
// A bell is an abstract unix datagram socket whose name follows from the NIC's address, so that it needs no exchange
// and leaves nothing behind when its process dies. It is a hint: a ring may be missing (peers in another network
// namespace, a full queue), and anybody on this host may ring. So whoever sleeps by it must look from time to time all
// the same.
//
// Threads:  ring() from the one that posts; clear() from the one that polls.
// Blocking: never.
#pragma once

#include <sys/un.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "fabric/nic.h"

namespace fkv::ofi {

class Doorbell {
  public:
    // Of the NIC at this address. One that never sleeps does not listen: peers then stop ringing.
    Doorbell(std::string_view address, bool listens);
    ~Doorbell();
    Doorbell(const Doorbell&) = delete;
    Doorbell& operator=(const Doorbell&) = delete;

    // Readable when somebody has rung; -1: not listening, or the system has no such socket for us.
    int fd() const { return listens_ ? socket_ : -1; }
    // Takes all rings. False if there were none.
    bool clear();

    void add(PeerAddress peer, std::string_view address);
    void remove(PeerAddress peer) { peers_.erase(peer); }
    // To be called after each post. Rings where the last post is so long ago that the peer may have gone to sleep.
    void posted(PeerAddress peer);

  private:
    struct Peer {
        sockaddr_un name;
        socklen_t name_bytes;
        std::int64_t posted_ns;
    };

    int socket_;
    bool listens_ = false;
    std::map<PeerAddress, Peer> peers_;  // without those that do not listen
};

}  // namespace fkv::ofi
