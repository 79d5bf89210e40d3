// Ends the connections behind a completion queue by way of their sockets.
#pragma once

namespace fkv::ofi {

// Shuts down every connected socket that the epoll descriptor `wait_fd` watches, also through further epoll
// descriptors, and says how many there were. Where the provider has no sockets, or the kernel does not tell
// (/proc/self/fdinfo), there are none.
int hang_up(int wait_fd);

}  // namespace fkv::ofi
