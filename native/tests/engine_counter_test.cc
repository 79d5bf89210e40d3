// Counters as a whole engine keeps them: what is early, late, too much, or meant for a slot's former owner.
#include <random>

#include "engine_cluster.h"

namespace fkv::test {
namespace {

using namespace fkv::fake;
using std::chrono::seconds;

class EngineCounter : public ::testing::Test {
  protected:
    EngineCounter() : EngineCounter(4) {}
    explicit EngineCounter(std::uint32_t num_counters)
        : options(with_counters(num_counters)),
          a(cluster.add({.rails = {2}})),
          b(cluster.add({.rails = {2}, .options = options})) {}
    static GroupOptions with_counters(std::uint32_t count) {
        GroupOptions given;
        given.num_counters = count;
        return given;
    }
    void finish(std::uint64_t id) {
        ASSERT_TRUE(cluster.wait([&] { return a.ended(id); })) << cluster.where();
        ASSERT_EQ(a.outcome(id), Outcome::kOk);
        cluster.steps(200);  // a report may come before the immediate
    }
    CounterTable& counters() { return b.engine->group(0).counters(); }
    const ReceiverStats& figures() { return b.engine->group(0).receiver().stats(); }

    Cluster cluster{std::random_device{}()};
    GroupOptions options;
    Node &a, &b;
};

TEST_F(EngineCounter, a_counter_waits_for_the_last_byte_of_any_write) {
    // Whichever write and whichever of its stages is held back: the rest arrives, and the counter does not fire.
    for (const auto step : {Step::kLeave, Step::kArrive, Step::kLandFirst, Step::kLandLast, Step::kTellTarget})
        for (unsigned which = 0; which < 6; ++which) {
            Cluster other(cluster.fabric.seed() + which);
            auto& from = other.add({.rails = {2}});
            auto& to = other.add({.rails = {2}});
            const auto rule = other.fabric.add_rule({.step = step, .skip = which, .action = Action::kHold});
            const auto token = to.counter(64, 6);
            const auto id = from.write_pages(to, 0, 0, 6, 64, token)->id;
            ASSERT_TRUE(other.fabric.wait_fired(rule, 1, seconds(10)));
            ASSERT_TRUE(other.wait([&] { return to.engine->group(0).counters().received(token) == 5; }))
                << other.where();
            other.steps(100);
            EXPECT_FALSE(to.fired(token)) << other.where();
            other.fabric.release(rule);
            ASSERT_TRUE(other.wait([&] { return to.fired(token) && from.ended(id); })) << other.where();
        }
}

TEST_F(EngineCounter, arrivals_before_arming_are_kept) {
    const auto token = b.counter(64);
    finish(a.write_pages(b, 0, 0, 10, 64, token)->id);
    EXPECT_FALSE(b.fired(token));
    EXPECT_EQ(counters().received(token), 10u);
    b.engine->arm_counter(0, token, 10);
    ASSERT_TRUE(cluster.wait([&] { return b.fired(token); }));
    EXPECT_EQ(*b.fired(token), CounterVerdict::kFired);
}

TEST_F(EngineCounter, more_than_expected_is_an_overrun_and_reported_once) {
    const auto token = b.counter(64);
    finish(a.write_pages(b, 0, 0, 10, 64, token)->id);
    b.engine->arm_counter(0, token, 9);
    const auto whole = b.counter(64, 9);
    finish(a.write(b, 0, 0, 640, whole));  // ten units in one immediate
    ASSERT_TRUE(cluster.wait([&] { return b.fired(token) && b.fired(whole); }));
    EXPECT_EQ(*b.fired(token), CounterVerdict::kOverrun);
    EXPECT_EQ(*b.fired(whole), CounterVerdict::kOverrun);
    EXPECT_EQ(figures().violations.get(), 1u);
    finish(a.write(b, 0, 0, 64, whole));
    EXPECT_EQ(figures().violations.get(), 2u) << "what comes after the end is counted";
    EXPECT_FALSE(counters().release(whole, false)) << "an overrun proves nothing: poisoned";
    EXPECT_EQ(counters().num_poisoned(), 1u);
}

TEST_F(EngineCounter, writes_for_a_former_generation_are_dropped_and_counted) {
    const auto old = b.counter(64, 100);
    EXPECT_TRUE(b.engine->group(0).counters().release(old, true));
    CounterToken young;
    do young = b.counter(64, 10);
    while (young.slot != old.slot);
    EXPECT_NE(young.generation, old.generation);
    finish(a.write_pages(b, 0, 0, 7, 64, old)->id);
    EXPECT_EQ(figures().stale_imms.get(), 7u);
    EXPECT_EQ(counters().received(young), 0u);
    finish(a.write_pages(b, 0, 0, 10, 64, young)->id);
    ASSERT_TRUE(cluster.wait([&] { return b.fired(young); }));
    EXPECT_EQ(*b.fired(young), CounterVerdict::kFired);
}

TEST_F(EngineCounter, slots_that_are_not_quiescent_are_poisoned_and_never_come_back) {
    std::set<std::uint32_t> poisoned;
    for (int i = 0; i < 2; ++i) {
        const auto token = b.counter(64, 10);
        finish(a.write(b, 0, 0, 64, token));
        EXPECT_FALSE(counters().release(token, false));
        poisoned.insert(token.slot);
    }
    EXPECT_EQ(counters().num_poisoned(), 2u);
    for (int i = 0; i < 40; ++i) {
        const auto token = b.counter(64, 10);
        EXPECT_FALSE(poisoned.contains(token.slot));
        EXPECT_TRUE(counters().release(token, true));
    }
    b.counter(64);
    b.counter(64);
    try {
        b.counter(64);
        FAIL() << "four slots, two poisoned, two in use";
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kWouldBlock);
    }
}

TEST_F(EngineCounter, tokens_and_words_that_nobody_gave_out_do_no_harm) {
    const auto token = b.counter(64, 10);
    finish(a.write(b, 0, 0, 64, {3'000, 0, 64}));  // no such slot
    finish(a.write(b, 0, 0, 64, {token.slot, token.generation + 1, 64}));
    finish(a.write(b, 0, 0, 64, {3, 0, 64}));  // a slot that nobody holds
    EXPECT_EQ(figures().stale_imms.get(), 2u);
    EXPECT_EQ(figures().violations.get(), 1u);
    EXPECT_EQ(counters().received(token), 0u);
    EXPECT_THROW(a.write(b, 0, 0, 64, {kUserSlot, 0, 64}), Error);
    EXPECT_THROW(a.write(b, 0, 0, 64, {0, kNumGenerations, 64}), Error);
}

TEST_F(EngineCounter, weights_above_an_immediate_take_several) {
    const auto token = b.counter(1, 2 * 5000 + 123'456);
    const auto data = a.write(b, 0, 0, 5000, token), more = a.write(b, 0, 5000, 5000, token);
    const auto signal = a.engine->submit_signals({{a.peer(b), b.remotes[0], token, 123'456, 0}}, 0)[0]->id;
    ASSERT_TRUE(cluster.wait([&] { return b.fired(token) && a.ended(data) && a.ended(more) && a.ended(signal); }))
        << cluster.where();
    EXPECT_EQ(*b.fired(token), CounterVerdict::kFired);
    EXPECT_EQ(figures().violations.get(), 0u);
}

TEST_F(EngineCounter, scatter_reaches_every_peer_or_nobody) {
    auto& c = cluster.add({.rails = {1}});
    const auto at_b = b.counter(64, 4), at_c = c.counter(64, 8);
    const auto b_peer = a.peer(b), c_peer = a.peer(c);
    auto beyond = a.piece(c, 0, c.memory.size(), 1);
    EXPECT_THROW(a.engine->submit_pages(Transfer::Kind::kWrite,
                                        {{b_peer, {a.piece(b, 0, 0, 256)}, at_b}, {c_peer, {beyond}, at_c}}, 0),
                 Error);
    EXPECT_NO_THROW(a.engine->deregister(a.engine->register_region(a.memory.data(), 100, 0)));
    cluster.steps(100);
    EXPECT_EQ(counters().received(at_b), 0u);
    a.engine->submit_pages(Transfer::Kind::kWrite,
                           {{b_peer, {a.piece(b, 0, 0, 256)}, at_b}, {c_peer, {a.piece(c, 0, 0, 512)}, at_c}}, 0);
    ASSERT_TRUE(cluster.wait([&] { return b.fired(at_b) && c.fired(at_c) && a.transfers.size() == 2; }));
}

TEST_F(EngineCounter, a_full_group_takes_nothing) {
    GroupOptions few;
    few.max_transfers = 3;
    auto& c = cluster.add({.options = few});
    const auto held = cluster.fabric.add_rule({.step = Step::kLeave, .times = 3, .action = Action::kHold});
    for (int i = 0; i < 2; ++i) c.write(b, 0, 0, 100);
    const Engine::Submission one{c.peer(b), {c.piece(b, 0, 0, 100)}, {}};
    try {
        c.engine->submit_pages(Transfer::Kind::kWrite, {one, one}, 0);
        FAIL() << "there is room for one only";
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kWouldBlock);
    }
    c.engine->submit_pages(Transfer::Kind::kWrite, {one}, 0);
    cluster.fabric.release(held);
    ASSERT_TRUE(cluster.wait([&] { return c.transfers.size() == 3; })) << cluster.where();
    EXPECT_NO_THROW(c.engine->deregister(c.regions[0])) << "the refused submission still uses its region";
}

}  // namespace
}  // namespace fkv::test
