// Who is alive, by a clock that the test holds.
#include "engine/heartbeat.h"

#include <gtest/gtest.h>

#include <optional>
#include <random>

namespace fkv {
namespace {

constexpr std::int64_t kMs = kMillisecond;

class Heartbeats : public ::testing::Test {
  protected:
    static std::shared_ptr<Peer> peer(int id) {
        auto p = std::make_shared<Peer>();
        p->epoch[0] = static_cast<std::byte>(id);
        p->groups.resize(1);
        p->sides.resize(1);
        return p;
    }

    // One check at `ms`, and nothing else happens until then.
    void check(std::int64_t ms) {
        heartbeat->check(
            ms * kMs, in_order,
            [&](const std::shared_ptr<Peer>& p) {
                pings.emplace_back(std::to_integer<int>(p->epoch[0]), ms);
                return can_ping;
            },
            [&](Peer& p, std::int64_t silent_ns) {
                lost.emplace_back(std::to_integer<int>(p.epoch[0]), silent_ns / kMs);
            },
            [&](Peer& p) { left.push_back(std::to_integer<int>(p.epoch[0])); });
    }
    // Checks every 10 ms, as the progress thread does.
    void checks(std::int64_t from_ms, std::int64_t to_ms) {
        for (auto ms = from_ms; ms <= to_ms; ms += 10) check(ms);
    }

    static constexpr HeartbeatOptions kOptions{200 * kMs, 5, 5000 * kMs};
    std::optional<Heartbeat> heartbeat{kOptions};
    bool can_ping = true, in_order = true;
    std::vector<std::pair<int, std::int64_t>> pings, lost;
    std::vector<int> left;
};

TEST_F(Heartbeats, pings_at_the_interval) {
    check(0);
    heartbeat->watch(peer(1), 0);
    checks(10, 1000);
    ASSERT_EQ(pings.size(), 5u);
    EXPECT_EQ(pings[0].second, 10);
    EXPECT_EQ(pings[4].second, 810);
}

TEST_F(Heartbeats, a_peer_that_is_added_again_takes_the_place_of_the_removed_one) {
    const auto old = peer(1), again = peer(1);
    check(0);
    heartbeat->watch(old, 0);
    check(10);
    old->removed = true;
    heartbeat->watch(again, 15 * kMs);
    heartbeat->watch(again, 400 * kMs);  // changes nothing
    checks(20, 6000);
    EXPECT_EQ(pings.size(), 26u);  // one to the old one, and then every 200 ms
    ASSERT_EQ(lost.size(), 1u);
    EXPECT_EQ(lost[0].second, 5005);
}

TEST_F(Heartbeats, a_ping_that_could_not_be_posted_is_tried_at_the_next_check) {
    check(0);
    heartbeat->watch(peer(1), 0);
    can_ping = false;
    checks(10, 50);
    can_ping = true;
    checks(60, 250);
    ASSERT_EQ(pings.size(), 6u);  // five refused, one sent; the next is due at 260 ms
    check(260);
    EXPECT_EQ(pings.back().second, 260);
}

TEST_F(Heartbeats, a_silent_peer_is_lost_once_within_its_bound) {
    check(0);
    const auto p = peer(1);
    heartbeat->watch(p, 0);
    heartbeat->heard(p->epoch, 100 * kMs);
    checks(10, 3000);
    ASSERT_EQ(lost.size(), 1u);
    EXPECT_EQ(lost[0], std::pair(1, std::int64_t{1010}));  // heard at 100 ms, 5 x 200 ms, first check after that
    EXPECT_TRUE(heartbeat->empty());
}

TEST_F(Heartbeats, whoever_is_heard_stays) {
    check(0);
    const auto p = peer(1);
    heartbeat->watch(p, 0);
    for (std::int64_t ms = 10; ms < 60'000; ms += 10) {
        if (ms % 900 == 0) heartbeat->heard(p->epoch, ms * kMs);
        check(ms);
    }
    EXPECT_TRUE(lost.empty());
}

TEST_F(Heartbeats, before_the_first_sign_of_life_the_connect_bound_holds) {
    check(0);
    heartbeat->watch(peer(1), 0);
    checks(10, 5000);
    EXPECT_TRUE(lost.empty());
    check(5010);
    EXPECT_EQ(lost.size(), 1u);
}

TEST_F(Heartbeats, each_peer_has_its_own_clock) {
    check(0);
    const auto a = peer(1), b = peer(2);
    heartbeat->watch(a, 0);
    heartbeat->watch(b, 0);
    for (std::int64_t ms = 10; ms <= 3000; ms += 10) {
        heartbeat->heard(a->epoch, ms * kMs);
        if (ms <= 500) heartbeat->heard(b->epoch, ms * kMs);
        check(ms);
    }
    ASSERT_EQ(lost.size(), 1u);
    EXPECT_EQ(lost[0].first, 2);
}

TEST_F(Heartbeats, watching_twice_changes_nothing) {
    check(0);
    const auto p = peer(1);
    heartbeat->watch(p, 0);
    checks(10, 4000);
    heartbeat->watch(p, 4000 * kMs);  // must not start the connect bound anew
    checks(4010, 5100);
    EXPECT_EQ(lost.size(), 1u);
}

TEST_F(Heartbeats, a_removed_peer_is_not_reported) {
    check(0);
    const auto p = peer(1);
    heartbeat->watch(p, 0);
    p->removed = true;  // and the call that forgets it found the queue full
    checks(10, 10'000);
    EXPECT_TRUE(lost.empty());
    EXPECT_TRUE(heartbeat->empty());
}

TEST_F(Heartbeats, a_peer_that_has_said_goodbye_is_reported_once_and_pinged_no_more) {
    check(0);
    const auto p = peer(1);
    heartbeat->watch(p, 0);
    checks(10, 300);
    const auto pinged = pings.size();
    p->leaving = true;
    checks(310, 1000);
    EXPECT_TRUE(left.empty()) << "what it wrote elsewhere may not have come yet";
    p->pairs_heard = 1;
    checks(1010, 10'000);
    EXPECT_EQ(left, std::vector{1});
    EXPECT_TRUE(lost.empty());
    EXPECT_FALSE(p->silent);
    EXPECT_EQ(pings.size(), pinged);
}

// Of its goodbyes some may never come, or come before what was written earlier.
TEST_F(Heartbeats, one_that_has_said_goodbye_has_left_when_it_is_silent) {
    for (const bool ordered : {true, false}) {
        heartbeat.emplace(kOptions);
        in_order = ordered;
        left.clear();
        check(0);
        const auto p = peer(1);
        heartbeat->watch(p, 0);
        heartbeat->heard(p->epoch, 100 * kMs);
        p->leaving = true;
        p->pairs_heard = ordered ? 0 : 1;
        checks(10, 1100);
        EXPECT_TRUE(left.empty());
        checks(1110, 3000);
        EXPECT_EQ(left, std::vector{1});
    }
    EXPECT_TRUE(lost.empty());
}

TEST_F(Heartbeats, one_that_is_watched_again_is_not_silent_any_more) {
    check(0);
    const auto p = peer(1);
    heartbeat->watch(p, 0);
    checks(10, 5010);
    ASSERT_EQ(lost.size(), 1u);
    EXPECT_TRUE(p->silent);
    heartbeat->watch(p, 5020 * kMs);
    EXPECT_FALSE(p->silent);
}

// Our own absence (suspended, starved of CPU) is not held against the peers.
TEST_F(Heartbeats, a_late_check_blames_nobody) {
    check(0);
    const auto p = peer(1);
    heartbeat->watch(p, 0);
    heartbeat->heard(p->epoch, 0);
    checks(10, 500);
    check(60'000);
    EXPECT_TRUE(lost.empty());
    checks(60'010, 60'500);  // 500 ms of silence from before count, and now these
    EXPECT_TRUE(lost.empty());
    checks(60'510, 60'600);
    EXPECT_EQ(lost.size(), 1u);
}

// While our own inbox is full we take nothing from the network, pings included.
TEST_F(Heartbeats, silence_is_no_evidence_while_we_are_deaf) {
    check(0);
    const auto p = peer(1);
    heartbeat->watch(p, 0);
    heartbeat->heard(p->epoch, 0);
    for (std::int64_t ms = 10; ms <= 10'000; ms += 10) {
        heartbeat->deaf(ms * kMs);
        check(ms);
    }
    EXPECT_TRUE(lost.empty());
    checks(10'010, 11'100);
    EXPECT_EQ(lost.size(), 1u);
}

TEST_F(Heartbeats, random_silences_are_lost_exactly_when_too_long) {
    const auto seed = std::random_device{}();
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    for (int round = 0; round < 300; ++round) {
        heartbeat.emplace(kOptions);
        lost.clear();
        check(0);
        const auto p = peer(1);
        heartbeat->watch(p, 0);
        heartbeat->heard(p->epoch, 0);
        std::int64_t heard = 0, next = random() % 1300, expected = -1;
        for (std::int64_t ms = 10; ms <= 8000; ms += 10) {
            if (next < ms && expected < 0) {
                heartbeat->heard(p->epoch, (heard = next) * kMs);
                next += 1 + random() % 1100;
            }
            if (expected < 0 && ms - heard > 1000) expected = ms;
            check(ms);
            ASSERT_EQ(lost.size(), expected < 0 ? 0u : 1u) << "at " << ms << " ms, heard at " << heard;
        }
    }
}

}  // namespace
}  // namespace fkv
