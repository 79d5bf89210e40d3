// What a layered provider stands on: rxm makes reliable datagrams out of the connections of another provider.
#pragma once

#include <map>
#include <string>

#include "ofi/library.h"

namespace fkv::ofi {

// Why no immediate would ever arrive through `info`, which offers them; empty: they do. rxm (1.17 to 2.5) offers
// immediates over whatever connects. iWARP's writes have none, and a write with one is answered with EAGAIN for ever.
// `connections` is what the provider beneath offers as connections, a list or null.
std::string why_no_immediates(const fi_info& info, const fi_info* connections);

// Whether a write that fails is told and takes those along that were posted right behind it: the connection beneath is
// an RC queue pair, which acknowledges what has arrived and flushes whatever is behind an error (InfiniBand
// Architecture Specification 1, 10.3.1: the error states). Later ones may go over another connection.
bool is_fail_stop(const fi_info& info, const fi_info* connections);

// The same, asking libfabric; each provider beneath once.
class Layers {
  public:
    ~Layers();
    Layers() = default;
    Layers(const Layers&) = delete;
    Layers& operator=(const Layers&) = delete;

    std::string why_no_immediates(const fi_info& info);
    bool is_fail_stop(const fi_info& info);

  private:
    const fi_info* connections_beneath(const fi_info& info);
    std::map<std::string, fi_info*> connections_;  // by the name of the provider beneath
};

}  // namespace fkv::ofi
