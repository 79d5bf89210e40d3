// Batches: writes without an immediate, for which the last one of them answers.
#include <atomic>
#include <random>

#include "engine_cluster.h"

namespace fkv::test {
namespace {

using namespace fkv::fake;

constexpr std::uint64_t kPage = 64;

FakeProfile deep(FakeProfile profile) {
    profile.tx_depth = profile.rx_depth = 512;
    profile.eagain_percent = 0;
    return profile;
}

// With a thread for each NIC, which polls whenever it likes, nothing is left to a later write.
unsigned immediates(unsigned batches, unsigned writes) { return nic_threads() ? writes : batches; }

class EngineBatch : public ::testing::Test {
  protected:
    void start(Cluster& cluster, const FakeProfile& profile, std::size_t rails = 1) {
        a = &cluster.add({.rails = {rails}, .profile = profile});
        b = &cluster.add({.rails = {rails}, .profile = profile});
        for (std::size_t i = 0; i < a->memory.size(); ++i) a->memory[i] = static_cast<std::byte>(i / kPage % 190);
        writes = imms = 0;
        cluster.fabric.add_rule({.step = Step::kLeave,
                                 .match = [](const OpView& op) { return op.kind == OpKind::kWrite; },
                                 .times = Rule::kAlways,
                                 .call =
                                     [this](const OpView& op) {
                                         ++writes;
                                         imms += op.has_imm;
                                     }});
    }
    bool all_landed(std::uint64_t count) const {
        for (std::uint64_t i = 0; i < count; ++i)
            if (!equal_now(&b->memory[2 * i * kPage], &a->memory[i * kPage], kPage)) return false;
        return true;
    }
    // So many pages, none of which can be merged, to a counter that fires. Whether all are there by then.
    void move(Cluster& cluster, std::uint64_t count) {
        const auto token = b->counter(kPage, count);
        const auto id = a->write_pages(*b, 0, 0, count, kPage, token)->id;
        ASSERT_TRUE(cluster.wait([&] { return b->fired(token); })) << cluster.where();
        EXPECT_TRUE(all_landed(count)) << "the counter fired before the last byte";
        ASSERT_TRUE(cluster.wait([&] { return a->ended(id); })) << cluster.where();
        EXPECT_EQ(a->outcome(id), Outcome::kOk);
    }

    std::uint64_t seed = std::random_device{}();
    Node *a = nullptr, *b = nullptr;
    std::atomic<unsigned> writes{0}, imms{0};
};

TEST_F(EngineBatch, one_immediate_answers_for_sixteen_writes) {
    Cluster cluster(seed);
    start(cluster, deep(FakeProfile::connected()));
    move(cluster, 40);
    EXPECT_EQ(writes, 40u);
    EXPECT_EQ(imms, immediates(3, 40));
}

TEST_F(EngineBatch, several_rails_have_batches_of_their_own) {
    Cluster cluster(seed);
    start(cluster, deep(FakeProfile::connected()), 3);
    move(cluster, 60);
    EXPECT_EQ(writes, 60u);
    EXPECT_LE(imms, immediates(60 / 16 + 3, 60));
}

TEST_F(EngineBatch, where_a_failed_write_stops_nothing_each_speaks_for_itself) {
    for (auto profile : {FakeProfile::strict(), FakeProfile::tcp()}) {
        Cluster cluster(seed);
        profile.wait_fd = true;
        start(cluster, deep(profile));
        move(cluster, 20);
        EXPECT_EQ(imms, 20u);
    }
}

TEST_F(EngineBatch, weights_stay_within_their_field) {
    Cluster cluster(seed);
    start(cluster, deep(FakeProfile::connected()));
    // A unit of one byte: 15 pages are 960 units, 16 would be 1024.
    const auto token = b->counter(1, 40 * kPage);
    const auto id = a->write_pages(*b, 0, 0, 40, kPage, token)->id;
    ASSERT_TRUE(cluster.wait([&] { return b->fired(token) && a->ended(id); })) << cluster.where();
    EXPECT_EQ(*b->fired(token), CounterVerdict::kFired);
    EXPECT_EQ(imms, immediates(3, 40));
}

TEST_F(EngineBatch, a_failed_write_in_it_never_lets_the_counter_fire) {
    for (unsigned place = 0; place < 20; place += 3) {
        Cluster cluster(seed + place);
        start(cluster, deep(FakeProfile::connected()));
        cluster.fabric.add_rule({.step = Step::kArrive, .skip = place, .action = Action::kFail, .fi_errno = 113});
        const auto token = b->counter(kPage, 20);
        const auto id = a->write_pages(*b, 0, 0, 20, kPage, token)->id;
        ASSERT_TRUE(cluster.wait([&] { return a->ended(id); })) << cluster.where();
        EXPECT_EQ(a->outcome(id), Outcome::kFailed);
        EXPECT_EQ(a->ended(id)->error.fi_errno, 113) << "the first error is the cause";
        cluster.steps(300);
        EXPECT_FALSE(b->fired(token)) << "a page is missing: " << cluster.where();
    }
}

// Refused in the middle of a batch, and by the next post the connection may be another one. The sender hears of the
// failure late: what it reads comes in order, and the first completion is held.
TEST_F(EngineBatch, what_is_posted_after_a_refusal_does_not_answer_for_what_was_lost_before_it) {
    for (unsigned round = 0; round < 24; ++round) {
        Cluster cluster(seed + round);
        auto profile = deep(FakeProfile::connected());
        profile.eagain_percent = 30;
        profile.eagain_polls = 40;
        start(cluster, profile);
        const auto held = cluster.fabric.add_rule({.step = Step::kTellSource, .action = Action::kHold});
        cluster.fabric.add_rule({.step = Step::kArrive, .skip = round % 12, .action = Action::kFail});
        const auto token = b->counter(kPage, 12);
        const auto id = a->write_pages(*b, 0, 0, 12, kPage, token)->id;
        cluster.steps(300);
        ASSERT_FALSE(b->fired(token)) << "seed " << seed + round << ": a page is missing: " << cluster.where();
        cluster.fabric.release(held);
        ASSERT_TRUE(cluster.wait([&] { return a->ended(id); })) << cluster.where();
        EXPECT_EQ(a->outcome(id), Outcome::kFailed);
        EXPECT_FALSE(b->fired(token)) << cluster.where();
    }
}

TEST_F(EngineBatch, refusals_on_the_way_lose_nothing) {
    for (unsigned round = 0; round < 20; ++round) {
        Cluster cluster(seed + round);
        auto profile = FakeProfile::connected();
        profile.eagain_percent = 40;
        profile.imm_uses_recv = round % 2 == 0;
        start(cluster, profile, 1 + round % 3);
        move(cluster, 100);
    }
}

class EngineBatchLayers : public EngineBatch {
  protected:
    // Three layers of five pages, each to a place of its own.
    std::shared_ptr<Transfer> submit(const CounterToken& token) {
        Engine::Submission submission{a->peer(*b), {}, token, watch, 1};
        for (std::uint16_t layer = 1; layer <= 3; ++layer) {
            auto piece = a->piece(*b, place(layer), place(layer), kPage);
            piece.src_pages = piece.dst_pages = make_pages({0, 1, 2, 3, 4});
            piece.src_stride = piece.dst_stride = 2 * kPage;
            piece.layer = layer;
            submission.pieces.push_back(std::move(piece));
        }
        std::vector<Engine::Submission> one;
        one.push_back(std::move(submission));
        return a->engine->submit_pages(Transfer::Kind::kWrite, std::move(one), 0)[0];
    }
    static std::uint64_t place(std::uint16_t layer) { return layer * 1024u; }
    bool has_landed(std::uint16_t layer) const {
        for (std::uint64_t i = 0; i < 5; ++i) {
            const auto at = place(layer) + 2 * i * kPage;
            if (!equal_now(&b->memory[at], &a->memory[at], kPage)) return false;
        }
        return true;
    }

    std::uint64_t word = 0;
    std::shared_ptr<Watch> watch = std::make_shared<Watch>(&word);
};

TEST_F(EngineBatchLayers, the_last_write_of_a_layer_ends_its_batch) {
    for (const bool at_once : {true, false}) {
        Cluster cluster(seed);
        start(cluster, deep(FakeProfile::connected()));
        word = 0;
        if (at_once) a->engine->set_watch(*watch, 1, 3);
        const auto token = b->counter(kPage, 15);
        const auto id = submit(token)->id;
        for (std::uint16_t layer = 1; layer <= 3; ++layer) {
            if (!at_once) a->engine->set_watch(*watch, 1, layer);
            ASSERT_TRUE(cluster.wait([&] { return has_landed(layer); })) << cluster.where();
            if (!at_once) {
                EXPECT_EQ(imms, immediates(layer, layer * 5u));
            }
        }
        ASSERT_TRUE(cluster.wait([&] { return b->fired(token) && a->ended(id); })) << cluster.where();
        EXPECT_EQ(imms, immediates(3, 15));
    }
}

// Looking ahead to a layer that is not done must not hold up the write before it.
TEST_F(EngineBatchLayers, a_refused_write_waits_for_room_and_not_for_the_next_layer) {
    for (unsigned round = 0; round < 20; ++round) {
        Cluster cluster(seed + round);
        auto profile = FakeProfile::connected();
        profile.eagain_percent = 60;
        start(cluster, profile);
        word = 0;
        const auto token = b->counter(kPage, 15);
        const auto id = submit(token)->id;
        for (std::uint16_t layer = 1; layer <= 3; ++layer) {
            a->engine->set_watch(*watch, 1, layer);
            ASSERT_TRUE(cluster.wait([&] { return has_landed(layer); }, std::chrono::seconds(10))) << cluster.where();
        }
        ASSERT_TRUE(cluster.wait([&] { return b->fired(token) && a->ended(id); })) << cluster.where();
    }
}

}  // namespace
}  // namespace fkv::test
