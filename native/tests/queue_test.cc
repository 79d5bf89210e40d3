// The queues between threads: nothing lost, nothing twice, full and closed are answers.
#include "base/queue.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <memory>
#include <set>
#include <thread>

#include "base/ring.h"
#include "engine/event.h"

namespace fkv {
namespace {

TEST(Queue, keeps_the_order_of_one_producer) {
    BoundedQueue<int> queue(8);
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(queue.push(i));
    std::vector<int> out;
    queue.pop_all(out);
    EXPECT_EQ(out, (std::vector<int>{0, 1, 2}));
    EXPECT_TRUE(queue.empty());
}

TEST(Queue, full_is_an_answer_and_ends_when_it_is_emptied) {
    BoundedQueue<int> queue(2);
    EXPECT_TRUE(queue.push(1));
    EXPECT_TRUE(queue.push(2));
    EXPECT_FALSE(queue.push(3));
    std::vector<int> out;
    queue.pop_all(out);
    EXPECT_EQ(out.size(), 2u);
    EXPECT_TRUE(queue.push(4));
}

TEST(Queue, a_closed_queue_takes_nothing_and_gives_what_it_has) {
    BoundedQueue<int> queue(8);
    EXPECT_TRUE(queue.push(1));
    queue.close();
    EXPECT_FALSE(queue.push(2));
    std::vector<int> out;
    queue.pop_all(out);
    EXPECT_EQ(out, std::vector<int>{1});
}

TEST(Ring, has_room_for_what_it_was_made_for_and_keeps_the_order) {
    Ring<int> ring(3);
    ASSERT_EQ(ring.capacity(), 4u);
    int next = 0, expected = 0;
    for (int round = 0; round < 5; ++round) {
        while (!ring.full()) ring.push(next++);
        EXPECT_EQ(ring.room(), 0u);
        for (int i = 0; i < 3; ++i) {
            EXPECT_EQ(ring.front(), expected);
            EXPECT_EQ(ring.pop(), expected++);
        }
        EXPECT_EQ(ring.room(), 3u);
        EXPECT_FALSE(ring.empty());
    }
    while (!ring.empty()) EXPECT_EQ(ring.pop(), expected++);
    EXPECT_EQ(expected, next);
    EXPECT_EQ(ring.room(), 4u);
}

TEST(Ring, keeps_nothing_of_what_was_taken) {
    auto item = std::make_shared<int>(1);
    Ring<std::shared_ptr<int>> ring(2);
    ring.push(item);
    EXPECT_EQ(ring.pop(), item);
    EXPECT_EQ(item.use_count(), 1);
}

TEST(Ring, hands_everything_over_once_and_in_order) {
    constexpr int kCount = 200'000;
    Ring<std::unique_ptr<int>> ring(8);
    std::thread producer([&] {
        for (int i = 0; i < kCount;) {
            if (ring.full()) std::this_thread::yield();
            for (auto room = ring.room(); room > 0 && i < kCount; --room) ring.push(std::make_unique<int>(i++));
        }
    });
    int wrong = 0;
    for (int i = 0; i < kCount; ++i) {
        while (ring.empty()) std::this_thread::yield();
        wrong += *ring.pop() != i;
    }
    producer.join();
    EXPECT_EQ(wrong, 0);
    EXPECT_TRUE(ring.empty());
}

// Every push that was answered with true comes out, also when the queue is closed in the middle of it.
TEST(Queue, what_was_taken_comes_out_once_also_when_closed_under_load) {
    for (int round = 0; round < 50; ++round) {
        constexpr int kProducers = 4, kEach = 500;
        BoundedQueue<int> queue(64);
        std::array<std::vector<int>, kProducers> taken;
        std::atomic<int> num_done = 0;
        std::vector<std::thread> producers;
        for (int p = 0; p < kProducers; ++p)
            producers.emplace_back([&, p] {
                for (int i = 0; i < kEach; ++i)
                    if (queue.push(p * kEach + i)) taken[p].push_back(p * kEach + i);
                ++num_done;
            });
        std::vector<int> all, out;
        while (num_done < kProducers && static_cast<int>(all.size()) < 20 * round) {
            queue.pop_all(out);
            all.insert(all.end(), out.begin(), out.end());
            out.clear();
        }
        queue.close();
        queue.pop_all(out);
        all.insert(all.end(), out.begin(), out.end());
        for (auto& thread : producers) thread.join();
        EXPECT_TRUE(queue.empty()) << "something slipped in after close";
        std::set<int> expected;
        for (const auto& list : taken) expected.insert(list.begin(), list.end());
        EXPECT_EQ(all.size(), expected.size());
        EXPECT_EQ(std::set<int>(all.begin(), all.end()), expected);
    }
}

// -- events
// ------------------------------------------------------------------------------------------------------------

Event message_of(std::size_t nbytes) {
    Event event;
    event.kind = Event::kMessage;
    event.payload.resize(nbytes);
    return event;
}

bool is_readable(int fd) {
    pollfd pfd{fd, POLLIN, 0};
    return ::poll(&pfd, 1, 0) == 1;
}

TEST(Events, the_descriptor_is_readable_while_events_wait) {
    EventQueue queue;
    EXPECT_FALSE(is_readable(queue.fd()));
    queue.post(message_of(1));
    queue.post(message_of(1));
    EXPECT_TRUE(is_readable(queue.fd()));
    EXPECT_EQ(queue.take(0).size(), 2u);
    EXPECT_FALSE(is_readable(queue.fd()));
    EXPECT_TRUE(queue.take(0).empty());
    queue.post(message_of(1));
    EXPECT_TRUE(is_readable(queue.fd()));
}

TEST(Events, take_ends_after_its_timeout_or_when_the_bell_rings) {
    EventQueue queue;
    EXPECT_TRUE(queue.take(1).empty());
    std::thread ringing([&] { queue.ring(); });
    EXPECT_TRUE(queue.take(60'000).empty());
    ringing.join();
    std::thread posting([&] { queue.post(message_of(1)); });
    EXPECT_EQ(queue.take(60'000).size(), 1u);
    posting.join();
}

// The bound on the inbox is on memory: a message costs something even when it is empty.
TEST(Events, the_inbox_counts_what_messages_cost) {
    EventQueue queue;
    EXPECT_EQ(queue.inbox_bytes(), 0u);
    queue.post(message_of(1000));
    EXPECT_GE(queue.inbox_bytes(), 1000u + sizeof(Event));
    for (int i = 0; i < 100; ++i) queue.post(message_of(0));
    EXPECT_GE(queue.inbox_bytes(), 1000u + 101 * sizeof(Event));
    Event other;
    other.kind = Event::kTransfer;
    const auto before = queue.inbox_bytes();
    queue.post(std::move(other));
    EXPECT_EQ(queue.inbox_bytes(), before) << "ends of transfers are bounded elsewhere";
    queue.take(0);
    EXPECT_EQ(queue.inbox_bytes(), 0u);
}

TEST(Events, none_is_lost_or_doubled_between_threads) {
    EventQueue queue;
    constexpr std::uint64_t kEach = 20'000;
    std::vector<std::thread> producers;
    for (std::uint64_t p = 0; p < 2; ++p)
        producers.emplace_back([&, p] {
            for (std::uint64_t i = 0; i < kEach; ++i) {
                Event event;
                event.id = p * kEach + i;
                queue.post(std::move(event));
            }
        });
    std::vector<int> seen(2 * kEach);
    for (std::size_t count = 0; count < seen.size();) {
        const auto events = queue.take(10'000);
        ASSERT_FALSE(events.empty()) << "a wake-up was lost after " << count;
        for (const auto& event : events) ++seen[event.id];
        count += events.size();
    }
    for (auto& thread : producers) thread.join();
    for (const auto times : seen) ASSERT_EQ(times, 1);
}

}  // namespace
}  // namespace fkv
