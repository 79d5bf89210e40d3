// Engines take leave of each other before one closes: it says goodbye on every link that it has used, behind all that
// it has posted there, and stays until its peers have said the same. Then nothing is on its way in either direction,
// and nothing comes to endpoints that close: rxm crashes of that, on either side (docs/providers.md). Peers also need
// not find out by silence.
//
// Only of peers that are watched is an answer waited for: others may not know us. Of two that close at the same time
// one may wait in vain, until its bound, where the last goodbye is lost with its sender's endpoint.
//
// Whoever hears a goodbye posts nothing more to that peer, and answers once all goodbyes of that peer's group have come
// and its own operations have ended: on every link that it has used itself, at least on one.
//
// Threads: the progress thread only.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "engine/message.h"
#include "engine/peers.h"
#include "engine/sender.h"

namespace fkv {

class Farewell {
  public:
    Farewell(std::uint32_t group, Sender& sender, std::shared_ptr<const Peers> peers)
        : group_(group), sender_(sender), peers_(std::move(peers)) {}

    // False: it makes no sense.
    bool on_goodbye(const FrameHeader& header, std::int64_t now);

    // We close: goodbye to all whom we have posted to, or would have pinged. Until then.
    void begin(std::int64_t until_ns);
    // Says what can be said now. True if anything is over.
    bool step(std::int64_t now);
    // Whether somebody is still to be told, or to be heard.
    bool pending() const { return !open_.empty(); }

  private:
    // A pair of groups that is not through with it.
    struct Open {
        std::shared_ptr<Peer> peer;
        std::uint32_t remote_group;
        std::int64_t until_ns;
    };

    void open(const std::shared_ptr<Peer>& peer, std::uint32_t remote_group, std::int64_t until_ns);
    bool is_over(const Open& open, std::int64_t now);

    const std::uint32_t group_;
    Sender& sender_;
    const std::shared_ptr<const Peers> peers_;
    std::vector<Open> open_;
    bool closing_ = false;
};

}  // namespace fkv
