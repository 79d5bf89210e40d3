// Engines that close tell their peers, and stay until nothing is on its way between them.
#include <array>
#include <atomic>
#include <cstring>
#include <random>
#include <thread>

#include "engine/message.h"
#include "engine_cluster.h"

namespace fkv::test {
namespace {

using namespace fkv::fake;
using std::chrono::seconds;

class EngineFarewell : public ::testing::Test {
  protected:
    // Silence alone would tell after a minute, which is how long a goodbye may take.
    static NodeShape shape(std::size_t rails, const FakeProfile& profile = FakeProfile::fail_stop()) {
        return shape(std::vector{rails}, profile);
    }
    static NodeShape shape(std::vector<std::size_t> rails, const FakeProfile& profile = FakeProfile::fail_stop()) {
        NodeShape shape{.rails = std::move(rails), .profile = profile, .memory_bytes = 1 << 18};
        shape.options.heartbeat = {.interval_ns = 20 * kSecond, .misses = 3, .connect_ns = 60 * kSecond};
        shape.options.end_ns = 240 * kSecond;
        return shape;
    }
    static void watch(Node& node, Node& other) { node.engine->add_peer(other.engine->address(), true); }
    static void watch_each_other(Node& a, Node& b) {
        watch(a, b);
        watch(b, a);
    }
    // In seconds. close() while the cluster goes on.
    double close(Node& node) {
        const auto begin = now_ns();
        std::atomic<bool> closed{false};
        std::thread closer([&] {
            node.engine->close(kSecond);
            closed.store(true);
        });
        cluster.wait([&] { return closed.load(); }, seconds(100));
        closer.join();
        node.take();
        return static_cast<double>(now_ns() - begin) / kSecond;
    }
    // Posts something from each to each, and waits until it is over.
    void exchange(Node& a, Node& b) {
        const auto there = a.write_pages(b, 0, 0, 100, 256)->id, back = b.send(a, 100);
        ASSERT_TRUE(cluster.wait([&] { return a.ended(there) && b.ended(back); })) << cluster.where();
    }
    void reach(Node& a, Node& b) {
        const auto id = a.write(b, 0, 0, 64);
        ASSERT_TRUE(cluster.wait([&] { return a.ended(id); })) << cluster.where();
    }
    // One write of a page from a group to a group.
    static std::uint64_t write(Node& from, std::uint32_t group, Node& to, std::uint32_t remote_group,
                               const CounterToken& token = {}) {
        PagePiece piece{from.regions[group], 0, 0, to.remotes[remote_group], 0, 0, kPage, make_pages({0}),
                        make_pages({0})};
        return from.engine->submit_pages(Transfer::Kind::kWrite, {{from.peer(to), {piece}, token}}, 0)[0]->id;
    }
    std::uint64_t hold_writes_to(NicId nic) {
        return cluster.fabric.add_rule(
            {.step = Step::kArrive,
             .match = [nic](const OpView& op) { return op.dst == nic && op.kind == OpKind::kWrite; },
             .action = Action::kHold});
    }
    // close() on a thread, and whether it is over.
    struct Closing {
        explicit Closing(Node& node) : node_(node) {}
        ~Closing() { thread_.join(); }
        Closing(const Closing&) = delete;
        Closing& operator=(const Closing&) = delete;
        bool over() const { return over_.load(); }

      private:
        Node& node_;
        std::atomic<bool> over_{false};
        std::thread thread_{[this] {
            node_.engine->close(kSecond);
            over_.store(true);
        }};
    };
    // Until `done`, while nobody takes events.
    static bool wait_untaken(const std::function<bool()>& done) {
        const auto until = now_ns() + 10 * kSecond;
        while (!done() && now_ns() < until) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        return done();
    }
    // `a` closes when a write of `b` to it that is held has ended, and not before.
    void closes_after(Node& a, Node& b, RuleId held, std::uint64_t id) {
        const Closing closing(a);
        ASSERT_TRUE(cluster.wait([&] { return b.peer(a)->leaving.load(); })) << cluster.where();
        cluster.steps(500);
        EXPECT_FALSE(closing.over()) << "with a write under way: " << cluster.where();
        cluster.fabric.release(held);
        ASSERT_TRUE(cluster.wait([&] { return closing.over() && b.ended(id); })) << cluster.where();
        EXPECT_EQ(b.outcome(id), Outcome::kOk);
    }
    static constexpr std::uint64_t kPage = 4096;
    static constexpr double kSoon = 30;  // half of what waiting for silence takes

    Cluster cluster{std::random_device{}()};
};

TEST_F(EngineFarewell, a_peer_hears_that_we_close_and_posts_nothing_to_us_any_more) {
    for (const std::size_t rails : {1, 3}) {
        auto &a = cluster.add(shape(rails)), &b = cluster.add(shape(2));
        watch_each_other(a, b);
        reach(a, b);
        EXPECT_LT(close(a), kSoon) << cluster.where();
        ASSERT_TRUE(cluster.wait([&] { return !b.lost.empty(); })) << cluster.where();
        EXPECT_EQ(b.lost.size(), 1u);
        EXPECT_EQ(b.lost[0].peer, a.engine->address().epoch);
        EXPECT_EQ(b.lost[0].outcome, Outcome::kClosed);
        const auto ops = b.rail(0).stats.ops.get() + b.rail(1).stats.ops.get();
        const auto id = b.write(a, 0, 0, 64);
        ASSERT_TRUE(cluster.wait([&] { return b.ended(id); })) << cluster.where();
        EXPECT_EQ(b.outcome(id), Outcome::kFailed);
        EXPECT_NE(b.ended(id)->error.text.find("closed its engine"), std::string::npos);
        EXPECT_EQ(b.rail(0).stats.ops.get() + b.rail(1).stats.ops.get(), ops);
        EXPECT_LT(close(b), kSoon) << "nobody is left to say goodbye to";
    }
}

// Where a goodbye may overtake what was written before, only silence shows that nothing more comes.
TEST_F(EngineFarewell, without_order_a_peer_is_lost_when_it_is_silent) {
    auto hears = shape(2, FakeProfile::strict());
    hears.options.heartbeat = {.interval_ns = 20 * kMillisecond, .misses = 5, .connect_ns = 60 * kSecond};
    auto &a = cluster.add(shape(2, FakeProfile::strict())), &b = cluster.add(hears);
    watch_each_other(a, b);
    exchange(a, b);
    EXPECT_LT(close(a), kSoon) << cluster.where();
    ASSERT_TRUE(cluster.wait([&] { return !b.lost.empty(); })) << cluster.where();
    EXPECT_EQ(b.lost[0].outcome, Outcome::kClosed);
}

// Also where another group, or another rail, has long said goodbye.
TEST_F(EngineFarewell, a_peer_has_left_when_all_that_it_wrote_has_come) {
    auto profile = FakeProfile::fail_stop();
    profile.early_percent = 100;  // what has ended is still on its way
    for (const bool other_group : {false, true}) {
        const auto rails = other_group ? std::vector<std::size_t>{1, 1} : std::vector<std::size_t>{2};
        auto &a = cluster.add(shape(rails, profile)), &b = cluster.add(shape(rails, profile));
        watch_each_other(a, b);
        exchange(a, b);
        const std::uint32_t group = other_group ? 1 : 0;
        const auto held = hold_writes_to(b.nics[group][0]);
        const auto token = b.counter(256, other_group ? kPage / 256 : 200, group);
        std::uint64_t id;
        if (other_group)
            id = write(a, 1, b, 1, token);
        else
            id = a.write_pages(b, 0, 0, 200, 256, token)->id;
        ASSERT_TRUE(cluster.fabric.wait_fired(held, 1, seconds(10))) << cluster.where();
        ASSERT_TRUE(cluster.wait([&] { return other_group || a.ended(id); })) << cluster.where();
        const Closing closing(a);
        ASSERT_TRUE(cluster.wait([&] { return b.peer(a)->leaving.load(); })) << cluster.where();
        cluster.steps(500);
        EXPECT_TRUE(b.lost.empty()) << "while its writes are still coming: " << cluster.where();
        cluster.fabric.release(held);
        ASSERT_TRUE(cluster.wait([&] { return !b.lost.empty() && closing.over(); })) << cluster.where();
        ASSERT_TRUE(b.fired(token, group)) << cluster.where();
        EXPECT_EQ(*b.fired(token, group), CounterVerdict::kFired);
    }
}

// We have posted nothing to it ourselves, so how are we to know?
TEST_F(EngineFarewell, writes_of_any_of_a_peers_groups_to_any_of_ours_are_waited_for) {
    for (const std::uint32_t group : {0, 1}) {
        auto &a = cluster.add(shape({1, 1})), &b = cluster.add(shape({1, 1}));
        watch_each_other(a, b);
        exchange(a, b);
        const auto held = hold_writes_to(a.nics[group][0]);
        const auto id = write(b, 1, a, group);
        ASSERT_TRUE(cluster.fabric.wait_fired(held, 1, seconds(10))) << cluster.where();
        closes_after(a, b, held, id);
    }
}

TEST_F(EngineFarewell, writes_to_a_peer_that_was_added_again_since_are_waited_for) {
    auto &a = cluster.add(shape(1)), &b = cluster.add(shape(1));
    watch_each_other(a, b);
    exchange(a, b);
    const auto held = hold_writes_to(a.nics[0][0]);
    const auto id = b.write(a, 0, 0, kPage);
    ASSERT_TRUE(cluster.fabric.wait_fired(held, 1, seconds(10))) << cluster.where();
    b.engine->remove_peer(b.peer(a));
    watch(b, a);
    closes_after(a, b, held, id);
}

// Nobody takes messages any more: what they keep from coming in would wait for ever.
TEST_F(EngineFarewell, a_full_inbox_keeps_no_goodbye_out) {
    auto small = shape(1);
    small.options.max_inbox_bytes = kPage;
    auto &a = cluster.add(small), &b = cluster.add(shape(1));
    watch_each_other(a, b);
    exchange(a, b);
    for (int i = 0; i < 200; ++i) b.send(a, 1000);
    ASSERT_TRUE(wait_untaken([&] { return a.engine->events().inbox_bytes() + 1000 > kPage; }));
    EXPECT_LT(close(a), kSoon) << cluster.where();
    ASSERT_TRUE(cluster.wait([&] { return !b.lost.empty(); })) << cluster.where();
}

TEST_F(EngineFarewell, a_peer_has_left_when_its_messages_have_been_taken) {
    auto small = shape(1);
    small.options.max_inbox_bytes = kPage;
    auto &a = cluster.add(shape(1)), &b = cluster.add(small);
    watch_each_other(a, b);
    exchange(a, b);
    std::uint64_t last = 0;
    for (int i = 0; i < 10; ++i) last = a.send(b, 1000);
    const auto is_over = [&] {
        a.take();
        return a.ended(last) != nullptr;
    };
    ASSERT_TRUE(wait_untaken(is_over)) << cluster.where();
    const auto peer = b.peer(a);
    const Closing closing(a);
    ASSERT_TRUE(wait_untaken([&] { return peer->leaving.load() && closing.over(); })) << cluster.where();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // for whoever would say so too early
    ASSERT_TRUE(cluster.wait([&] { return !b.lost.empty(); })) << cluster.where();
    EXPECT_EQ(b.num_received(a), 10u);
}

TEST_F(EngineFarewell, a_link_that_takes_nothing_keeps_no_goodbye_from_the_others) {
    for (const std::size_t refused : {0, 1}) {
        auto impatient = shape(2);
        impatient.options.heartbeat = {.interval_ns = 100 * kMillisecond, .misses = 10, .connect_ns = 60 * kSecond};
        auto &a = cluster.add(impatient), &b = cluster.add(impatient);
        watch_each_other(a, b);
        exchange(a, b);
        exchange(a, b);
        cluster.fabric.refuse(a.nics[0][refused], b.nics[0][refused]);
        const Closing closing(a);
        ASSERT_TRUE(cluster.wait([&] { return b.peer(a)->leaving.load(); })) << "not told: " << cluster.where();
        ASSERT_TRUE(cluster.wait([&] { return closing.over() && !b.lost.empty(); })) << cluster.where();
    }
}

// On hearing the first of two goodbyes an application lets go of the peer, and of others.
TEST_F(EngineFarewell, a_removed_peer_is_answered_when_all_its_goodbyes_have_come) {
    auto &a = cluster.add(shape(2)), &b = cluster.add(shape(2)), &c = cluster.add(shape(1));
    watch_each_other(a, b);
    exchange(a, b);
    exchange(a, b);
    const auto held = cluster.fabric.add_rule({.step = Step::kArrive,
                                               .match =
                                                   [id = b.nics[0][0]](const OpView& op) {
                                                       return op.dst == id && op.kind == OpKind::kSend &&
                                                              op.nbytes == sizeof(FrameHeader);
                                                   },
                                               .action = Action::kHold});
    const auto peer = b.peer(a);
    const Closing closing(a);
    ASSERT_TRUE(cluster.wait([&] { return peer->leaving.load(); })) << cluster.where();
    b.engine->remove_peer(peer);
    b.engine->remove_peer(b.peer(c));
    cluster.fabric.release(held);
    ASSERT_TRUE(cluster.wait([&] { return closing.over(); }, seconds(20))) << cluster.where();
}

TEST_F(EngineFarewell, one_that_was_silent_and_is_watched_again_is_told) {
    auto impatient = shape(1);
    impatient.options.heartbeat.connect_ns = 50 * kMillisecond;
    auto &a = cluster.add(impatient), &b = cluster.add(shape(1));
    watch(a, b);
    ASSERT_TRUE(cluster.wait([&] { return !a.lost.empty(); })) << cluster.where();
    watch_each_other(a, b);
    exchange(a, b);
    EXPECT_LT(close(a), kSoon) << cluster.where();
    ASSERT_TRUE(cluster.wait([&] { return !b.lost.empty(); })) << cluster.where();
}

// What a peer has posted when it hears of it still arrives; what waits in its queue fails.
TEST_F(EngineFarewell, what_is_on_its_way_to_us_lands_before_we_close) {
    for (auto profile : {FakeProfile::strict(), FakeProfile::fail_stop(), FakeProfile::connected()}) {
        profile.early_percent = 0;  // else what has ended may still be on its way
        auto &a = cluster.add(shape(2, profile)), &b = cluster.add(shape(2, profile));
        watch_each_other(a, b);
        exchange(a, b);
        const auto held = cluster.fabric.add_rule(
            {.step = Step::kArrive,
             .match = [id = a.nics[0][1]](const OpView& op) { return op.dst == id && op.kind == OpKind::kWrite; },
             .action = Action::kHold});
        std::fill(b.memory.begin(), b.memory.end(), std::byte{1});
        const auto pages = b.write_pages(a, 0, 0, 300, 256);
        ASSERT_TRUE(cluster.fabric.wait_fired(held, 1, seconds(10)));
        std::atomic<bool> closed{false};
        std::thread closer([&] {
            a.engine->close(kSecond);
            closed.store(true);
        });
        ASSERT_TRUE(cluster.wait([&] { return b.peer(a)->leaving.load(); })) << cluster.where();
        cluster.steps(500);
        EXPECT_FALSE(closed.load()) << "with writes under way: " << cluster.where();
        cluster.fabric.release(held);
        ASSERT_TRUE(cluster.wait([&] { return closed.load() && b.ended(pages->id); })) << cluster.where();
        closer.join();
        // All that was posted has arrived, and nothing else.
        std::uint64_t landed = 0;
        for (std::uint64_t i = 0; i < 300; ++i) landed += a.memory[2 * i * 256] == std::byte{1};
        const auto& event = *b.ended(pages->id);
        EXPECT_EQ(landed * 256, event.bytes);
        EXPECT_EQ(event.outcome, landed == 300 ? Outcome::kOk : Outcome::kFailed);
        EXPECT_TRUE(event.failed_pages.empty());
    }
}

TEST_F(EngineFarewell, both_may_close_at_once) {
    auto profile = FakeProfile::strict();
    profile.early_percent = 0;  // else the last goodbye may be lost with its endpoint
    for (unsigned seed = 0; seed < 20; ++seed) {
        auto &a = cluster.add(shape(1 + seed % 3, profile)), &b = cluster.add(shape(1 + seed % 2, profile));
        watch_each_other(a, b);
        if (seed % 2) exchange(a, b);  // else they may not have pinged each other yet
        a.write_pages(b, 0, 0, 100, 256);
        if (seed % 4) b.write_pages(a, 0, 0, 100, 256);
        double other = 0;
        std::thread closer([&] {
            const auto begin = now_ns();
            b.engine->close(kSecond);
            other = static_cast<double>(now_ns() - begin) / kSecond;
        });
        EXPECT_LT(close(a), kSoon) << cluster.where();
        closer.join();
        EXPECT_LT(other, kSoon) << cluster.where();
        if (HasFailure()) break;
    }
}

TEST_F(EngineFarewell, a_peer_that_was_removed_hears_it_and_answers) {
    auto &a = cluster.add(shape(2)), &b = cluster.add(shape(2));
    watch_each_other(a, b);
    exchange(a, b);
    a.engine->remove_peer(a.peer(b));
    b.engine->remove_peer(b.peer(a));
    EXPECT_LT(close(a), kSoon) << cluster.where();
    EXPECT_TRUE(b.lost.empty());
    EXPECT_LT(close(b), kSoon) << cluster.where();
}

TEST_F(EngineFarewell, nobody_waits_for_a_peer_that_does_not_know_us) {
    auto &a = cluster.add(shape(1)), &b = cluster.add(shape(1));
    reach(a, b);
    EXPECT_LT(close(a), kSoon) << cluster.where();
    EXPECT_TRUE(b.lost.empty());
}

TEST_F(EngineFarewell, a_peer_that_does_not_answer_is_waited_for_as_long_as_it_may_be_silent) {
    auto impatient = shape(2);
    impatient.options.heartbeat = {.interval_ns = 10 * kMillisecond, .misses = 10, .connect_ns = kSecond};
    auto &a = cluster.add(impatient), &b = cluster.add(shape(2));
    watch(a, b);  // it does not know us
    reach(a, b);
    const auto took = close(a);
    EXPECT_LT(took, kSoon) << cluster.where();
    EXPECT_GE(took, 0.1);
}

TEST_F(EngineFarewell, one_that_has_fallen_silent_is_not_waited_for) {
    auto impatient = shape(1);
    impatient.options.heartbeat.connect_ns = 50 * kMillisecond;
    auto &a = cluster.add(impatient), &b = cluster.add(shape(1));
    watch(a, b);
    ASSERT_TRUE(cluster.wait([&] { return !a.lost.empty(); })) << cluster.where();
    EXPECT_EQ(a.lost[0].outcome, Outcome::kFailed);
    EXPECT_LT(close(a), kSoon) << cluster.where();
}

// Goodbyes of nobody, or from groups that nobody has, harm nobody.
TEST_F(EngineFarewell, goodbyes_that_make_no_sense_are_counted_and_dropped) {
    auto &a = cluster.add(shape(1)), &b = cluster.add(shape(1));
    watch_each_other(a, b);
    const auto nic = cluster.fabric.open_nic();
    std::vector<std::byte> bytes(sizeof(FrameHeader));
    const auto memory = nic->register_memory(bytes.data(), bytes.size());
    const auto target = nic->insert_peer(a.engine->address().groups[0][0]);
    const auto send = [&](Epoch sender, std::uint64_t id) {
        const FrameHeader header{kFrameMagic, kFrameVersion, 3, sender, id, 0, 0};
        std::memcpy(bytes.data(), &header, sizeof header);
        OpContext context;
        std::array<Completion, 1> done;
        bool posted = false;
        ASSERT_TRUE(cluster.wait([&] {
            if (const int n = nic->poll(done); n != 0) {
                FailedCompletion failure{};
                if (n < 0) nic->read_error(failure);
                EXPECT_EQ(n, 1) << failure.error.text;
                return true;
            }
            if (posted) return false;
            posted =
                nic->post_send({bytes.data(), memory->local_desc(), bytes.size(), target, &context}) == PostResult::kOk;
            return false;
        })) << cluster.where();
    };
    const auto& stats = a.engine->group(0).receiver().stats();
    const auto epoch = b.engine->address().epoch;
    send(epoch, 0);                           // over no link
    send(epoch, 2);                           // over more than there are
    send(epoch, std::uint64_t{1} << 32 | 1);  // of its second group
    send(epoch, ~std::uint64_t{0});
    const auto self = a.peer(a);
    send(self->epoch, 1);
    ASSERT_TRUE(cluster.wait([&] { return stats.malformed_frames.get() == 5; })) << cluster.where();
    EXPECT_FALSE(self->leaving);
    send(Epoch{}, 1);  // whom we do not know
    const auto sent = b.send(a, 10);
    ASSERT_TRUE(cluster.wait([&] { return b.ended(sent) && a.num_received(b) == 1; })) << cluster.where();
    EXPECT_EQ(stats.malformed_frames.get(), 5u);
    EXPECT_TRUE(a.lost.empty());
    nic->close_endpoint();
}

TEST_F(EngineFarewell, a_peer_that_could_not_be_watched_is_not_waited_for) {
    auto &a = cluster.add(shape(1)), &b = cluster.add(shape(1));
    std::atomic<bool> held{true};
    auto& group = a.engine->group(0);
    ASSERT_TRUE(group.run_soon([&] {
        while (held.load()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }));
    while (group.run_soon([] {}));
    EXPECT_THROW(watch(a, b), Error);
    held.store(false);
    EXPECT_LT(close(a), kSoon) << cluster.where();
}

}  // namespace
}  // namespace fkv::test
