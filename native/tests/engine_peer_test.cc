// Peers that die, stop, or are removed while engines work with them; and that this harms nobody else.
#include <array>
#include <random>
#include <thread>

#include "engine_cluster.h"

namespace fkv::test {
namespace {

using namespace fkv::fake;
using std::chrono::milliseconds;
using std::chrono::seconds;

std::string step_name(const ::testing::TestParamInfo<Step>& param) {
    const char* const names[] = {"leave", "arrive", "land_first", "land_last", "tell_target", "tell_source"};
    return names[static_cast<int>(param.param)];
}

// Transfers to a peer that takes nothing wait in the same queue as those to others, but do not take their turns.
TEST(EnginePeers, thousands_that_wait_for_one_peer_hold_up_nobody) {
    constexpr unsigned kWaiting = 4000, kTries = 5;
    Cluster cluster(std::random_device{}());
    NodeShape shape;
    shape.profile.eagain_percent = 0;
    auto &a = cluster.add(shape), &stopped = cluster.add(shape), &other = cluster.add(shape);
    const auto held =
        cluster.fabric.add_rule({.step = Step::kLeave,
                                 .match = [id = stopped.nics[0][0]](const OpView& op) { return op.dst == id; },
                                 .times = Rule::kAlways,
                                 .action = Action::kHold});
    for (unsigned i = 0; i < kWaiting; ++i) a.write(stopped, 0, 0, 64);
    const auto ops = [&] { return a.rail(0).stats.ops.get(); };
    // Each sleep of the progress thread is a round more in which the write had no turn. A busy machine adds some.
    std::uint64_t least = ~std::uint64_t{0};
    for (unsigned i = 0; i < kTries; ++i) {
        cluster.wait([] { return false; }, milliseconds(30));
        const auto sleeps = a.engine->group(0).rest().sleeps(), before = ops();
        const auto id = a.write(other, 0, 0, 64);
        for (const auto end = now_ns() + 30 * kSecond; ops() == before && now_ns() < end;) std::this_thread::yield();
        least = std::min(least, a.engine->group(0).rest().sleeps() - sleeps);
        ASSERT_TRUE(cluster.wait([&] { return a.ended(id); })) << cluster.where();
    }
    EXPECT_LT(least, kWaiting / 64);
    cluster.fabric.release(held);
}

class EnginePeerAtStep : public ::testing::TestWithParam<Step> {
  protected:
    // A source, a target that something happens to at the parameter's step, and a bystander.
    void start(std::uint64_t seed, Rule what, bool ordered) {
        cluster = std::make_unique<Cluster>(seed);
        NodeShape shape{.rails = {2}, .profile = ordered ? FakeProfile::fail_stop() : FakeProfile::strict()};
        shape.profile.wait_fd = ordered;  // who moves the data itself must wake up for it
        shape.memory_bytes = 1 << 17;
        a = &cluster->add(shape);
        b = &cluster->add(shape);
        c = &cluster->add(shape);
        what.step = GetParam();
        what.skip = static_cast<unsigned>(seed % 7);
        const auto target = b->nics[0];
        what.match = [target](const OpView& op) { return op.dst == target[0] || op.dst == target[1]; };
        rule = cluster->fabric.add_rule(what);
    }
    // Pages, a message and a signal to `to`, under one counter.
    std::vector<std::uint64_t> submit(Node& to) {
        token = to.counter(64, 2 * 100 + 5);
        std::vector<std::uint64_t> ids{a->write_pages(to, 0, 0, 100, 128, token)->id};
        ids.push_back(a->engine->submit_signals({{a->peer(to), to.remotes[0], token, 5, 0}}, 0)[0]->id);
        ids.push_back(a->send(to, 5000));
        return ids;
    }
    bool all_ended(const std::vector<std::uint64_t>& ids) const {
        return std::all_of(ids.begin(), ids.end(), [&](auto id) { return a->ended(id); });
    }
    void expect_reaches_bystander() {
        const auto ids = submit(*c);
        ASSERT_TRUE(cluster->wait([&] { return all_ended(ids) && c->fired(token); })) << cluster->where();
        for (const auto id : ids) EXPECT_EQ(a->outcome(id), Outcome::kOk);
    }

    std::unique_ptr<Cluster> cluster;
    Node *a = nullptr, *b = nullptr, *c = nullptr;
    RuleId rule = 0;
    CounterToken token;
};

TEST_P(EnginePeerAtStep, a_peer_that_dies_fails_its_transfers_and_nobody_elses) {
    for (const auto seed : {0u, 1u, 2u, 3u, 4u, 5u, 6u, 7u}) {
        start(std::random_device{}(), {.action = Action::kKillTarget}, seed % 2);
        const auto ids = submit(*b);
        ASSERT_TRUE(cluster->fabric.wait_fired(rule, 1, seconds(10)));
        ASSERT_TRUE(cluster->wait([&] { return all_ended(ids); })) << cluster->where();
        EXPECT_FALSE(b->fired(token)) << "all units, from a peer that died: " << cluster->where();
        expect_reaches_bystander();
        EXPECT_EQ(a->engine->group(0).sender().in_flight(), 0u);
        EXPECT_NO_THROW(a->engine->deregister(a->regions[0]));
    }
}

TEST_P(EnginePeerAtStep, a_peer_that_dies_silently_holds_its_transfers_until_close) {
    start(std::random_device{}(), {.action = Action::kKillTarget, .death = Death::kSilent}, false);
    const auto ids = submit(*b);
    ASSERT_TRUE(cluster->fabric.wait_fired(rule, 1, seconds(10)));
    cluster->steps(500);
    expect_reaches_bystander();
    a->engine->close(kMillisecond);
    a->take();
    EXPECT_TRUE(all_ended(ids));
    EXPECT_FALSE(b->fired(token));
}

TEST_P(EnginePeerAtStep, the_own_nics_death_ends_everything) {
    start(std::random_device{}(), {.action = Action::kKillSource}, false);
    const auto ids = submit(*b);
    ASSERT_TRUE(cluster->fabric.wait_fired(rule, 1, seconds(10)));
    ASSERT_TRUE(cluster->wait([&] { return all_ended(ids); }, seconds(5))) << cluster->where();
    const auto more = a->write(*c, 0, 0, 100);
    ASSERT_TRUE(cluster->wait([&] { return a->ended(more); })) << cluster->where();
    EXPECT_EQ(a->outcome(more), Outcome::kFailed);
    a->engine->close(0);
}

TEST_P(EnginePeerAtStep, a_stopped_peer_does_not_hold_up_the_others) {
    start(std::random_device{}(), {.action = Action::kFreezeTarget}, true);
    auto ids = submit(*b);
    ASSERT_TRUE(cluster->fabric.wait_fired(rule, 1, seconds(10)));
    for (int i = 0; i < 5; ++i) {
        a->write_pages(*b, 0, 0, 100, 128);
        a->send(*b, 30'000);
    }
    for (int i = 0; i < 3; ++i) expect_reaches_bystander();
    cluster->fabric.thaw(b->nics[0][0]);
    token = {};
    ASSERT_TRUE(cluster->wait([&] { return a->engine->group(0).sender().in_flight() == 0; })) << cluster->where();
    a->take();
    for (const auto& [id, event] : a->transfers) EXPECT_EQ(event.outcome, Outcome::kOk) << event.error.text;
}

INSTANTIATE_TEST_SUITE_P(AtEveryStep, EnginePeerAtStep,
                         ::testing::Values(Step::kLeave, Step::kArrive, Step::kLandFirst, Step::kLandLast,
                                           Step::kTellTarget, Step::kTellSource),
                         step_name);

TEST(EnginePeer, small_writes_and_messages_overtake_ten_thousand_pages) {
    Cluster cluster(std::random_device{}());
    auto& a = cluster.add({.memory_bytes = 2 << 20});
    auto& b = cluster.add({.memory_bytes = 4 << 20});
    std::vector<std::uint64_t> small;
    const auto bulk = a.write_pages(b, 0, 0, 10'000, 200)->id;
    ASSERT_TRUE(cluster.wait([&] { return a.rail(0).stats.ops.get() > 50; }));
    for (int i = 0; i < 10; ++i) {
        small.push_back(a.write(b, 0, 0, 1000));
        small.push_back(a.send(b, 2000));
    }
    ASSERT_TRUE(cluster.wait([&] { return a.transfers.size() == small.size(); })) << cluster.where();
    EXPECT_FALSE(a.ended(bulk));
    EXPECT_LT(a.rail(0).stats.ops.get(), 2000u) << "they waited for most of the bulk";
    ASSERT_TRUE(cluster.wait([&] { return a.ended(bulk); }, seconds(60))) << cluster.where();
}

TEST(EnginePeer, one_transfer_cannot_starve_another) {
    Cluster cluster(std::random_device{}());
    auto& a = cluster.add({.memory_bytes = 1 << 20});
    auto& b = cluster.add({.memory_bytes = 2 << 20});
    auto& c = cluster.add({.memory_bytes = 2 << 20});
    const auto first = a.write_pages(b, 0, 0, 3000, 300)->id;
    const auto second = a.write_pages(c, 0, 0, 300, 300)->id;
    ASSERT_TRUE(cluster.wait([&] { return a.ended(second); })) << cluster.where();
    EXPECT_FALSE(a.ended(first)) << "ten times as long, and it was served first";
    a.engine->close(0);
}

TEST(EnginePeer, several_stopped_peers_leave_room_for_another) {
    Cluster cluster(std::random_device{}());
    auto profile = FakeProfile::fail_stop();
    profile.wait_fd = true;
    const NodeShape shape{.profile = profile, .memory_bytes = 1 << 17};
    auto& a = cluster.add(shape);
    std::array<Node*, 6> peers{};  // five of them would halve 16 operations to nothing
    for (auto& peer : peers) peer = &cluster.add(shape);
    std::vector<std::uint64_t> stuck;  // not the messages: on this fabric their senders may hear too early
    for (auto* peer : peers) {
        if (peer == peers.back()) break;
        cluster.fabric.freeze(peer->nics[0][0]);
        for (int i = 0; i < 3; ++i) stuck.push_back(a.write_pages(*peer, 0, 0, 300, 200)->id);
        for (int i = 0; i < 3; ++i) a.send(*peer, 40'000);
    }
    cluster.steps(300);
    const auto pages = a.write_pages(*peers.back(), 0, 0, 300, 200)->id;
    const auto message = a.send(*peers.back(), 40'000);
    ASSERT_TRUE(cluster.wait([&] { return a.ended(pages) && a.ended(message); })) << cluster.where();
    for (const auto id : stuck) EXPECT_FALSE(a.ended(id));
    for (const auto id : {pages, message}) EXPECT_EQ(a.outcome(id), Outcome::kOk);
}

TEST(EnginePeer, removal_stops_posting_and_lets_what_was_posted_end) {
    Cluster cluster(std::random_device{}());
    auto& a = cluster.add({.memory_bytes = 1 << 18});
    auto& b = cluster.add({.memory_bytes = 1 << 19});
    // Half of 16 operations: the most that one peer may hold.
    const auto held = cluster.fabric.add_rule({.step = Step::kArrive, .times = 8, .action = Action::kHold});
    const auto id = a.write_pages(b, 0, 0, 500, 256)->id;
    ASSERT_TRUE(cluster.fabric.wait_fired(held, 8, seconds(10)));
    const auto waiting = a.send(b, 100);
    a.engine->remove_peer(a.peer(b));
    ASSERT_TRUE(cluster.wait([&] { return a.ended(waiting); })) << cluster.where();
    cluster.steps(300);
    EXPECT_FALSE(a.ended(id)) << "eight of its writes may still land";
    cluster.fabric.release(held);
    ASSERT_TRUE(cluster.wait([&] { return a.ended(id); })) << cluster.where();
    for (const auto which : {id, waiting}) {
        EXPECT_EQ(a.outcome(which), Outcome::kFailed);
        EXPECT_EQ(a.ended(which)->error.text, "the peer was removed");
    }
    EXPECT_EQ(a.ended(id)->unposted.first, 8u);
    EXPECT_EQ(a.ended(id)->bytes, 8u * 256);
    const auto again = a.write(b, 0, 0, 100);  // as a new peer
    ASSERT_TRUE(cluster.wait([&] { return a.ended(again); }));
    EXPECT_EQ(a.outcome(again), Outcome::kOk);
}

TEST(EnginePeer, removal_under_load_ends_every_transfer_once) {
    Cluster cluster(std::random_device{}());
    auto& a = cluster.add({.rails = {2}});
    auto& b = cluster.add({.rails = {2}});
    std::atomic<bool> stop{false};
    std::atomic<std::uint64_t> accepted{0}, refused{0};
    std::vector<std::thread> threads;
    for (std::uint64_t t = 0; t < 8; ++t)
        threads.emplace_back([&, t] {
            while (!stop) try {
                    if (t % 2)
                        a.send(b, 500);
                    else
                        a.write_pages(b, t * 1000, t * 2000, 5, 200);
                    ++accepted;
                    while (a.engine->group(0).sender().in_flight() > 50 && !stop) std::this_thread::yield();
                } catch (const Error& error) {
                    EXPECT_EQ(error.kind(), ErrorKind::kClosed) << error.what();
                    ++refused;
                }
        });
    std::thread remover([&] {
        for (int i = 0; i < 100 || accepted < 500; ++i) {
            a.engine->remove_peer(a.peer(b));
            std::this_thread::yield();
        }
        stop = true;
    });
    EXPECT_TRUE(cluster.wait([&] { return stop.load(); }));
    for (auto& thread : threads) thread.join();
    remover.join();
    EXPECT_TRUE(cluster.wait([&] { return a.transfers.size() == accepted; })) << cluster.where();
    for (const auto& [id, event] : a.transfers)
        if (event.outcome != Outcome::kOk) {
            EXPECT_EQ(event.outcome, Outcome::kFailed);
            EXPECT_EQ(event.error.text, "the peer was removed");
        }
}

TEST(EnginePeer, a_stall_is_reported_once_with_its_figures) {
    Cluster cluster(std::random_device{}());
    GroupOptions options;
    options.stall_ns = 30 * kMillisecond;
    auto& a = cluster.add({.options = options});
    auto& b = cluster.add({});
    const auto held = cluster.fabric.add_rule({.step = Step::kLeave, .times = 4, .action = Action::kHold});
    const auto id = a.write_pages(b, 0, 0, 4, 100)->id;
    ASSERT_TRUE(cluster.wait([&] { return !a.stalls.empty(); })) << cluster.where();
    EXPECT_EQ(a.stalls[0].error.nic, "fake0");
    EXPECT_EQ(a.stalls[0].bytes, 400u);
    EXPECT_GE(a.stalls[0].id, 30u * kMillisecond);
    const auto until = now_ns() + 100 * kMillisecond;
    ASSERT_TRUE(cluster.wait([&] { return now_ns() > until; }));
    EXPECT_EQ(a.stalls.size(), 1u);
    EXPECT_FALSE(a.ended(id));
    cluster.fabric.release(held);
    ASSERT_TRUE(cluster.wait([&] { return a.ended(id); }));
    EXPECT_EQ(a.outcome(id), Outcome::kOk);
    const auto again = cluster.fabric.add_rule({.step = Step::kLeave, .action = Action::kHold});
    a.write(b, 0, 0, 100);
    ASSERT_TRUE(cluster.wait([&] { return a.stalls.size() == 2; })) << "a second stall is another one";
    cluster.fabric.release(again);
}

TEST(EnginePeer, transfers_that_one_rail_holds_up_are_named_while_others_go_on) {
    Cluster cluster(std::random_device{}());
    GroupOptions options;
    options.stall_ns = 50 * kMillisecond;
    auto& a = cluster.add({.options = options});
    auto& b = cluster.add({});
    auto& c = cluster.add({});
    const auto held = cluster.fabric.add_rule({.step = Step::kLeave,
                                               .match = [to = b.nics[0][0]](const auto& op) { return op.dst == to; },
                                               .times = Rule::kAlways,
                                               .action = Action::kHold});
    const auto stuck = a.write(b, 0, 0, 100);
    // The same NIC goes on to another peer, so that it has not stalled itself.
    const auto go_on = [&](const std::function<bool()>& done) {
        return cluster.wait([&] {
            if (a.engine->group(0).sender().in_flight() < 2) a.write(c, 0, 0, 100);
            return done();
        });
    };
    ASSERT_TRUE(go_on([&] { return !a.held_up.empty(); })) << cluster.where();
    EXPECT_EQ(a.held_up[0].peer, a.peer(b)->epoch);
    EXPECT_EQ(a.held_up[0].transfers, std::vector<std::uint64_t>{stuck});
    EXPECT_FALSE(a.ended(stuck));
    // What comes later to the same place is named, too.
    const auto second = a.write(b, 0, 0, 100);
    ASSERT_TRUE(go_on([&] { return a.held_up.back().transfers.size() == 2; })) << cluster.where();
    EXPECT_EQ(a.held_up.back().transfers, (std::vector<std::uint64_t>{stuck, second}));
    cluster.fabric.release(held);
    ASSERT_TRUE(cluster.wait([&] { return a.ended(stuck) && a.ended(second); }));
    EXPECT_EQ(a.outcome(stuck), Outcome::kOk);
}

// A NIC that cannot connect takes nothing, for ever, and says no more than "again".
class EngineUnconnected : public ::testing::Test {
  protected:
    EngineUnconnected() {
        GroupOptions options;
        options.stall_ns = 50 * kMillisecond;
        a = &cluster.add({.rails = {1, 2}, .options = options});
        b = &cluster.add({.rails = {1, 2}});
        c = &cluster.add({.rails = {1, 2}});
    }
    void refuse(std::size_t rail, bool refused = true) {
        for (const auto to : b->nics[1]) cluster.fabric.refuse(a->nics[1][rail], to, refused);
    }
    // In the second group.
    std::uint64_t write(Node& to) {
        auto piece = a->piece(to, 0, 0, 100);
        piece.src = a->regions[1];
        piece.dst = to.remotes[1];
        return a->engine->submit_pages(Transfer::Kind::kWrite, {{a->peer(to), {piece}, {}}}, 0)[0]->id;
    }
    bool go_on(const std::function<bool()>& done) {
        return cluster.wait([&] {
            if (a->engine->group(1).sender().in_flight() < 4) write(*c);
            return done();
        });
    }
    bool is_named(std::uint64_t id) const {
        return std::any_of(a->held_up.begin(), a->held_up.end(), [&](const Event& event) {
            return std::find(event.transfers.begin(), event.transfers.end(), id) != event.transfers.end();
        });
    }

    Cluster cluster{std::random_device{}()};
    Node *a = nullptr, *b = nullptr, *c = nullptr;
};

TEST_F(EngineUnconnected, what_waits_for_a_peer_that_is_never_connected_is_named) {
    refuse(0);
    refuse(1);
    const auto stuck = write(*b), other = write(*b);
    ASSERT_TRUE(go_on([&] { return is_named(stuck) && is_named(other); })) << cluster.where();
    EXPECT_EQ(a->held_up[0].peer, a->peer(*b)->epoch);
    EXPECT_NE(a->held_up[0].error.text.find("takes nothing for the peer"), std::string::npos)
        << a->held_up[0].error.text;
    EXPECT_FALSE(a->ended(stuck));
    const auto num_reports = a->held_up.size();
    ASSERT_TRUE(go_on([&] { return a->held_up.size() > num_reports; })) << "again, while it lasts";
    refuse(0, false);
    ASSERT_TRUE(go_on([&] { return a->ended(stuck) && a->ended(other); })) << cluster.where();
    EXPECT_EQ(a->outcome(stuck), Outcome::kOk);
}

TEST_F(EngineUnconnected, it_ends_with_its_peer) {
    refuse(0);
    refuse(1);
    const auto stuck = write(*b);
    ASSERT_TRUE(go_on([&] { return is_named(stuck); })) << cluster.where();
    a->engine->remove_peer(a->peer(*b));
    ASSERT_TRUE(go_on([&] { return a->ended(stuck) != nullptr; })) << cluster.where();
    EXPECT_EQ(a->outcome(stuck), Outcome::kFailed);
}

TEST_F(EngineUnconnected, what_goes_by_another_rail_is_not_held_up) {
    refuse(0);
    std::vector<std::uint64_t> ids;
    const auto until = now_ns() + 200 * kMillisecond;
    ASSERT_TRUE(go_on([&] {
        const bool ended = ids.empty() || a->ended(ids.back());
        if (ended && now_ns() > until) return true;
        if (ended) ids.push_back(write(*b));
        return false;
    })) << cluster.where();
    EXPECT_TRUE(a->held_up.empty());
    EXPECT_GT(ids.size(), 1u);
    for (const auto id : ids) EXPECT_EQ(a->outcome(id), Outcome::kOk);
}

TEST_F(EngineUnconnected, messages_that_are_never_taken_are_named) {
    cluster.fabric.refuse(a->nics[0][0], b->nics[0][0]);
    const auto first = a->send(*b, 100), second = a->send(*b, 100);
    ASSERT_TRUE(go_on([&] { return is_named(first) && is_named(second); })) << cluster.where();
    cluster.fabric.refuse(a->nics[0][0], b->nics[0][0], false);
    ASSERT_TRUE(go_on([&] { return a->ended(first) && a->ended(second); })) << cluster.where();
}

}  // namespace
}  // namespace fkv::test
