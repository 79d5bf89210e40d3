// shm endpoints of one process that close while what they have posted or answered lies in each other's queues: whoever
// takes it out looks at the queue of the one that has closed, which libfabric 1.17 would have unmapped.
#include "ofi/neighbours.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "nic_pair.h"
#include "ofi/discover.h"
#include "ofi/ofi_nic.h"

namespace fkv::ofi {
namespace {

using test::End;
using test::Posted;

constexpr std::size_t kMemory = 1 << 20;
constexpr std::uint64_t kLarge = 16384;  // is copied by whoever takes it out, and answered

std::unique_ptr<End> open_shm() {
    return std::make_unique<End>([](const test::Arena&) { return open_nic(std::move(find_nics({"shm", {}}).front())); },
                                 kMemory);
}

void meet(End& one, End& other) {
    one.peer = one.nic->insert_peer(other.nic->address());
    other.peer = other.nic->insert_peer(one.nic->address());
}

void poll_both(End& one, End& other) {
    for (int i = 0; i < 100; ++i) one.poll(), other.poll();
}

Posted* write(End& from, End& to, std::uint64_t nbytes = kLarge, std::optional<std::uint32_t> imm = 1) {
    for (int tries = 0; tries < 1000; ++tries) {
        if (auto* op = from.try_write(0, nbytes, to.remote().base, to.remote().rkey, imm)) return op;
        from.poll(), to.poll();  // they do not know each other yet
    }
    ADD_FAILURE() << "nothing is accepted";
    return nullptr;
}

void talk(End& one, End& other) {
    auto* sent = write(one, other);
    auto* answered = write(other, one);
    poll_both(one, other);
    ASSERT_EQ(sent->num_ends, 1);
    ASSERT_EQ(answered->num_ends, 1);
}

// Queues of this process that are mapped although their names are gone.
std::size_t num_kept() {
    std::ifstream maps("/proc/self/maps");
    const auto prefix = "/dev/shm/" + std::to_string(::getpid()) + "-";
    std::size_t count = 0;
    for (std::string line; std::getline(maps, line);)
        count += line.find(prefix) != std::string::npos && line.ends_with("(deleted)");
    return count;
}

bool has_name(const End& end) {
    const auto address = end.nic->address();
    const std::string name(reinterpret_cast<const char*>(address.data()) + sizeof "fi_shm://" - 1);
    return std::filesystem::exists("/dev/shm/" + name);
}

class Neighbours : public ::testing::Test {
  protected:
    void SetUp() override {
        try {
            find_nics({"shm", {}});
        } catch (const Error& error) {
            GTEST_SKIP() << error.what();
        }
    }
};

TEST_F(Neighbours, an_answer_of_a_closed_one_behind_that_of_one_that_is_stopped) {
    auto busy = open_shm(), stopped = open_shm(), closed = open_shm();
    meet(*busy, *stopped);
    talk(*busy, *stopped);
    const auto to_stopped = busy->peer;
    meet(*busy, *closed);
    talk(*busy, *closed);
    const auto to_closed = std::exchange(busy->peer, to_stopped);
    auto* unanswered = write(*busy, *stopped);
    busy->peer = to_closed;
    auto* behind = write(*busy, *closed);
    closed->poll();
    busy->poll();
    EXPECT_EQ(unanswered->num_ends + behind->num_ends, 0);
    closed.reset();
    poll_both(*busy, *stopped);
    EXPECT_EQ(unanswered->num_ends, 1);
    EXPECT_EQ(behind->num_ends, 1);
}

TEST_F(Neighbours, a_message_of_a_closed_one_that_waits_for_a_receive) {
    auto sender = open_shm(), receiver = open_shm();
    meet(*sender, *receiver);
    talk(*sender, *receiver);
    ASSERT_TRUE(sender->try_send(0, kLarge));
    receiver->poll();
    sender->nic->close_endpoint();
    auto* message = receiver->post_recv(kLarge);
    receiver->poll();
    EXPECT_EQ(message->num_ends, 1);
}

TEST_F(Neighbours, writes_of_a_closed_one_behind_many_whose_key_is_refused) {
    auto writer = open_shm(), target = open_shm();
    meet(*writer, *target);
    talk(*writer, *target);
    const auto old = target->remote();
    target->mr = target->nic->register_memory(target->memory.data(), target->memory.size());
    for (int i = 0; i < 300; ++i) ASSERT_TRUE(writer->try_write(0, 64, old.base, old.rkey, 2));
    target->imms.clear();
    ASSERT_TRUE(writer->try_write(0, kLarge, target->remote().base, target->remote().rkey, 3));
    writer->nic->close_endpoint();
    for (int i = 0; i < 400; ++i) target->poll();
    EXPECT_EQ(target->imms, std::vector<std::uint32_t>{3});
}

TEST_F(Neighbours, first_words_of_a_closed_one) {
    auto speaker = open_shm(), listener = open_shm();
    speaker->peer = speaker->nic->insert_peer(listener->nic->address());
    EXPECT_FALSE(speaker->try_write(0, 64, listener->remote().base, listener->remote().rkey, 1));
    speaker.reset();
    for (int i = 0; i < 10; ++i) listener->poll();
}

// Behind what is not answered nothing completes any more.
TEST_F(Neighbours, who_closes_answers_all_that_was_posted_to_it) {
    auto poster = open_shm(), closed = open_shm();
    meet(*poster, *closed);
    talk(*poster, *closed);
    const auto old = closed->remote();
    closed->mr = closed->nic->register_memory(closed->memory.data(), closed->memory.size());
    for (int i = 0; i < 300; ++i) ASSERT_TRUE(poster->try_write(0, 64, old.base, old.rkey, 2));
    auto* last = poster->try_write(0, kLarge, closed->remote().base, closed->remote().rkey, 3);
    closed->nic->close_endpoint();
    poster->poll();
    EXPECT_EQ(last->num_ends, 1);
    EXPECT_FALSE(poster->try_write(0, kLarge, closed->remote().base, closed->remote().rkey, 4));
    EXPECT_EQ(poster->last_result, PostResult::kFailed);
    EXPECT_NE(poster->nic->last_post_error().text.find("closed by this process"), std::string::npos);
}

TEST_F(Neighbours, what_is_left_of_one_is_kept_by_those_that_it_has_met_until_they_close) {
    auto one = open_shm(), other = open_shm(), third = open_shm(), stranger = open_shm();
    const auto before = num_kept();
    meet(*one, *other);
    meet(*one, *third);
    one->nic->close_endpoint();
    EXPECT_FALSE(has_name(*one));
    EXPECT_THROW(other->nic->insert_peer(one->nic->address()), Error);
    EXPECT_EQ(num_kept(), before + 1);
    one.reset();
    stranger.reset();  // keeps nothing, and is not kept
    other.reset();     // has met none that is still open
    EXPECT_EQ(num_kept(), before + 1);
    third.reset();
    EXPECT_EQ(num_kept(), before);
}

TEST_F(Neighbours, close_under_the_posts_and_polls_of_others) {
    for (int round = 0; round < 20; ++round) {
        auto one = open_shm(), other = open_shm();
        meet(*one, *other);
        talk(*one, *other);
        auto work = [](End& end, test::RemoteMemory to) {
            for (int i = 0; i < 2000 && end.last_result != PostResult::kFailed; ++i) {
                end.try_write(0, i % 2 ? 64 : kLarge, to.base, to.rkey, i);
                end.poll();
            }
            end.nic->close_endpoint();
        };
        std::thread theirs(work, std::ref(*other), one->remote());
        std::this_thread::sleep_for(std::chrono::microseconds(100 * round));
        one->nic->close_endpoint();
        theirs.join();
    }
}

}  // namespace
}  // namespace fkv::ofi
