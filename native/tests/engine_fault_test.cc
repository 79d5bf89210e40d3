// Operations, posts, registrations and NICs that fail under an engine: what is told, when, and what goes on.
#include <random>

#include "engine/open.h"
#include "engine_cluster.h"

namespace fkv::test {
namespace {

using namespace fkv::fake;

class EngineFault : public ::testing::Test {
  protected:
    void start(const NodeShape& a_shape = {}, const NodeShape& b_shape = {}) {
        a = &cluster.add(a_shape);
        b = &cluster.add(b_shape);
    }
    // No random refusals, so that "the seventh post" is the seventh write.
    static NodeShape steady(std::size_t rails = 1, FakeProfile profile = FakeProfile::strict()) {
        profile.eagain_percent = 0;
        return {.rails = {rails}, .profile = profile};
    }
    // Where the page that write_pages() numbers so lands, of 64 bytes.
    static std::uint64_t remote_page(const Node& node, std::uint64_t page) {
        return node.remotes[0]->rails[0][0].base + page * 128;
    }
    void expect_works() {
        const auto token = b->counter(64, 16);
        const auto id = a->write(*b, 0, 32768, 1024, token);
        ASSERT_TRUE(cluster.wait([&] { return a->ended(id) && b->fired(token); })) << cluster.where();
        EXPECT_EQ(a->outcome(id), Outcome::kOk);
        EXPECT_TRUE(std::equal(&a->memory[0], &a->memory[1024], &b->memory[32768]));
    }

    Cluster cluster{std::random_device{}()};
    Node *a = nullptr, *b = nullptr;
};

TEST_F(EngineFault, a_failed_part_is_told_after_its_siblings_are_quiet) {
    start(steady(), steady());
    // Later, it might have been reported to its source already.
    const auto held =
        cluster.fabric.add_rule({.step = Step::kArrive,
                                 .match = [&](const OpView& op) { return op.dst_address == remote_page(*b, 1); },
                                 .action = Action::kHold});
    cluster.fabric.add_rule({.step = Step::kArrive,
                             .match = [&](const OpView& op) { return op.dst_address == remote_page(*b, 4); },
                             .action = Action::kFail,
                             .fi_errno = 113});
    const auto token = b->counter(64, 10);
    const auto id = a->write_pages(*b, 0, 0, 10, 64, token)->id;
    ASSERT_TRUE(cluster.fabric.wait_fired(held, 1, std::chrono::seconds(10)));
    cluster.steps(600);
    EXPECT_FALSE(a->ended(id)) << "told while a sibling may still land: " << cluster.where();
    EXPECT_THROW(a->engine->deregister(a->regions[0]), Error);
    cluster.fabric.release(held);
    ASSERT_TRUE(cluster.wait([&] { return a->ended(id); })) << cluster.where();
    const auto& event = *a->ended(id);
    EXPECT_EQ(event.outcome, Outcome::kFailed);
    EXPECT_EQ(event.error.fi_errno, 113);
    EXPECT_EQ(event.error.op, "write");
    EXPECT_EQ(event.error.nic, "fake0");
    ASSERT_EQ(event.failed_pages.size(), 1u);
    EXPECT_EQ(event.failed_pages[0].first, 4u);
    EXPECT_EQ(event.failed_pages[0].count, 1u);
    cluster.steps(300);
    EXPECT_FALSE(b->fired(token)) << "a page is missing";
    expect_works();
}

TEST_F(EngineFault, a_failing_post_ends_the_transfer_and_says_from_where) {
    start(steady(), steady());
    cluster.fabric.fail_call({.call = Call::kPost, .nic = a->nics[0][0], .skip = 6, .fi_errno = 12});
    const auto id = a->write_pages(*b, 0, 0, 10, 64, b->counter(64, 10))->id;
    ASSERT_TRUE(cluster.wait([&] { return a->ended(id); })) << cluster.where();
    const auto& event = *a->ended(id);
    EXPECT_EQ(event.outcome, Outcome::kFailed);
    EXPECT_EQ(event.error.fi_errno, 12);
    EXPECT_EQ(event.unposted.first, 6u);
    EXPECT_EQ(event.unposted.count, 1u);
    EXPECT_EQ(event.bytes, 6u * 64) << "the six pages before it are known good";
    EXPECT_EQ(a->rail(0).stats.ops.get(), 6u);
    expect_works();
}

TEST_F(EngineFault, a_message_and_a_signal_whose_post_fails_end_too) {
    start(steady(), steady());
    cluster.fabric.fail_call({.call = Call::kPost, .nic = a->nics[0][0], .times = 2});
    const auto message = a->send(*b, 100);
    const auto signal = a->engine->submit_signals({{a->peer(*b), b->remotes[0], {}, 0, 7}}, 0)[0]->id;
    ASSERT_TRUE(cluster.wait([&] { return a->ended(message) && a->ended(signal); })) << cluster.where();
    EXPECT_EQ(a->outcome(message), Outcome::kFailed);
    EXPECT_EQ(a->outcome(signal), Outcome::kFailed);
    expect_works();
}

// An entry that names no operation fails all that the NIC has in flight, and only there. It stays owned: nothing says
// which operation will never be heard of again.
void unattributed(Cluster& cluster, Node& a, Node& b, Action action) {
    const auto held = cluster.fabric.add_rule({.step = Step::kLandFirst, .skip = 3, .action = Action::kHold});
    cluster.fabric.add_rule({.step = Step::kArrive, .skip = 5, .action = action, .fi_errno = 107});
    const auto token = b.counter(64, 8);
    const auto id = a.write_pages(b, 0, 0, 8, 64, token)->id;
    ASSERT_TRUE(cluster.fabric.wait_fired(held, 1, std::chrono::seconds(10)));
    ASSERT_TRUE(cluster.wait([&] { return !a.faults.empty(); })) << cluster.where();
    EXPECT_EQ(a.faults[0].error.fi_errno, 107);
    cluster.fabric.release(held);
    cluster.steps(400);
    EXPECT_FALSE(a.ended(id)) << "one operation was never retired";
    EXPECT_FALSE(b.fired(token));
    EXPECT_THROW(a.engine->deregister(a.regions[0]), Error);
    a.engine->close(0);
    a.take();
    ASSERT_TRUE(a.ended(id));
    EXPECT_EQ(a.outcome(id), Outcome::kFailed) << "closing does not hide the failure";
    EXPECT_EQ(a.ended(id)->error.fi_errno, 107);
}

TEST_F(EngineFault, an_error_without_context_fails_what_the_nic_has_in_flight) {
    start(steady(), steady());
    unattributed(cluster, *a, *b, Action::kFailNoContext);
}

TEST_F(EngineFault, an_error_that_claims_to_be_a_receive_does_too) {
    start(steady(), steady());
    unattributed(cluster, *a, *b, Action::kFailAsReceive);
}

TEST_F(EngineFault, an_early_report_that_was_wrong_is_no_success_to_the_counter) {
    auto profile = FakeProfile::fail_stop();
    profile.early_percent = 100;
    start(steady(1, profile), steady(1, profile));
    auto bad = std::make_shared<RemoteRegion>(*b->remotes[0]);
    bad->rails[0][0].rkey ^= 1;
    auto pages = a->piece(*b, 0, 0, 64);
    auto broken = a->piece(*b, 64, 64, 64);
    broken.dst = bad;
    auto last = a->piece(*b, 128, 128, 64);
    const auto token = b->counter(64, 3);
    const auto id =
        a->engine->submit_pages(Transfer::Kind::kWrite, {{a->peer(*b), {pages, broken, last}, token}}, 0)[0]->id;
    ASSERT_TRUE(cluster.wait([&] { return a->ended(id); })) << cluster.where();
    cluster.steps(400);
    EXPECT_FALSE(b->fired(token));
    EXPECT_EQ(b->memory[64], kCanary);
}

TEST_F(EngineFault, a_bad_key_at_any_place_never_lets_the_counter_fire) {
    for (std::uint64_t place = 0; place < 12; ++place) {
        Cluster other(cluster.fabric.seed() + place);
        auto& from = other.add(steady(2));
        auto& to = other.add(steady(2));
        auto bad = std::make_shared<RemoteRegion>(*to.remotes[0]);
        for (auto& rail : bad->rails) rail[0].rkey ^= 1;
        std::vector<PagePiece> pieces;
        for (std::uint64_t i = 0; i < 12; ++i) {
            pieces.push_back(from.piece(to, i * 64, i * 100, 64));
            if (i == place) pieces.back().dst = bad;
        }
        const auto token = to.counter(64, 12);
        const auto id = from.engine->submit_pages(Transfer::Kind::kWrite, {{from.peer(to), pieces, token}}, 0)[0]->id;
        ASSERT_TRUE(other.wait([&] { return from.ended(id); })) << other.where();
        EXPECT_EQ(from.outcome(id), Outcome::kFailed);
        ASSERT_EQ(from.ended(id)->failed_pages.size(), 1u);
        EXPECT_EQ(from.ended(id)->failed_pages[0].piece, place);
        other.steps(200);
        EXPECT_FALSE(to.fired(token)) << other.where();
    }
}

TEST_F(EngineFault, a_registration_that_fails_on_one_rail_leaves_nothing_behind) {
    start(steady(4));
    const auto before = cluster.fabric.stats().open_mrs;
    cluster.fabric.fail_call({.call = Call::kRegister, .nic = a->nics[0][1], .fi_errno = 12});
    std::vector<std::byte> memory(1000);
    try {
        a->engine->register_region(memory.data(), memory.size(), 0);
        FAIL() << "must throw";
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kRegistration);
        EXPECT_EQ(error.op().fi_errno, 12);
        EXPECT_EQ(error.op().nic, "fake1");
    }
    EXPECT_EQ(cluster.fabric.stats().open_mrs, before);
    const auto region = a->engine->register_region(memory.data(), memory.size(), 0);
    EXPECT_EQ(cluster.fabric.stats().open_mrs, before + 4);
    a->engine->deregister(region);
    a->engine->deregister(region);
    EXPECT_EQ(cluster.fabric.stats().open_mrs, before);
}

TEST_F(EngineFault, a_peer_that_cannot_be_inserted_fails_its_transfer_and_is_tried_again) {
    start(steady(2), steady(2));
    cluster.fabric.fail_call({.call = Call::kInsert, .nic = a->nics[0][1]});
    const auto id = a->write(*b, 0, 0, 100);
    ASSERT_TRUE(cluster.wait([&] { return a->ended(id); })) << cluster.where();
    EXPECT_EQ(a->outcome(id), Outcome::kFailed);
    expect_works();
}

TEST(EngineOpen, strict_refuses_and_lenient_goes_on_with_the_rest) {
    for (const bool strict : {true, false}) {
        FakeFabric fabric(1);
        fabric.fail_call({.call = Call::kOpen, .skip = 1, .fi_errno = 19});
        std::vector<std::string> left_out;
        const auto open = [&](const FakeProfile& profile) { return fabric.open_nic(profile); };
        const std::vector<FakeProfile> four(4);
        if (strict) {
            EXPECT_THROW(open_rails(four, true, left_out, open), Error);
            EXPECT_EQ(fabric.stats().open_nics, 0u) << "the NIC before it stayed open";
            continue;
        }
        EXPECT_EQ(open_rails(four, false, left_out, open).size(), 3u);
        ASSERT_EQ(left_out.size(), 1u);
        EXPECT_NE(left_out[0].find("fake1"), std::string::npos) << left_out[0];
        fabric.fail_call({.call = Call::kOpen, .times = 4});
        EXPECT_THROW(open_rails(four, false, left_out, open), Error) << "a group without NICs";
    }
}

}  // namespace
}  // namespace fkv::test
