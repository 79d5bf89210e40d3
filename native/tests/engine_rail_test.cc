// Which rail takes a write.
#include <random>

#include "engine_cluster.h"

namespace fkv::test {
namespace {

using namespace fkv::fake;

class EngineRail : public ::testing::Test {
  protected:
    // Two rails with so many bits per second; nothing leaves them until `held` is released.
    void start(const std::vector<std::uint64_t>& link_bps) {
        NodeShape shape{.rails = {2}, .link_bps = link_bps};
        shape.profile.tx_depth = 64;
        shape.profile.eagain_percent = 0;
        a = &cluster.add(shape);
        b = &cluster.add(shape);
        held = cluster.fabric.add_rule({.step = Step::kLeave, .times = Rule::kAlways, .action = Action::kHold});
    }
    std::uint64_t posted(std::size_t rail) { return a->rail(rail).stats.ops.get(); }

    Cluster cluster{std::random_device{}()};
    Node *a = nullptr, *b = nullptr;
    RuleId held = 0;
};

TEST_F(EngineRail, bytes_in_flight_are_shared_by_speed) {
    const struct {
        std::vector<std::uint64_t> bps;
        std::uint64_t first, second;
    } cases[] = {{{100, 100}, 12, 12}, {{300, 100}, 18, 6}, {{100, 300}, 6, 18}, {{0, 0}, 12, 12}, {{0, 200}, 12, 12}};
    for (const auto& c : cases) {
        start(c.bps);
        const auto id = a->write_pages(*b, 0, 0, 24, 64)->id;
        ASSERT_TRUE(cluster.wait([&] { return posted(0) + posted(1) == 24; })) << cluster.where();
        EXPECT_EQ(posted(0), c.first) << c.bps[0] << " and " << c.bps[1];
        EXPECT_EQ(posted(1), c.second);
        cluster.fabric.release(held);
        ASSERT_TRUE(cluster.wait([&] { return a->ended(id); }));
    }
}

// A rail that does nothing is not waited for: the other one takes what it has room for.
TEST_F(EngineRail, a_stopped_rail_does_not_hold_up_the_others) {
    start({100, 100});
    cluster.fabric.release(held);
    const auto stuck = cluster.fabric.add_rule({.step = Step::kLeave,
                                                .match = [&](const OpView& op) { return op.src == a->nics[0][1]; },
                                                .times = Rule::kAlways,
                                                .action = Action::kHold});
    a->write_pages(*b, 0, 0, 400, 64);
    ASSERT_TRUE(cluster.wait([&] { return posted(0) + posted(1) == 400; })) << cluster.where();
    EXPECT_LE(posted(1), 32u) << "half of what fits: the rest is kept for other peers";
    cluster.fabric.release(stuck);
}

// What fails at once has nothing in flight, and is no reason to give it the next write as well.
TEST_F(EngineRail, a_rail_that_fails_is_tried_now_and_then) {
    start({100, 100});
    cluster.fabric.release(held);
    const auto broken = cluster.fabric.add_rule({.step = Step::kArrive,
                                                 .match = [&](const OpView& op) { return op.src == a->nics[0][0]; },
                                                 .times = Rule::kAlways,
                                                 .action = Action::kFail});
    const auto write = [&] {  // of a page on each rail, where both are free
        const auto id = a->write_pages(*b, 0, 0, 2, 64)->id;
        EXPECT_TRUE(cluster.wait([&] { return a->ended(id); })) << cluster.where();
        return a->ended(id)->outcome;
    };
    unsigned failed = 0;
    const auto begin = now_ns();
    for (int i = 0; i < 200; ++i) failed += write() != Outcome::kOk;
    EXPECT_GE(failed, 1u);
    EXPECT_LE(failed, 1 + static_cast<unsigned>((now_ns() - begin) / Peer::Link::kAvoidedNs));

    // It works again, which the next one that tries it finds out.
    cluster.fabric.release(broken);
    const auto before = posted(0);
    EXPECT_TRUE(cluster.wait([&] {
        write();
        return posted(0) > before + 3;
    })) << cluster.where();
}

}  // namespace
}  // namespace fkv::test
