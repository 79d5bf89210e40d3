#include "engine/farewell.h"

#include <algorithm>

namespace fkv {
namespace {

constexpr std::int64_t kAnswerNs = 5 * kSecond;  // for so long we try to answer once nothing is under way

}  // namespace

bool Farewell::on_goodbye(const FrameHeader& header, std::int64_t now) {
    const auto peer = peers_->find(header.sender);
    if (!peer) return true;  // it has nothing to fear from us
    const auto remote_group = header.message_id >> 32, links = header.message_id & 0xffffffff;
    if (peer->is_self() || remote_group >= peer->groups.size()) return false;
    auto& goodbye = peer->sides[group_]->goodbyes[remote_group];
    if (links == 0 || links > num_links(*peer, remote_group)) return false;
    if (goodbye.expected != 0 && goodbye.expected != links) return false;
    goodbye.expected = links;
    ++goodbye.heard;
    peer->leaving.store(true);
    open(peer, static_cast<std::uint32_t>(remote_group), now, now + kAnswerNs);
    return true;
}

void Farewell::open(const std::shared_ptr<Peer>& peer, std::uint32_t remote_group, std::int64_t now,
                    std::int64_t until_ns) {
    const auto same = [&](const Open& open) { return open.peer == peer && open.remote_group == remote_group; };
    const auto found = std::find_if(open_.begin(), open_.end(), same);
    if (found == open_.end())
        open_.push_back({peer, remote_group, now + patience_ns_, until_ns});
    else
        found->until_ns = std::max(found->until_ns, until_ns);
}

void Farewell::begin(std::int64_t now, std::int64_t until_ns) {
    closing_ = true;
    for (const auto& peer : peers_->all(now)) {
        if (peer->silent.load() || peer->is_self()) continue;
        const auto lives = lives_of(peer);
        const bool may_write = peer->watched.load();
        for (std::uint32_t k = 0; k < peer->groups.size(); ++k) {
            bool tell = may_write;
            for (std::size_t i = 0; i < num_links(*peer, k); ++i) tell = tell || was_used(lives, k, i);
            if (tell) open(peer, k, now, until_ns);
        }
    }
}

bool Farewell::step(std::int64_t now, bool holds) {
    return std::erase_if(open_, [&](Open& open) {
               if (is_over(open, now, holds)) return true;
               if (!closing_ && is_busy(lives_of(open.peer), open.remote_group)) open.until_ns = now + kAnswerNs;
               return now > open.until_ns;
           }) > 0;
}

bool Farewell::is_over(const Open& open, std::int64_t now, bool holds) {
    auto& goodbye = open.peer->sides[group_]->goodbyes[open.remote_group];
    const bool all_heard = goodbye.all_heard();
    if (all_heard && !holds && !goodbye.counted) {
        goodbye.counted = true;
        open.peer->pairs_heard.fetch_add(1);
    }
    const bool patient = now < open.patient_until_ns;
    if (!closing_ && !all_heard && patient) return false;
    const auto lives = lives_of(open.peer);
    if (!say(open, lives, now) && patient) return false;
    if (!closing_) return goodbye.all_said() && goodbye.counted;
    return !is_busy(lives, open.remote_group) && (all_heard || !open.peer->watched.load());
}

bool Farewell::say(const Open& open, const Lives& lives, std::int64_t now) {
    auto& goodbye = open.peer->sides[group_]->goodbyes[open.remote_group];
    if (!goodbye.begun) {
        goodbye.begun = true;
        auto* links = sender_.links_to(*open.peer, open.remote_group);
        if (!links) return true;  // its address is refused: it is gone already
        for (std::size_t i = 0; i < links->size(); ++i)
            if (was_used(lives, open.remote_group, i) && !sender_.is_broken((*links)[i])) goodbye.ways.push_back({i});
        if (goodbye.ways.empty()) goodbye.ways.push_back({0});
    }
    auto& links = open.peer->sides[group_]->links[open.remote_group];
    const auto id = std::uint64_t{group_} << 32 | goodbye.ways.size();
    for (auto& way : goodbye.ways)
        if (!way.said && !is_busy(lives, open.remote_group, way.link))
            way.said = sender_.say_goodbye(open.peer, links[way.link], id, now);
    return goodbye.all_said();
}

bool Farewell::quiet(std::int64_t now) const {
    const auto peers = peers_->all(now);
    const auto has_left = [&](const auto& peer) {
        const auto& goodbyes = peer->sides[group_]->goodbyes;
        return peer->is_self() ||
               std::all_of(goodbyes.begin(), goodbyes.end(), [](const auto& goodbye) { return goodbye.all_heard(); });
    };
    return open_.empty() && !peers.empty() && std::all_of(peers.begin(), peers.end(), has_left);
}

Farewell::Lives Farewell::lives_of(const std::shared_ptr<Peer>& peer) const {
    auto lives = peers_->before(*peer);
    lives.push_back(peer);
    return lives;
}

bool Farewell::was_used(const Lives& lives, std::uint32_t remote_group, std::size_t link) const {
    return any_of(lives, remote_group, link, [](const Peer::Link& found) { return found.was_used(); });
}

bool Farewell::is_busy(const Lives& lives, std::uint32_t remote_group, std::size_t link) const {
    return any_of(lives, remote_group, link, [](const Peer::Link& found) { return found.ops_in_flight > 0; });
}

bool Farewell::is_busy(const Lives& lives, std::uint32_t remote_group) const {
    for (std::size_t i = 0; i < num_links(*lives.back(), remote_group); ++i)
        if (is_busy(lives, remote_group, i)) return true;
    return false;
}

}  // namespace fkv
