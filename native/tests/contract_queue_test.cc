// What the engine relies on while nothing fails: messages, queues, limits, descriptors, addresses.
#include <poll.h>

#include <algorithm>

#include "contract.h"

namespace fkv::test {
namespace {

class Queues : public Contract {};
INSTANTIATE_TEST_SUITE_P(Fabrics, Queues, ::testing::ValuesIn(subjects()), subject_name);

TEST_P(Queues, messages_of_all_sizes) {
    auto pair = make_pair(1 << 20);
    auto &a = *pair->a, &b = *pair->b;
    write_stamp(a.memory, 9);
    std::size_t count = 0;
    for (const std::size_t nbytes : {0u, 1u, 64u, 4096u, 16384u, 65536u, 262144u}) {
        if (nbytes > info_.max_msg_bytes) break;
        ASSERT_TRUE(b.post_recv(nbytes + 1));
        auto* sent = pair->send(a, 0, nbytes);
        ASSERT_TRUE(sent) << nbytes << " bytes: " << a.nic->last_post_error().text;
        ASSERT_TRUE(pair->drive([&] { return b.received.size() == count + 1 && sent->num_ends == 1; })) << nbytes;
        ASSERT_FALSE(sent->error) << nbytes << ": " << sent->error->text;
        const auto* got = b.received[count++];
        EXPECT_EQ(got->nbytes, nbytes);
        EXPECT_TRUE(has_stamp(got->buffer.first(nbytes), 9)) << nbytes;
    }
}

TEST_P(Queues, messages_wait_for_receives) {
    auto pair = make_pair();
    auto &a = *pair->a, &b = *pair->b;
    constexpr std::size_t kMessages = 12, kBytes = 512;
    for (std::size_t i = 0; i < kMessages; ++i) {
        write_stamp(std::span(a.memory).subspan(i * kBytes, kBytes), i);
        ASSERT_TRUE(pair->send(a, i * kBytes, kBytes)) << a.nic->last_post_error().text;
    }
    settle(*pair);
    EXPECT_EQ(b.received.size(), 0u);
    for (std::size_t i = 0; i < kMessages; ++i) ASSERT_TRUE(b.post_recv(kBytes));
    ASSERT_TRUE(pair->drive([&] { return b.received.size() == kMessages && a.num_sent == kMessages; }));
    bool in_order = true;
    std::vector<bool> seen(kMessages);
    for (std::size_t i = 0; i < kMessages; ++i)
        for (std::size_t k = 0; k < kMessages; ++k)
            if (has_stamp(b.received[i]->buffer.first(kBytes), k)) {
                seen[k] = true;
                in_order &= i == k;
            }
    EXPECT_EQ(std::count(seen.begin(), seen.end(), true), static_cast<std::ptrdiff_t>(kMessages));
    record_if("messages_in_order", in_order);
}

// tx_depth operations are accepted without a poll, unless the provider says kAgain; polling always makes room.
TEST_P(Queues, full_queue_says_again_and_polling_clears_it) {
    auto pair = make_pair();
    auto &a = *pair->a, &b = *pair->b;
    b.keep_receives(16, 0);
    // Providers that connect late take nothing before: that is not the queue.
    ASSERT_TRUE(pair->write(a, b, 0, 1024, 0, 4u));
    ASSERT_TRUE(pair->drive([&] { return b.imms.size() == 1 && a.num_sent == 1; }));
    const std::size_t limit = info_.tx_depth + 64;
    std::vector<Posted*> ops;
    while (ops.size() < limit) {
        auto* op = a.try_write(0, 1024, b.remote().base, b.remote().rkey, 5u);
        if (!op) break;
        ops.push_back(op);
    }
    ASSERT_NE(a.last_result, PostResult::kFailed) << a.nic->last_post_error().text;
    record("accepted_without_poll", ops.size() == limit            ? "more_than_tx_depth"
                                    : ops.size() == info_.tx_depth ? "tx_depth"
                                                                   : std::to_string(ops.size()));
    auto* last = pair->write(a, b, 0, 1024, 0, 6u);
    ASSERT_TRUE(last);
    ops.push_back(last);
    ASSERT_TRUE(
        pair->drive([&] { return b.imms.size() == ops.size() + 1 && a.num_sent == ops.size() + 1; }, patience(20'000)))
        << b.imms.size() << " immediates and " << a.num_sent << " completions of " << ops.size();
    EXPECT_EQ(a.num_failed + a.stray_errors.size() + b.stray_errors.size(), 0u);
}

TEST_P(Queues, longest_operation_passes_and_a_longer_one_is_refused) {
    record("max_msg_bytes",
           info_.max_msg_bytes > (std::uint64_t{1} << 40) ? "unlimited" : std::to_string(info_.max_msg_bytes));
    if (info_.max_msg_bytes > 32 << 20) GTEST_SKIP() << "max_msg_bytes is " << info_.max_msg_bytes;
    auto pair = make_pair(info_.max_msg_bytes + 1);
    auto &a = *pair->a, &b = *pair->b;
    b.keep_receives(4, 0);
    write_stamp(a.memory, 3);
    ASSERT_TRUE(pair->write(a, b, 0, info_.max_msg_bytes, 0, 1u));
    ASSERT_TRUE(pair->drive([&] { return b.imms.size() == 1; }, patience(20'000)));
    EXPECT_TRUE(has_stamp(std::span(b.memory).first(info_.max_msg_bytes), 3));
    EXPECT_FALSE(pair->write(a, b, 0, info_.max_msg_bytes + 1, 0, 1u));
    EXPECT_EQ(a.last_result, PostResult::kFailed);
    EXPECT_FALSE(a.nic->last_post_error().text.empty());
}

// Sleeping is safe where may_sleep() says so: whatever comes next makes the descriptor readable.
TEST_P(Queues, descriptor_wakes_a_sleeper) {
    record_if("wait_fd", info_.wait_fd);
    if (!info_.wait_fd) GTEST_SKIP() << "no descriptor to sleep on";
    auto pair = make_pair_here();
    auto &a = *pair->a, &b = *pair->b;
    b.keep_receives(8, 0);
    std::size_t num_sleeps = 0, num_timeouts = 0;
    for (std::uint32_t i = 0; i < 20; ++i) {
        ASSERT_TRUE(pair->write(a, b, 0, 4096, 0, i));
        const auto give_up = std::chrono::steady_clock::now() + patience(10'000);
        while (b.imms.size() <= i && std::chrono::steady_clock::now() < give_up) {
            a.poll();  // the sender has its own thread elsewhere
            if (b.nic->may_sleep()) {
                pollfd fd{b.nic->wait_fd(), POLLIN, 0};
                ++num_sleeps;
                // Nothing under way here depends on this thread, but it plays the sender too, so it looks up now and
                // then.
                num_timeouts += ::poll(&fd, 1, 20) == 0;
            }
            b.poll();
        }
        ASSERT_EQ(b.imms.size(), i + 1);
    }
    record("sleeps_that_timed_out", num_timeouts > num_sleeps / 2 && num_sleeps > 4 ? "many" : "few");
}

TEST_P(Queues, addresses_that_make_no_sense_are_refused) {
    auto pair = make_pair();
    const auto good = pair->b->nic->address();
    auto refused = [&](std::vector<std::byte> bytes) {
        try {
            pair->a->nic->insert_peer(bytes);
            return false;
        } catch (const Error& error) {
            EXPECT_EQ(error.kind(), ErrorKind::kUnreachable);
            return true;
        }
    };
    EXPECT_TRUE(refused({}));
    EXPECT_TRUE(refused({good.begin(), good.end() - 1}));
    auto longer = good;
    longer.push_back(std::byte{'x'});
    EXPECT_TRUE(refused(longer));
    record("random_address", refused(std::vector<std::byte>(good.size(), std::byte{0xa5})) ? "refused" : "taken");
}

}  // namespace
}  // namespace fkv::test

int main(int argc, char** argv) { return fkv::test::contract_main(argc, argv); }
