// When a thread that drives NICs falls asleep, told by a clock of the test's own.

#include "engine/rest.h"

#include <gtest/gtest.h>

#include "base/clock.h"

namespace fkv {
namespace {

// A thread without NICs, whose rounds take as long as a test says.
class Sleeper {
  public:
    explicit Sleeper(bool spin = false) : rest_(spin, {}) {
        round(false, kSecond);  // it has been idle for ever
    }

    // A round that has just ended. Whether the thread wanted to sleep after it.
    bool round(bool worked, std::int64_t took_ns = 0, bool outstanding = false) {
        bool wanted = false;
        rest_.rest({worked, outstanding, false, false, 0}, now_ns_, [&] {
            wanted = true;
            return false;
        });
        now_ns_ += took_ns;
        return wanted;
    }

    // Silence, seen by a look at its end.
    bool silence(std::int64_t ns, bool outstanding = false) {
        now_ns_ += ns;
        return round(false, 0, outstanding);
    }

    // What comes after so long a silence.
    void arrival(std::int64_t after_ns) {
        now_ns_ += after_ns;
        round(true);
        round(false);
    }

  private:
    Rest rest_;
    std::int64_t now_ns_ = kSecond;
};

TEST(Rest, SleepsSoonerWhereNothingIsDue) {
    Sleeper sleeper;
    sleeper.arrival(kSecond);
    EXPECT_FALSE(sleeper.silence(40 * kMicrosecond));
    EXPECT_TRUE(sleeper.silence(20 * kMicrosecond));
    sleeper.arrival(kSecond);
    EXPECT_FALSE(sleeper.silence(190 * kMicrosecond, true));
    EXPECT_TRUE(sleeper.silence(20 * kMicrosecond, true));
}

TEST(Rest, CountsSilenceFromTheEndOfALongRound) {
    Sleeper sleeper;
    sleeper.round(true, 3 * kMillisecond);
    EXPECT_FALSE(sleeper.round(false));
    EXPECT_FALSE(sleeper.silence(40 * kMicrosecond));
    EXPECT_TRUE(sleeper.silence(20 * kMicrosecond));
}

TEST(Rest, WaitsLongerInAStream) {
    Sleeper sleeper;
    sleeper.arrival(kSecond);
    for (int i = 0; i < 4; ++i) sleeper.arrival((100 + i) * kMicrosecond);
    EXPECT_FALSE(sleeper.silence(200 * kMicrosecond));
    EXPECT_TRUE(sleeper.silence(10 * kMicrosecond));
    // Whatever comes so late is no stream any more, nor is what has not gone on for long.
    sleeper.arrival(600 * kMicrosecond);
    for (int i = 0; i < 3; ++i) sleeper.arrival(100 * kMicrosecond);
    EXPECT_TRUE(sleeper.silence(60 * kMicrosecond));
}

TEST(Rest, HeartbeatsAreNoStream) {
    Sleeper sleeper;
    for (int i = 0; i < 100; ++i) {
        sleeper.arrival(250 * kMillisecond);  // a ping of ours ...
        sleeper.arrival(80 * kMicrosecond);   // ... and its answer
        ASSERT_TRUE(sleeper.silence(60 * kMicrosecond));
    }
}

TEST(Rest, NeverSleepsWhereItShallSpin) {
    Sleeper sleeper(true);
    EXPECT_FALSE(sleeper.silence(kSecond));
}

}  // namespace
}  // namespace fkv
