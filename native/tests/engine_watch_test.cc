// Transfers that wait for a word in memory, layer by layer.
#include <random>
#include <thread>

#include "engine_cluster.h"

namespace fkv::test {
namespace {

using namespace fkv::fake;

constexpr std::uint64_t kPage = 64;
constexpr std::uint64_t kPages = 6;  // of each layer

class EngineWatch : public ::testing::Test {
  protected:
    void start(const FakeProfile& profile = FakeProfile::strict(), bool spin = false) {
        NodeShape shape{.profile = profile};
        shape.options.spin = spin;
        a = &cluster.add(shape);
        b = &cluster.add(shape);
        for (std::size_t i = 0; i < a->memory.size(); ++i) a->memory[i] = static_cast<std::byte>(i / kPage % 200);
    }
    // One piece for each layer of `layers`, to a place of its own at the target.
    std::shared_ptr<Transfer> submit(std::uint64_t step, const std::vector<std::uint16_t>& layers,
                                     const CounterToken& token = {}, std::int64_t deadline_ns = 0) {
        Engine::Submission submission{a->peer(*b), {}, token, watch, step};
        for (std::size_t i = 0; i < layers.size(); ++i) {
            auto piece = a->piece(*b, place(i), place(i), kPage);
            std::vector<std::int64_t> even(kPages);
            for (std::size_t k = 0; k < kPages; ++k) even[k] = static_cast<std::int64_t>(k);
            piece.src_pages = piece.dst_pages = make_pages(std::move(even));
            piece.src_stride = piece.dst_stride = 2 * kPage;
            piece.layer = layers[i];
            submission.pieces.push_back(std::move(piece));
        }
        std::vector<Engine::Submission> one;
        one.push_back(std::move(submission));
        return a->engine->submit_pages(Transfer::Kind::kWrite, std::move(one), deadline_ns)[0];
    }
    static std::uint64_t place(std::size_t piece) { return piece * 2 * kPage * kPages; }
    bool has_landed(std::size_t piece) const {
        for (std::uint64_t k = 0; k < kPages; ++k) {
            const auto at = place(piece) + 2 * k * kPage;
            if (!equal_now(&b->memory[at], &a->memory[at], kPage)) return false;
        }
        return true;
    }
    bool is_untouched(std::size_t piece) const {
        return std::all_of(&b->memory[place(piece)], &b->memory[place(piece + 1)],
                           [](auto byte) { return byte == kCanary; });
    }
    bool wait_end(const std::shared_ptr<Transfer>& transfer) {
        return cluster.wait([&] { return a->ended(transfer->id) != nullptr; });
    }

    Cluster cluster{std::random_device{}()};
    Node *a = nullptr, *b = nullptr;
    std::uint64_t word = 0;
    std::shared_ptr<Watch> watch = std::make_shared<Watch>(&word);
};

TEST_F(EngineWatch, each_layer_goes_when_it_is_done_and_not_before) {
    start();
    const auto token = b->counter(kPage, 4 * kPages);
    const auto transfer = submit(7, {0, 1, 2, 5}, token);
    ASSERT_TRUE(cluster.wait([&] { return has_landed(0); })) << cluster.where();
    const std::uint64_t done[] = {0, 1, 2, 5};
    for (std::size_t piece = 1; piece < 4; ++piece) {
        cluster.steps(100);
        ASSERT_TRUE(is_untouched(piece)) << "before its layer was done: " << cluster.where();
        a->engine->set_watch(*watch, 7, done[piece]);
        ASSERT_TRUE(cluster.wait([&] { return has_landed(piece); })) << cluster.where();
    }
    ASSERT_TRUE(wait_end(transfer));
    EXPECT_EQ(a->outcome(transfer->id), Outcome::kOk);
    ASSERT_TRUE(cluster.wait([&] { return b->fired(token) != nullptr; }));
}

// As a GPU does: the word changes and nobody is told.
TEST_F(EngineWatch, the_word_alone_is_enough) {
    for (const bool spin : {false, true}) {
        start(FakeProfile::strict(), spin);
        const auto transfer = submit(3, {1, 2});
        cluster.steps(50);
        watch->set(3, 1);
        ASSERT_TRUE(cluster.wait([&] { return has_landed(0); }));
        ASSERT_TRUE(is_untouched(1));
        watch->set(3, 2);
        ASSERT_TRUE(wait_end(transfer));
        word = 0;
    }
}

TEST_F(EngineWatch, who_comes_late_goes_at_once) {
    start();
    watch->set(9, 3);
    for (const auto& [step, layers] : {std::pair<std::uint64_t, std::vector<std::uint16_t>>{9, {1, 2, 3}},
                                       {8, {1, 40}},  // a later step has begun: this one is done
                                       {9, {}}}) {
        const auto transfer = submit(step, layers);
        ASSERT_TRUE(wait_end(transfer)) << "step " << step;
        EXPECT_EQ(a->outcome(transfer->id), Outcome::kOk);
    }
}

TEST_F(EngineWatch, other_steps_are_nothing) {
    start();
    const auto transfer = submit(20, {1});
    for (std::uint64_t step = 1; step < 20; ++step) {
        a->engine->set_watch(*watch, step, 60);
        cluster.steps(5);
    }
    a->engine->set_watch(*watch, 20, 0);
    cluster.steps(100);
    EXPECT_TRUE(is_untouched(0));
    EXPECT_FALSE(a->ended(transfer->id));
    a->engine->set_watch(*watch, 20, 1);
    ASSERT_TRUE(wait_end(transfer));
}

// Whatever waits may be cancelled, expire, lose its peer or be closed, and ends once with what was never posted.
TEST_F(EngineWatch, waiting_ends_in_every_way) {
    start();
    const auto cancelled = submit(1, {0, 1});
    ASSERT_TRUE(cluster.wait([&] { return has_landed(0); }));
    a->engine->cancel(*cancelled);
    ASSERT_TRUE(wait_end(cancelled));
    EXPECT_EQ(a->outcome(cancelled->id), Outcome::kCancelled);
    EXPECT_EQ(a->ended(cancelled->id)->unposted.piece, 1u);

    const auto expired = submit(1, {1}, {}, now_ns() + 20 * kMillisecond);
    ASSERT_TRUE(wait_end(expired));
    EXPECT_EQ(a->outcome(expired->id), Outcome::kExpired);

    const auto lost = submit(1, {1});
    a->engine->remove_peer(a->peer(*b));
    ASSERT_TRUE(wait_end(lost));
    EXPECT_EQ(a->outcome(lost->id), Outcome::kFailed);

    const auto closed = submit(1, {1});
    EXPECT_THROW(a->engine->deregister(a->regions[0]), Error) << "it is in use";
    a->engine->close(kSecond);
    a->take();
    ASSERT_TRUE(a->ended(closed->id));
    EXPECT_EQ(a->outcome(closed->id), Outcome::kClosed);
    cluster.steps(50);
    EXPECT_TRUE(is_untouched(1));
}

TEST_F(EngineWatch, layers_must_ascend_and_words_must_fit) {
    start();
    EXPECT_THROW(submit(1, {2, 1}), Error);
    EXPECT_THROW(submit(std::uint64_t{1} << 48, {1}), Error);
    EXPECT_THROW(a->engine->set_watch(*watch, 1, 1 << 16), Error);
    EXPECT_EQ(word, 0u);
}

// Many requests in several steps, the layers done by another thread as fast as it can.
TEST_F(EngineWatch, a_thousand_waiting_transfers_each_end_once) {
    start();
    constexpr std::uint64_t kSteps = 10, kEach = 100, kLayers = 4;
    std::vector<std::shared_ptr<Transfer>> transfers;
    for (std::uint64_t step = 1; step <= kSteps; ++step)
        for (std::uint64_t i = 0; i < kEach; ++i) transfers.push_back(submit(step, {1, 2, 3, 4}));
    std::thread model([&] {
        for (std::uint64_t step = 1; step <= kSteps; ++step)
            for (std::uint64_t layer = 0; layer <= kLayers; ++layer) a->engine->set_watch(*watch, step, layer);
    });
    const bool all = cluster.wait(
        [&] { return std::all_of(transfers.begin(), transfers.end(), [&](auto& t) { return a->ended(t->id); }); });
    model.join();
    ASSERT_TRUE(all) << cluster.where();
    for (const auto& transfer : transfers) EXPECT_EQ(a->outcome(transfer->id), Outcome::kOk);
}

// A plan that is made once and posted with other pages each time.
TEST_F(EngineWatch, prepared_submissions_take_new_page_lists) {
    start();
    Engine::Prepared prepared{a->peer(*b), {}, {0, 1}};
    for (int i = 0; i < 2; ++i) {
        auto piece = a->piece(*b, 0, 0, kPage);
        piece.src_stride = piece.dst_stride = kPage;
        prepared.pieces.push_back(std::move(piece));
    }
    const auto lists = [](std::int64_t src, std::int64_t dst) {
        return std::pair{make_pages({src}), make_pages({dst})};
    };
    EXPECT_THROW(Engine::with_pages(prepared, {lists(0, 0)}), Error) << "a list is missing";
    for (std::int64_t round = 0; round < 3; ++round) {
        std::vector<Engine::Submission> one;
        one.push_back(Engine::with_pages(prepared, {lists(round, 10 + round), lists(5 + round, 20 + round)}));
        const auto transfer = a->engine->submit_pages(Transfer::Kind::kWrite, std::move(one), 0)[0];
        ASSERT_TRUE(wait_end(transfer));
        ASSERT_TRUE(cluster.wait([&] {
            return equal_now(&b->memory[(10 + round) * kPage], &a->memory[round * kPage], kPage) &&
                   equal_now(&b->memory[(20 + round) * kPage], &a->memory[(5 + round) * kPage], kPage);
        }));
    }
    std::vector<Engine::Submission> outside;
    outside.push_back(Engine::with_pages(prepared, {lists(0, 0), lists(0, 1 << 20)}));
    EXPECT_THROW(a->engine->submit_pages(Transfer::Kind::kWrite, std::move(outside), 0), Error);
}

}  // namespace
}  // namespace fkv::test
