// Figures that one thread writes and others read.
#include "engine/stats.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

namespace fkv {
namespace {

TEST(Stopwatch, counts_what_has_ended_and_what_lasts_now) {
    Stopwatch watch;
    EXPECT_EQ(watch.get_ns(), 0U);
    watch.begin(1000);
    watch.end(1600);
    EXPECT_EQ(watch.get_ns(), 600U);
    watch.begin(now_ns() - kSecond);
    const auto first = watch.get_ns();
    EXPECT_GE(first, 600U + kSecond);
    EXPECT_GE(watch.get_ns(), first);  // though it has not ended
    watch.end(now_ns());
    const auto ended = watch.get_ns();
    EXPECT_GE(ended, first);
    EXPECT_EQ(watch.get_ns(), ended);
}

TEST(Stopwatch, nobody_reads_more_than_has_passed) {
    Stopwatch watch;
    std::atomic<bool> over{false};
    const auto begun = now_ns();
    std::thread writer([&] {
        for (int i = 0; i < 20'000; ++i) {
            watch.begin(now_ns());
            watch.end(now_ns());
        }
        over = true;
    });
    while (!over) {
        const auto read = watch.get_ns();
        EXPECT_LE(read, static_cast<std::uint64_t>(now_ns() - begun));
    }
    writer.join();
}

}  // namespace
}  // namespace fkv
