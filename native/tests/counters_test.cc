// Completion counters: exact, once, and never another life's business.
#include "engine/counters.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <barrier>
#include <functional>
#include <random>
#include <thread>

#include "base/error.h"

namespace fkv {
namespace {

using Verdict = CounterVerdict;

Imm imm_for(const CounterToken& token, std::uint32_t weight) { return {token.slot, token.generation, weight}; }

ErrorKind kind_of(const std::function<void()>& call) {
    try {
        call();
    } catch (const Error& error) {
        return error.kind();
    }
    ADD_FAILURE() << "no error was thrown";
    return ErrorKind::kInternal;
}

TEST(Counters, fires_once_at_exactly_its_total) {
    CounterTable table(4);
    const auto token = table.allocate(4096);
    EXPECT_EQ(table.arm(token, 5), Verdict::kNothing);
    EXPECT_EQ(table.add(imm_for(token, 2)), Verdict::kNothing);
    EXPECT_EQ(table.received(token), 2u);
    EXPECT_EQ(table.add(imm_for(token, 3)), Verdict::kFired);
    EXPECT_EQ(table.add(imm_for(token, 1)), Verdict::kLate);
    EXPECT_EQ(table.received(token), 5u);
}

TEST(Counters, arrivals_before_arming_are_kept) {
    CounterTable table(1);
    const auto token = table.allocate(1);
    EXPECT_EQ(table.add(imm_for(token, kMaxWeight)), Verdict::kNothing);
    EXPECT_EQ(table.add(imm_for(token, 1)), Verdict::kNothing);
    EXPECT_EQ(table.arm(token, kMaxWeight + 1), Verdict::kFired);
}

TEST(Counters, nothing_expected_fires_when_armed) {
    CounterTable table(1);
    EXPECT_EQ(table.arm(table.allocate(1), 0), Verdict::kFired);
}

TEST(Counters, more_than_the_total_is_an_overrun_never_at_least) {
    CounterTable table(2);
    const auto late = table.allocate(1), early = table.allocate(1);
    table.arm(late, 3);
    EXPECT_EQ(table.add(imm_for(late, 4)), Verdict::kOverrun);
    EXPECT_EQ(table.add(imm_for(late, 1)), Verdict::kLate);
    table.add(imm_for(early, 4));
    EXPECT_EQ(table.arm(early, 3), Verdict::kOverrun);
}

TEST(Counters, totals_may_exceed_32_bits) {
    CounterTable table(1);
    const auto token = table.allocate(1);
    table.arm(token, (std::uint64_t{1} << 57) - 1);
    EXPECT_EQ(table.add(imm_for(token, kMaxWeight)), Verdict::kNothing);
    CounterTable other(1);
    const auto another = other.allocate(1);
    EXPECT_EQ(kind_of([&] { other.arm(another, std::uint64_t{1} << 57); }), ErrorKind::kConfig);
}

TEST(Counters, slots_are_reused_oldest_first_in_another_generation) {
    CounterTable table(3);
    const auto a = table.allocate(1), b = table.allocate(1);
    table.release(b, true);
    table.release(a, true);
    std::vector<std::uint32_t> order;
    for (int i = 0; i < 3; ++i) order.push_back(table.allocate(1).slot);
    EXPECT_EQ(order, (std::vector<std::uint32_t>{2, b.slot, a.slot}));
    EXPECT_EQ(table.num_in_use(), 3u);
}

TEST(Counters, a_former_generation_is_stale) {
    CounterTable table(1);
    const auto first = table.allocate(1);
    table.release(first, true);
    const auto second = table.allocate(1);
    EXPECT_EQ(second.slot, first.slot);
    EXPECT_NE(second.generation, first.generation);
    table.arm(second, 1);
    EXPECT_EQ(table.add(imm_for(first, 1)), Verdict::kStale);
    EXPECT_EQ(table.received(second), 0u);
    EXPECT_EQ(table.received(first), 0u);
    EXPECT_EQ(table.add(imm_for(second, 1)), Verdict::kFired);
}

TEST(Counters, a_slot_that_does_not_exist_is_stale) {
    CounterTable table(2);
    EXPECT_EQ(table.add({2, 0, 1}), Verdict::kStale);
    EXPECT_EQ(table.add({kUserSlot, 0, 1}), Verdict::kStale);
}

// What arrives for a slot that nobody holds must not count for whoever takes it next.
TEST(Counters, a_free_slot_takes_nothing) {
    CounterTable table(1);
    EXPECT_EQ(table.add({0, 0, 7}), Verdict::kLate) << "never allocated";
    const auto first = table.allocate(1);
    EXPECT_EQ(table.received(first), 0u);
    table.arm(first, 2);
    EXPECT_EQ(table.add(imm_for(first, 2)), Verdict::kFired);
    table.release(first, true);
    // The former total was 2: neither firing nor counting may leak into the next life.
    EXPECT_EQ(table.add({0, first.generation + 1, 2}), Verdict::kLate) << "released";
    const auto second = table.allocate(1);
    EXPECT_EQ(table.received(second), 0u);
    EXPECT_EQ(table.arm(second, 1), Verdict::kNothing);
    EXPECT_EQ(table.add(imm_for(second, 1)), Verdict::kFired);
}

TEST(Counters, without_proof_of_quiescence_a_slot_is_poisoned) {
    CounterTable table(1);
    const auto token = table.allocate(1);
    table.add(imm_for(token, 1));
    EXPECT_FALSE(table.release(token, false));
    EXPECT_EQ(table.num_poisoned(), 1u);
    EXPECT_EQ(table.num_in_use(), 0u);
    EXPECT_EQ(table.add(imm_for(token, 1)), Verdict::kStale);
    EXPECT_EQ(kind_of([&] { table.allocate(1); }), ErrorKind::kWouldBlock);
}

// Every write of a counter that fired has arrived, so that is proof enough, whoever asks.
TEST(Counters, having_fired_is_proof_of_quiescence) {
    CounterTable table(1);
    const auto token = table.allocate(1);
    table.arm(token, 1);
    table.add(imm_for(token, 1));
    EXPECT_TRUE(table.release(token, false));
    EXPECT_EQ(table.num_poisoned(), 0u);
    const auto overrun = table.allocate(1);
    table.arm(overrun, 1);
    table.add(imm_for(overrun, 2));
    EXPECT_FALSE(table.release(overrun, false));
    EXPECT_EQ(table.num_poisoned(), 1u);
}

TEST(Counters, misuse_is_refused_and_changes_nothing) {
    CounterTable table(1);
    const auto token = table.allocate(4096);
    EXPECT_EQ(kind_of([&] { table.allocate(4096); }), ErrorKind::kWouldBlock);
    EXPECT_EQ(kind_of([&] { table.allocate(0); }), ErrorKind::kConfig);
    table.arm(token, 2);
    EXPECT_EQ(kind_of([&] { table.arm(token, 2); }), ErrorKind::kConfig) << "armed twice";
    EXPECT_EQ(kind_of([&] { table.arm({0, token.generation + 1, 1}, 2); }), ErrorKind::kConfig);
    EXPECT_EQ(kind_of([&] { table.arm({1, 0, 1}, 2); }), ErrorKind::kConfig) << "no such slot";
    table.release(token, true);
    EXPECT_EQ(kind_of([&] { table.release(token, true); }), ErrorKind::kConfig) << "released twice";
    EXPECT_EQ(kind_of([&] { table.arm(token, 2); }), ErrorKind::kConfig) << "armed after release";
    table.allocate(1);
    EXPECT_EQ(kind_of([&] { table.allocate(1); }), ErrorKind::kWouldBlock) << "freed once, not twice";
    EXPECT_EQ(kind_of([] { CounterTable none(0); }), ErrorKind::kConfig);
    EXPECT_EQ(kind_of([] { CounterTable many(kUserSlot + 1); }), ErrorKind::kConfig);
}

TEST(Counters, generations_wrap_around) {
    CounterTable table(1);
    for (std::uint32_t life = 0; life < 3 * kNumGenerations; ++life) {
        const auto token = table.allocate(1);
        EXPECT_EQ(token.generation, life % kNumGenerations);
        table.arm(token, 1);
        EXPECT_EQ(table.add(imm_for(token, 1)), Verdict::kFired);
        table.release(token, true);
    }
}

// The one race that matters: the total and the last arrival become known at the same time, to two threads.
TEST(Counters, arming_and_the_last_arrival_fire_once_between_them) {
    constexpr std::uint32_t kSlots = 50'000;
    CounterTable table(kSlots);
    std::vector<CounterToken> tokens;
    for (std::uint32_t i = 0; i < kSlots; ++i) tokens.push_back(table.allocate(1));
    std::vector<std::atomic<int>> num_fired(kSlots);
    std::atomic<std::uint32_t> turns[2] = {0, 0};
    auto both = [&](int me, auto&& act) {
        for (std::uint32_t i = 0; i < kSlots; ++i) {
            // Side by side: neither thread is ever a slot ahead.
            turns[me].store(i + 1);
            while (turns[1 - me].load() < i + 1) std::this_thread::yield();
            if (act(tokens[i]) == Verdict::kFired) ++num_fired[i];
        }
    };
    std::thread arming([&] { both(0, [&](const auto& token) { return table.arm(token, 3); }); });
    both(1, [&](const auto& token) { return table.add(imm_for(token, 3)); });
    arming.join();
    for (auto& count : num_fired) ASSERT_EQ(count, 1);
}

// One million events of every kind on four threads, in an order that nobody chose: each counter's arrivals (its total
// cut at random) and its arming, stale and late ones, extra units for some, cancelling for others, and every release
// tried by two threads at once.
class CounterStorm {
  public:
    explicit CounterStorm(std::uint32_t seed) : random_(seed), round_start_(kThreads), round_end_(kThreads) {}

    void run(std::size_t num_events) {
        std::vector<std::thread> threads;
        for (std::size_t i = 0; i < kThreads; ++i)
            threads.emplace_back([this, i, num_events] {
                for (;;) {
                    round_start_.arrive_and_wait();
                    if (finished_) return;
                    for (const auto& event : work_[i]) act(event);
                    round_end_.arrive_and_wait();
                    if (i == 0) check();
                    round_end_.arrive_and_wait();
                    // Two threads try each release; one must win.
                    if (i < 2)
                        for (auto& life : lives_) release(life);
                    round_end_.arrive_and_wait();
                    if (i == 0) {
                        for (auto& life : lives_) EXPECT_EQ(life.num_released, 1);
                        done_ += prepared_;
                        finished_ = done_ >= num_events || ::testing::Test::HasFailure();
                        if (!finished_) prepare();
                    }
                }
            });
        for (auto& thread : threads) thread.join();
        EXPECT_EQ(table_.num_in_use(), 0u);
        EXPECT_EQ(table_.num_poisoned(), num_poisoned_);
    }

    void prepare() {
        lives_ = std::vector<Life>(kLives);
        std::vector<Event> events;
        for (auto& life : lives_) {
            life.token = table_.allocate(1);
            for (auto left = life.total = random_() % 5000; left > 0;) {
                const auto weight = 1 + random_() % std::min<std::uint64_t>(left, random_() % 4 ? 40 : kMaxWeight);
                events.push_back({Event::kArrive, &life, static_cast<std::uint32_t>(weight)});
                left -= weight;
            }
            if (random_() % 16 == 0) {
                life.extra = 1 + random_() % 8;
                events.push_back({Event::kArrive, &life, static_cast<std::uint32_t>(life.extra)});
            }
            if (random_() % 64 == 0) {
                life.cancelled = true;
                events.push_back({Event::kCancel, &life, 0});
            }
            events.push_back({Event::kArm, &life, 0});
            for (auto n = random_() % 4; n > 0; --n) events.push_back({Event::kStale, &life, 1});
            for (auto n = random_() % 4; n > 0; --n) events.push_back({Event::kWholeLife, &life, 1});
        }
        prepared_ = events.size();
        std::shuffle(events.begin(), events.end(), random_);
        for (auto& work : work_) work.clear();
        for (std::size_t i = 0; i < events.size(); ++i) work_[i % kThreads].push_back(events[i]);
    }

  private:
    static constexpr std::size_t kThreads = 4, kLives = 48;

    struct Life {
        CounterToken token;
        std::uint64_t total = 0, extra = 0;
        bool cancelled = false;
        std::atomic<int> num_fired{0}, num_overrun{0}, num_stale{0}, num_released{0};
    };
    struct Event {
        enum Kind { kArrive, kArm, kStale, kCancel, kWholeLife } kind;
        Life* life;
        std::uint32_t weight;
    };

    void note(Life& life, Verdict verdict) {
        if (verdict == Verdict::kFired) ++life.num_fired;
        if (verdict == Verdict::kOverrun) ++life.num_overrun;
        if (verdict == Verdict::kStale) ++life.num_stale;
    }

    void act(const Event& event) {
        auto& life = *event.life;
        switch (event.kind) {
            case Event::kArrive:
                return note(life, table_.add(imm_for(life.token, event.weight)));
            case Event::kStale:
                EXPECT_EQ(table_.add({life.token.slot, (life.token.generation + 7) % kNumGenerations, event.weight}),
                          Verdict::kStale);
                return;
            case Event::kCancel:
                return release(life);
            case Event::kWholeLife: {  // of another counter, beside all of that
                const auto token = table_.allocate(1);
                EXPECT_EQ(table_.add(imm_for(token, event.weight)), Verdict::kNothing);
                EXPECT_EQ(table_.arm(token, event.weight), Verdict::kFired);
                EXPECT_TRUE(table_.release(token, false));
                return;
            }
            case Event::kArm:
                try {
                    note(life, table_.arm(life.token, life.total));
                } catch (const Error&) {
                    EXPECT_TRUE(life.cancelled);
                }
        }
    }

    void release(Life& life) {
        try {
            if (!table_.release(life.token, !life.cancelled)) ++num_poisoned_;
            ++life.num_released;
        } catch (const Error&) {  // the other thread was first
        }
    }

    void check() {
        for (auto& life : lives_) {
            if (life.cancelled) {
                EXPECT_LE(life.num_fired + life.num_overrun, 1);
                continue;
            }
            EXPECT_EQ(life.num_stale, 0);
            EXPECT_EQ(life.num_fired + life.num_overrun, 1) << "lost or fired twice";
            if (life.extra == 0) {
                EXPECT_EQ(life.num_fired, 1);
                EXPECT_EQ(table_.received(life.token), life.total);
            }
        }
    }

    std::mt19937 random_;
    CounterTable table_{4096};
    std::vector<Life> lives_;
    std::array<std::vector<Event>, kThreads> work_;
    std::barrier<> round_start_, round_end_;
    std::size_t prepared_ = 0, done_ = 0;
    std::atomic<std::uint32_t> num_poisoned_{0};
    bool finished_ = false;
};

TEST(Counters, a_million_events_from_four_threads_are_counted_exactly) {
    const auto seed = std::random_device{}();
    SCOPED_TRACE("seed " + std::to_string(seed));
    CounterStorm storm(seed);
    storm.prepare();
    storm.run(1'000'000);
}

}  // namespace
}  // namespace fkv
