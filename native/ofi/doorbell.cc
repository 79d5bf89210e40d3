#include "ofi/doorbell.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>

#include "base/clock.h"

namespace fkv::ofi {
namespace {

// A thread looks for so long, at least, after it has found something: engine/rest.cc. Half of it, for what passes
// between its look and ours at the clock.
constexpr std::int64_t kAwakeNs = 20 * kMicrosecond;

constexpr std::string_view kPrefix = "fabric_kv.bell.";

// Abstract: it begins with a zero byte, and ends with its length, unix(7). What is too long is cut at the front, where
// addresses of one process are alike.
socklen_t make_name(std::string_view address, sockaddr_un& name) {
    name = {};
    name.sun_family = AF_UNIX;
    const auto room = sizeof name.sun_path - 1 - kPrefix.size();
    if (address.size() > room) address.remove_prefix(address.size() - room);
    auto* const end = std::copy(kPrefix.begin(), kPrefix.end(), name.sun_path + 1);
    std::copy(address.begin(), address.end(), end);
    return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + kPrefix.size() + address.size());
}

}  // namespace

Doorbell::Doorbell(std::string_view address, bool listens)
    : socket_(::socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)) {
    if (!listens || socket_ < 0) return;
    sockaddr_un name;
    const auto name_bytes = make_name(address, name);
    listens_ = ::bind(socket_, reinterpret_cast<const sockaddr*>(&name), name_bytes) == 0;
}

Doorbell::~Doorbell() {
    if (socket_ >= 0) ::close(socket_);
}

bool Doorbell::clear() {
    bool rung = false;
    // As many as a queue holds, and no more: who rings all the time must not keep us here.
    for (int i = 0; i < 64; ++i) {
        char byte;
        if (::recv(socket_, &byte, sizeof byte, 0) < 0) break;
        rung = true;
    }
    return rung;
}

void Doorbell::add(PeerAddress peer, std::string_view address) {
    if (socket_ < 0) return;
    auto& added = peers_[peer];
    added.name_bytes = make_name(address, added.name);
    added.posted_ns = 0;
}

void Doorbell::posted(PeerAddress peer) {
    const auto it = peers_.find(peer);
    if (it == peers_.end()) return;
    const auto now = now_ns();
    const auto silent_ns = now - it->second.posted_ns;
    it->second.posted_ns = now;
    if (silent_ns < kAwakeNs) return;
    const auto& name = it->second.name;
    if (::sendto(socket_, "", 1, MSG_NOSIGNAL, reinterpret_cast<const sockaddr*>(&name), it->second.name_bytes) < 0 &&
        errno != EAGAIN && errno != EINTR && errno != ENOBUFS)
        peers_.erase(it);
}

}  // namespace fkv::ofi
