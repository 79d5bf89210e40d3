// How transfers, regions and engines end: only once nothing can touch memory any more, and each of them once.
#include <array>
#include <random>
#include <thread>

#include "engine_cluster.h"

namespace fkv::test {
namespace {

using namespace fkv::fake;
using std::chrono::seconds;

class EngineEnd : public ::testing::Test {
  protected:
    // The first `count` writes wait at the target's door. Later ones might have been reported to the source already.
    void start(unsigned count, std::size_t rails = 1) {
        a = &cluster.add({.rails = {rails}, .memory_bytes = 1 << 20});
        b = &cluster.add({.rails = {rails}, .memory_bytes = 2 << 20});
        held = cluster.fabric.add_rule({.step = Step::kArrive,
                                        .match = [](const OpView& op) { return op.kind == OpKind::kWrite; },
                                        .times = count,
                                        .action = Action::kHold});
    }
    void wait_held(unsigned count) { ASSERT_TRUE(cluster.fabric.wait_fired(held, count, seconds(10))); }
    bool wait_posted(std::uint64_t count) {
        return cluster.wait([&] { return a->rail(0).stats.ops.get() == count; });
    }
    bool wait_end(std::uint64_t id) {
        return cluster.wait([&] { return a->ended(id) != nullptr; });
    }
    // Pages of write_pages() at the target that are no canaries any more.
    std::size_t num_written(std::uint64_t count, std::uint64_t nbytes) const {
        std::size_t written = 0;
        for (std::uint64_t i = 0; i < count; ++i) written += !equal_now(&b->memory[2 * i * nbytes], &kCanary, 1);
        return written;
    }

    Cluster cluster{std::random_device{}()};
    Node *a = nullptr, *b = nullptr;
    RuleId held = 0;
};

TEST_F(EngineEnd, cancel_posts_nothing_more_and_ends_when_the_posted_writes_are_quiet) {
    start(8);  // of 16 operations one peer gets half, so that nothing more is posted
    std::fill(a->memory.begin(), a->memory.end(), std::byte{1});
    const auto transfer = a->write_pages(*b, 0, 0, 1000, 256);
    wait_held(8);
    a->engine->cancel(*transfer);
    cluster.steps(600);
    EXPECT_FALSE(a->ended(transfer->id)) << "a write may still land: " << cluster.where();
    EXPECT_THROW(a->engine->deregister(a->regions[0]), Error) << "a region in use";
    cluster.fabric.release(held);
    ASSERT_TRUE(wait_end(transfer->id)) << cluster.where();
    EXPECT_EQ(a->outcome(transfer->id), Outcome::kCancelled);
    const auto& event = *a->ended(transfer->id);
    // The memory is the caller's: what it puts there now must never arrive.
    std::fill(a->memory.begin(), a->memory.end(), std::byte{2});
    cluster.steps(400);
    const auto posted = event.unposted.first;
    ASSERT_LT(posted, 1000u);
    EXPECT_EQ(event.bytes, posted * 256);
    EXPECT_EQ(num_written(1000, 256), posted);
    EXPECT_EQ(std::count(b->memory.begin(), b->memory.end(), std::byte{2}), 0);
    EXPECT_NO_THROW(a->engine->deregister(a->regions[0]));
}

TEST_F(EngineEnd, cancel_after_the_last_post_changes_nothing) {
    start(1);
    std::fill(a->memory.begin(), a->memory.end(), std::byte{1});
    const auto transfer = a->write_pages(*b, 0, 0, 4, 64);
    wait_held(1);
    ASSERT_TRUE(wait_posted(4));
    a->engine->cancel(*transfer);
    a->engine->cancel(*transfer);
    cluster.fabric.release(held);
    ASSERT_TRUE(wait_end(transfer->id));
    EXPECT_EQ(a->outcome(transfer->id), Outcome::kOk);
    a->engine->cancel(*transfer);
    EXPECT_TRUE(cluster.wait([&] { return num_written(4, 64) == 4; })) << cluster.where();  // its end does not say so
}

TEST_F(EngineEnd, a_deadline_ends_only_in_quiescence) {
    start(8);  // of 16 operations one peer gets half, so that nothing more is posted
    const auto deadline = now_ns() + 300 * kMillisecond;  // late enough for the first posts
    const auto id = a->write_pages(*b, 0, 0, 1000, 256, {}, deadline)->id;
    wait_held(8);
    ASSERT_TRUE(cluster.wait([&] { return now_ns() > deadline; }));
    cluster.steps(600);
    EXPECT_FALSE(a->ended(id)) << cluster.where();
    cluster.fabric.release(held);
    ASSERT_TRUE(wait_end(id));
    EXPECT_EQ(a->outcome(id), Outcome::kExpired);
    EXPECT_LT(a->ended(id)->unposted.first, 1000u);
}

TEST_F(EngineEnd, a_deadline_that_passed_before_anything_was_posted_sends_nothing) {
    start(0);
    const auto id = a->write_pages(*b, 0, 0, 1000, 256, {}, 1)->id;
    ASSERT_TRUE(wait_end(id));
    EXPECT_EQ(a->outcome(id), Outcome::kExpired);
    EXPECT_EQ(a->rail(0).stats.ops.get(), 0u);
}

TEST_F(EngineEnd, a_unit_that_a_border_cuts_is_counted_only_when_its_first_part_is_there) {
    GroupOptions options;
    options.max_registration_bytes = 1000;
    // A sender may hear of a write early or late: over several seeds it hears before the data is in place.
    for (unsigned seed = 0; seed < 16; ++seed) {
        Cluster other(cluster.fabric.seed() + seed);
        auto& from = other.add({});
        auto& to = other.add({.options = options});
        std::fill(from.memory.begin(), from.memory.end(), std::byte{1});
        // 900..1100 of the target is one unit in two registrations. Its first part waits just before it lands.
        const auto rule = other.fabric.add_rule(
            {.step = Step::kLandFirst, .match = [](const OpView& op) { return !op.has_imm; }, .action = Action::kHold});
        const auto token = to.counter(200, 1);
        const auto id = from.write(to, 0, 900, 200, token);
        ASSERT_TRUE(other.fabric.wait_fired(rule, 1, seconds(10)));
        other.steps(200);
        EXPECT_FALSE(to.fired(token)) << other.where();
        other.fabric.release(rule);
        bool whole = false;
        to.on_counter = [&](const Event&) {
            whole = std::count(&to.memory[900], &to.memory[1100], std::byte{1}) == 200;
        };
        ASSERT_TRUE(other.wait([&] { return to.fired(token) && from.ended(id); })) << other.where();
        EXPECT_TRUE(whole) << other.where();
    }
}

TEST_F(EngineEnd, close_with_work_in_flight_ends_all_of_it_and_touches_memory_no_more) {
    for (unsigned seed = 0; seed < 40; ++seed) {
        Cluster other(cluster.fabric.seed() + seed);
        auto& from = other.add({.rails = {2}, .memory_bytes = 1 << 18});
        auto& to = other.add({.rails = {2}, .memory_bytes = 1 << 19});
        const auto rule = other.fabric.add_rule({.step = static_cast<Step>(seed % 6), .skip = seed % 5, .times = 3});
        std::set<std::uint64_t> ids;
        for (int i = 0; i < 4; ++i) ids.insert(from.write_pages(to, 0, 0, 200, 256)->id);
        ids.insert(from.send(to, 20'000));
        ids.insert(from.engine->submit_signals({{from.peer(to), to.remotes[0], {}, 0, 3}}, 0)[0]->id);
        ASSERT_TRUE(other.fabric.wait_fired(rule, 1 + seed % 3, seconds(10)));
        auto& closing = seed % 2 ? from : to;
        std::array<std::thread, 3> threads;
        for (auto& thread : threads) thread = std::thread([&] { closing.engine->close(seed % 3 * kMillisecond); });
        for (auto& thread : threads) thread.join();
        closing.engine->close(0);
        // The memory is the caller's again: nothing may change it or read it.
        std::fill(closing.memory.begin(), closing.memory.end(), std::byte{0x77});
        if (&closing == &to) from.engine->close(20 * kMillisecond);
        other.wait([&] { return from.transfers.size() == ids.size(); }, seconds(5));
        EXPECT_EQ(from.transfers.size(), ids.size()) << other.where();
        for (const auto& [id, event] : from.transfers) EXPECT_TRUE(ids.contains(id));
        EXPECT_EQ(std::count(closing.memory.begin(), closing.memory.end(), std::byte{0x77}),
                  static_cast<std::ptrdiff_t>(closing.memory.size()));
        EXPECT_THROW(from.write(to, 0, 0, 10), Error);
        EXPECT_THROW(from.engine->register_region(from.memory.data(), 10, 0), Error);
        to.engine->close(0);
        EXPECT_EQ(other.fabric.stats().open_nics, 0u);
        EXPECT_EQ(other.fabric.stats().open_mrs, 4u) << "only the message frames' of the NICs remain";
        if (HasFailure()) break;
    }
}

TEST_F(EngineEnd, drain_lets_posted_writes_end_well) {
    start(2);
    const auto id = a->write_pages(*b, 0, 0, 4, 64)->id;
    wait_held(2);
    ASSERT_TRUE(wait_posted(4));
    std::thread closer([&] { a->engine->close(10 * kSecond); });
    cluster.fabric.release(held);
    closer.join();
    a->take();
    EXPECT_EQ(a->outcome(id), Outcome::kOk);
}

TEST_F(EngineEnd, what_slips_in_beside_close_ends_too) {
    start(8);
    a->write_pages(*b, 0, 0, 4, 64);
    const auto full = a->write_pages(*b, 0, 0, 100, 64)->id;
    wait_held(8);
    auto& group = a->engine->group(0);
    group.begin_close(200 * kMillisecond);
    const auto queued = a->send(*b, 10);  // taken, or left for close(), as the thread is quick or slow
    ASSERT_TRUE(cluster.wait([&] { return a->ended(queued) || group.sender().in_flight() == 3; }));
    // The thread drains and takes nothing more; a caller that had looked at the engine before goes on.
    auto late = std::make_shared<Transfer>();
    late->id = 1000;
    late->kind = Transfer::Kind::kMessage;
    late->peer = a->peer(*b);
    ASSERT_TRUE(group.submit({late}));
    a->engine->close(0);
    a->take();
    ASSERT_EQ(a->transfers.size(), 4u);
    EXPECT_EQ(a->outcome(1000), Outcome::kClosed);
    EXPECT_EQ(a->outcome(full), Outcome::kClosed);
    EXPECT_EQ(group.sender().in_flight(), 0u);
}

TEST_F(EngineEnd, a_region_of_another_engine_is_refused) {
    start(0);
    auto piece = b->piece(*a, 0, 0, 100);  // b's memory
    EXPECT_THROW(b->engine->deregister(a->regions[0]), Error);
    piece.dst = b->remotes[0];
    EXPECT_THROW(a->engine->submit_pages(Transfer::Kind::kWrite, {{a->peer(*b), {piece}, {}}}, 0), Error);
    EXPECT_THROW(a->engine->submit_message(b->peer(*a), {}), Error) << "and so is a peer of another engine";
}

TEST_F(EngineEnd, a_read_ends_when_its_data_is_here_and_its_memory_is_in_use_until_then) {
    start(0);
    std::fill(b->memory.begin(), b->memory.begin() + 50'000, std::byte{3});
    const auto rule = cluster.fabric.add_rule({.step = Step::kLandLast, .action = Action::kHold});
    const auto id = a->read(*b, 100, 0, 50'000);
    ASSERT_TRUE(cluster.fabric.wait_fired(rule, 1, seconds(10)));
    cluster.steps(400);
    EXPECT_FALSE(a->ended(id)) << cluster.where();
    EXPECT_THROW(a->engine->deregister(a->regions[0]), Error);
    cluster.fabric.release(rule);
    ASSERT_TRUE(wait_end(id));
    EXPECT_EQ(a->outcome(id), Outcome::kOk);
    EXPECT_EQ(std::count(a->memory.begin(), a->memory.end(), std::byte{3}), 50'000);
    EXPECT_EQ(std::count(&a->memory[100], &a->memory[50'100], std::byte{3}), 50'000);
}

TEST_F(EngineEnd, a_flush_ends_when_all_that_had_ended_is_in_the_targets_memory) {
    for (unsigned seed = 0; seed < 12; ++seed) {
        Cluster other(cluster.fabric.seed() + seed);
        auto profile = FakeProfile::fail_stop();
        profile.early_percent = 100;
        auto& from = other.add({.rails = {2}, .profile = profile});
        auto& to = other.add({.rails = {2}, .profile = profile});
        std::fill(from.memory.begin(), from.memory.end(), std::byte{1});
        const auto id = from.write_pages(to, 0, 0, 40, 64)->id;
        ASSERT_TRUE(other.wait([&] { return from.ended(id); })) << other.where();
        std::ptrdiff_t landed = -1;
        from.on_transfer = [&](const Event&) { landed = std::count(to.memory.begin(), to.memory.end(), std::byte{1}); };
        const auto flush =
            from.engine->submit_on_all_rails(Transfer::Kind::kFlush, from.peer(to), to.remotes[0], 0)->id;
        ASSERT_TRUE(other.wait([&] { return from.ended(flush); })) << other.where();
        EXPECT_EQ(landed, 40 * 64) << other.where();
    }
}

TEST_F(EngineEnd, a_flush_refuses_where_order_is_not_granted) {
    Cluster other(cluster.fabric.seed());
    auto& from = other.add({.rails = {1}, .profile = FakeProfile::strict()});
    auto& to = other.add({.rails = {1}, .profile = FakeProfile::strict()});
    Outcome outcome{};
    from.on_transfer = [&](const Event& event) { outcome = event.outcome; };
    const auto flush = from.engine->submit_on_all_rails(Transfer::Kind::kFlush, from.peer(to), to.remotes[0], 0)->id;
    ASSERT_TRUE(other.wait([&] { return from.ended(flush); })) << other.where();
    EXPECT_EQ(outcome, Outcome::kFailed);
}

// What was reported done may still be on its way over a connection that has broken since.
TEST_F(EngineEnd, a_flush_refuses_where_a_connection_may_be_another_one) {
    for (const bool stops : {false, true}) {
        Cluster other(cluster.fabric.seed());
        const auto profile = stops ? FakeProfile::connected() : FakeProfile::tcp();
        auto& from = other.add({.rails = {1}, .profile = profile});
        auto& to = other.add({.rails = {1}, .profile = profile});
        const auto flush = [&] {
            const auto id =
                from.engine->submit_on_all_rails(Transfer::Kind::kFlush, from.peer(to), to.remotes[0], 0)->id;
            EXPECT_TRUE(other.wait([&] { return from.ended(id); })) << other.where();
            return from.outcome(id);
        };
        EXPECT_EQ(flush(), Outcome::kOk);
        // On TCP most are reported done all the same.
        const auto rule =
            other.fabric.add_rule({.step = Step::kLeave, .times = Rule::kAlways, .action = Action::kFail});
        ASSERT_TRUE(other.wait([&] {
            const auto id = from.write(to, 0, 0, 64);
            return other.wait([&] { return from.ended(id); }) && from.outcome(id) == Outcome::kFailed;
        })) << other.where();
        other.fabric.release(rule);
        EXPECT_EQ(flush(), stops && !nic_threads() ? Outcome::kOk : Outcome::kFailed);  // threads of NICs hide it
    }
}

TEST_F(EngineEnd, every_rail_is_reached_before_the_first_write) {
    Cluster other(cluster.fabric.seed());
    auto& from = other.add({.rails = {3}, .profile = FakeProfile::strict()});
    auto& to = other.add({.rails = {2}, .profile = FakeProfile::strict()});
    Outcome outcome{};
    from.on_transfer = [&](const Event& event) { outcome = event.outcome; };
    const auto connect =
        from.engine->submit_on_all_rails(Transfer::Kind::kConnect, from.peer(to), to.remotes[0], 0)->id;
    ASSERT_TRUE(other.wait([&] { return from.ended(connect); })) << other.where();
    EXPECT_EQ(outcome, Outcome::kOk) << other.where();
    for (std::size_t rail = 0; rail < 3; ++rail) EXPECT_GE(from.rail(rail).stats.ops.get(), 1u) << rail;
    EXPECT_TRUE(std::all_of(to.memory.begin(), to.memory.end(), [&](auto byte) { return byte == to.memory[0]; }));
}

TEST_F(EngineEnd, zero_pages_complete_at_once) {
    start(0);
    auto nothing = a->piece(*b, 0, 0, 64);
    nothing.src_pages = nothing.dst_pages = make_pages({});
    const auto token = b->counter(64, 0);
    const auto transfers =
        a->engine->submit_pages(Transfer::Kind::kWrite, {{a->peer(*b), {nothing}, token}, {a->peer(*b), {}, token}}, 0);
    ASSERT_TRUE(wait_end(transfers[0]->id) && wait_end(transfers[1]->id));
    EXPECT_EQ(a->outcome(transfers[0]->id), Outcome::kOk);
    EXPECT_EQ(a->outcome(transfers[1]->id), Outcome::kOk);
    EXPECT_EQ(a->rail(0).stats.ops.get(), 0u);
    EXPECT_TRUE(cluster.wait([&] { return b->fired(token); }));
}

}  // namespace
}  // namespace fkv::test
