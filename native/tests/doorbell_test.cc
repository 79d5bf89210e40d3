// Bells between processes, and what a NIC of libfabric's makes of them.
#include "ofi/doorbell.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <thread>

#include "nic_pair.h"
#include "ofi/ofi_nic.h"

namespace fkv::ofi {
namespace {

// No other test, and no other run, has it.
std::string name_of(const char* which) { return "test://" + std::to_string(::getpid()) + "/" + which; }

bool rings(int fd, int patience_ms = 10'000) {
    pollfd readable{fd, POLLIN, 0};
    return ::poll(&readable, 1, patience_ms) == 1;
}

void let_it_fall_asleep() { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }

TEST(Doorbell, rings_for_the_first_post_after_silence) {
    Doorbell theirs(name_of("theirs"), true), ours(name_of("ours"), true);
    ASSERT_GE(theirs.fd(), 0);
    ours.add(7, name_of("theirs"));
    EXPECT_FALSE(theirs.clear());
    ours.posted(7);
    EXPECT_TRUE(rings(theirs.fd()));
    EXPECT_TRUE(theirs.clear());
    EXPECT_FALSE(rings(theirs.fd(), 0));
    let_it_fall_asleep();
    ours.posted(7);
    EXPECT_TRUE(rings(theirs.fd()));
    EXPECT_FALSE(rings(ours.fd(), 0));
}

TEST(Doorbell, who_does_not_listen_is_left_alone) {
    Doorbell silent(name_of("silent"), false), ours(name_of("ours"), true);
    EXPECT_EQ(silent.fd(), -1);
    ours.add(1, name_of("silent"));
    ours.posted(1);  // refused: from now on nothing is tried
    Doorbell late(name_of("silent"), true);
    let_it_fall_asleep();
    ours.posted(1);
    EXPECT_FALSE(late.clear());
    ours.posted(2);  // nobody
}

TEST(Doorbell, a_full_queue_still_rings) {
    Doorbell theirs(name_of("theirs"), true), ours(name_of("ours"), true);
    ours.add(1, name_of("theirs"));
    for (int i = 0; i < 300; ++i) {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
        ours.posted(1);
    }
    for (int i = 0; i < 300 && theirs.clear(); ++i) {
    }
    EXPECT_FALSE(theirs.clear());
    let_it_fall_asleep();
    ours.posted(1);
    EXPECT_TRUE(rings(theirs.fd()));
}

TEST(Doorbell, names_are_taken_once_and_freed) {
    {
        Doorbell first(name_of("same"), true), second(name_of("same"), true);
        EXPECT_GE(first.fd(), 0);
        EXPECT_EQ(second.fd(), -1);
    }
    EXPECT_GE(Doorbell(name_of("same"), true).fd(), 0);
}

TEST(Doorbell, long_addresses_differ_by_their_ends) {
    const auto front = std::string(300, 'x') + name_of("");
    Doorbell a(front + "a", true), b(front + "b", true), ours(name_of("ours"), true);
    ASSERT_GE(a.fd(), 0);
    ASSERT_GE(b.fd(), 0);
    ours.add(1, front + "b");
    ours.posted(1);
    EXPECT_TRUE(rings(b.fd()));
    EXPECT_FALSE(a.clear());
}

// Two endpoints of shm, which has no descriptor of its own.
TEST(Doorbell, shm_rings_for_what_is_posted) {
    const auto open = [](bool sleeps) {
        return [sleeps](const test::Arena&) { return open_nic(std::move(find_nics({"shm", {}}).front()), sleeps); };
    };
    if (list_offers("shm").empty()) GTEST_SKIP() << "libfabric offers no shm";
    test::NicPair pair(open(true), 4096);
    auto &a = *pair.a, &b = *pair.b;
    EXPECT_FALSE(b.nic->info().wait_fd);
    ASSERT_TRUE(b.nic->wait_is_hint());
    ASSERT_TRUE(pair.write(a, b, 0, 64, 0, 1u));
    EXPECT_TRUE(rings(b.nic->wait_fd()));
    EXPECT_FALSE(b.nic->may_sleep());  // look first
    ASSERT_TRUE(pair.drive([&] { return b.imms.size() == 1 && a.num_sent == 1; }));
    ASSERT_TRUE(pair.drive([&] { return b.nic->may_sleep(); }));
    EXPECT_FALSE(rings(b.nic->wait_fd(), 0));

    test::NicPair awake(open(false), 4096);
    EXPECT_FALSE(awake.b->nic->wait_is_hint());
    EXPECT_EQ(awake.b->nic->wait_fd(), -1);
    ASSERT_TRUE(awake.write(*awake.a, *awake.b, 0, 64, 0, 1u));
    ASSERT_TRUE(awake.drive([&] { return awake.b->imms.size() == 1; }));
}

}  // namespace
}  // namespace fkv::ofi
