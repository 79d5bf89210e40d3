#include "engine/farewell.h"

#include <algorithm>

namespace fkv {
namespace {

constexpr std::int64_t kAnswerNs = 5 * kSecond;  // for so long we try to answer: they do not wait that long

}  // namespace

bool Farewell::on_goodbye(const FrameHeader& header, std::int64_t now) {
    const auto peer = peers_->find(header.sender);
    if (!peer) return true;  // it has nothing to fear from us
    const auto remote_group = header.message_id >> 32, links = header.message_id & 0xffffffff;
    if (remote_group >= peer->groups.size() || links == 0) return false;
    auto& goodbye = peer->sides[group_]->goodbyes[remote_group];
    goodbye.expected = links;
    ++goodbye.heard;
    peer->leaving.store(true);
    open(peer, static_cast<std::uint32_t>(remote_group), now + kAnswerNs);
    return true;
}

void Farewell::open(const std::shared_ptr<Peer>& peer, std::uint32_t remote_group, std::int64_t until_ns) {
    const auto same = [&](const Open& open) { return open.peer == peer && open.remote_group == remote_group; };
    if (std::none_of(open_.begin(), open_.end(), same)) open_.push_back({peer, remote_group, until_ns});
}

void Farewell::begin(std::int64_t until_ns) {
    closing_ = true;
    for (const auto& peer : peers_->all()) {
        if (peer->silent.load()) continue;
        const auto& links = peer->sides[group_]->links;
        for (std::uint32_t k = 0; k < links.size(); ++k) {
            // It may be writing to us already where we have not come to ping it yet.
            const bool pings = group_ == 0 && k == 0 && peer->watched.load();
            const auto was_used = [](const auto& link) { return link.was_used(); };
            if (pings || std::any_of(links[k].begin(), links[k].end(), was_used)) open(peer, k, until_ns);
        }
    }
}

bool Farewell::step(std::int64_t now) {
    return std::erase_if(open_, [&](const Open& open) { return is_over(open, now) || now > open.until_ns; }) > 0;
}

bool Farewell::is_over(const Open& open, std::int64_t now) {
    const auto& goodbye = open.peer->sides[group_]->goodbyes[open.remote_group];
    const bool all_heard = goodbye.expected > 0 && goodbye.heard >= goodbye.expected;
    if (!closing_ && !all_heard) return false;
    if (!sender_.say_goodbye(open.peer, open.remote_group, now)) return false;
    if (!closing_) return true;
    const bool under_way = std::any_of(goodbye.links.begin(), goodbye.links.end(),
                                       [](const auto* link) { return link->ops_in_flight > 0; });
    return !under_way && (all_heard || !open.peer->watched.load());
}

}  // namespace fkv
