// Engines take leave of each other before one closes: it says goodbye on every link that it has used, behind all that
// it has posted there, and stays until its peers have said the same. Then nothing is on its way in either direction,
// and nothing comes to endpoints that close: rxm crashes of that, on either side (docs/providers.md). Peers also need
// not find out by silence.
//
// Only of peers that are watched is an answer waited for: others may not know us. They hear it in each pair of groups,
// since each of their groups may be writing to each of ours. Of two that close at the same time one may wait in vain,
// until its bound, where the last goodbye is lost with its sender's endpoint.
//
// Whoever hears a goodbye posts nothing more to that peer, and answers on each link that it has used itself, at least
// on one, once its own operations there have ended and all goodbyes of the pair have come. A link may take nothing, or
// lose what it took: so after a while the answer comes all the same, and who closes gives such a link up.
//
// Threads: the progress thread only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "engine/message.h"
#include "engine/peers.h"
#include "engine/sender.h"

namespace fkv {

class Farewell {
  public:
    // patience_ns: for so long goodbyes on other links are waited for.
    Farewell(std::uint32_t group, std::size_t num_rails, std::int64_t patience_ns, Sender& sender,
             std::shared_ptr<const Peers> peers)
        : group_(group), num_rails_(num_rails), patience_ns_(patience_ns), sender_(sender), peers_(std::move(peers)) {}

    // False: it makes no sense.
    bool on_goodbye(const FrameHeader& header, std::int64_t now);

    // We close: goodbye to all whom we have posted to, or who may be writing to us. Until then.
    void begin(std::int64_t now, std::int64_t until_ns);
    // Says what can be said now. True if anything is over. `holds`: what came before a goodbye was not delivered yet.
    bool step(std::int64_t now, bool holds);
    // Whether somebody is still to be told, or to be heard.
    bool pending() const { return !open_.empty(); }
    // Whether all whom we know have said that nothing more comes; of others nobody can say so.
    bool quiet(std::int64_t now) const;

  private:
    // A pair of groups that is not through with it.
    struct Open {
        std::shared_ptr<Peer> peer;
        std::uint32_t remote_group;
        std::int64_t patient_until_ns;
        std::int64_t until_ns;
    };
    // Those that we have to do with: the Peer, and others of its epoch that were removed.
    using Lives = std::vector<std::shared_ptr<Peer>>;

    void open(const std::shared_ptr<Peer>& peer, std::uint32_t remote_group, std::int64_t now, std::int64_t until_ns);
    bool is_over(const Open& open, std::int64_t now, bool holds);
    // False: on some link it has to be tried again.
    bool say(const Open& open, const Lives& lives, std::int64_t now);
    Lives lives_of(const std::shared_ptr<Peer>& peer) const;
    // Pairs of our rails and those of the peer's group.
    std::size_t num_links(const Peer& peer, std::size_t remote_group) const {
        return std::max(num_rails_, peer.groups[remote_group].size());
    }
    template <typename Is>
    bool any_of(const Lives& lives, std::uint32_t remote_group, std::size_t link, Is&& is) const {
        return std::any_of(lives.begin(), lives.end(), [&](const auto& peer) {
            const auto* found = peer->sides[group_]->find_link(remote_group, link);
            return found && is(*found);
        });
    }
    bool was_used(const Lives& lives, std::uint32_t remote_group, std::size_t link) const;
    bool is_busy(const Lives& lives, std::uint32_t remote_group, std::size_t link) const;
    bool is_busy(const Lives& lives, std::uint32_t remote_group) const;

    const std::uint32_t group_;
    const std::size_t num_rails_;
    const std::int64_t patience_ns_;
    Sender& sender_;
    const std::shared_ptr<const Peers> peers_;
    std::vector<Open> open_;
    bool closing_ = false;
};

}  // namespace fkv
