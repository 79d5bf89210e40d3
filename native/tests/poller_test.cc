// A NIC with a thread of its own: what it hands over, when it stops, and that neither side sleeps through the other.
#include "engine/poller.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <chrono>
#include <deque>
#include <mutex>
#include <random>
#include <stdexcept>

#include "fake/fake_fabric.h"
#include "nic_pair.h"

namespace fkv::test {
namespace {

using namespace std::chrono_literals;

// Completes what the test tells it to.
class ScriptedNic final : public Nic {
  public:
    struct State {
        std::mutex mutex;
        std::deque<std::pair<Completion, bool>> ready;  // and whether it failed; guarded by mutex
        std::atomic<std::uint64_t> polls{0}, taken{0};
        std::atomic<bool> throws{false}, polling{false}, closed{false}, closed_under_a_poll{false};
        EventFd bell;
        bool has_bell = false;

        // Completions first, first + 1, ...; every `failing`th fails.
        void add(std::uint32_t first, std::uint32_t count, std::uint32_t failing = 0) {
            const std::lock_guard lock(mutex);
            for (auto i = first; i < first + count; ++i)
                ready.push_back({{nullptr, Completion::kRemoteWrite, true, i, 0}, failing && i % failing == 0});
            bell.ring();
        }
    };

    explicit ScriptedNic(State& state) : state_(state) { info_.provider = "scripted"; }
    void close_endpoint() override {
        if (state_.polling) state_.closed_under_a_poll = true;
        state_.closed = true;
    }
    const NicInfo& info() const override { return info_; }
    std::vector<std::byte> address() const override { return {}; }
    std::unique_ptr<MemoryHandle> register_memory(void*, std::uint64_t) override { return nullptr; }
    PeerAddress insert_peer(std::span<const std::byte>) override { return 0; }
    void remove_peer(PeerAddress) override {}
    PostResult post_write(const WriteOp&) override { return PostResult::kOk; }
    PostResult post_read(const ReadOp&) override { return PostResult::kOk; }
    PostResult post_send(const MessageOp&) override { return PostResult::kAgain; }
    PostResult post_recv(const MessageOp&) override { return PostResult::kOk; }
    OpError last_post_error() const override { return {}; }
    int poll(std::span<Completion> out) override {
        state_.polling = true;
        const std::lock_guard lock(state_.mutex);
        ++state_.polls;
        if (state_.throws) throw std::runtime_error("out of order");
        int count = 0;
        auto& ready = state_.ready;
        for (; !ready.empty() && !ready.front().second && count < static_cast<int>(out.size()); ready.pop_front())
            out[static_cast<std::size_t>(count++)] = ready.front().first;
        state_.taken += static_cast<std::uint64_t>(count);
        state_.polling = false;
        return count == 0 && !ready.empty() && !out.empty() ? -1 : count;
    }
    bool read_error(FailedCompletion& out) override {
        const std::lock_guard lock(state_.mutex);
        if (state_.ready.empty() || !state_.ready.front().second) return false;
        out.error.fi_errno = static_cast<int>(state_.ready.front().first.imm);
        state_.ready.pop_front();
        ++state_.taken;
        return true;
    }
    int wait_fd() const override { return state_.has_bell ? state_.bell.fd() : -1; }
    bool may_sleep() override {
        const std::lock_guard lock(state_.mutex);
        state_.bell.clear();
        return state_.ready.empty();
    }

  private:
    State& state_;
    NicInfo info_{};
};

// Counts what took `bound` and longer. A busy machine makes a few of many slow, a wake-up that is missing all of them.
struct Slow {
    std::chrono::milliseconds bound;
    int count = 0;
    std::chrono::steady_clock::time_point began{};

    void start() { began = std::chrono::steady_clock::now(); }
    void stop() { count += std::chrono::steady_clock::now() - began >= bound; }
};

class Poller : public ::testing::Test {
  protected:
    void open(const PollerOptions& options = {}) {
        nic = std::make_unique<PolledNic>(std::make_unique<ScriptedNic>(state), options);
    }
    // Takes what is there, all of it numbered one after the other.
    void take() {
        std::array<Completion, 5> out;
        const int n = nic->poll(out);
        for (int i = 0; i < n; ++i) EXPECT_EQ(out[static_cast<std::size_t>(i)].imm, next++);
        FailedCompletion failure;
        if (n < 0) {
            ASSERT_TRUE(nic->read_error(failure));
            EXPECT_EQ(failure.error.fi_errno, static_cast<int>(next++));
            ++num_failed;
        }
    }
    template <typename Done>
    bool wait(Done&& done, std::chrono::milliseconds bound = 20s) {
        const auto until = std::chrono::steady_clock::now() + bound;
        while (!done() && std::chrono::steady_clock::now() < until) std::this_thread::yield();
        return done();
    }

    ScriptedNic::State state;
    std::unique_ptr<PolledNic> nic;
    std::uint32_t next = 0, num_failed = 0;
};

TEST_F(Poller, hands_over_everything_once_in_order_with_failures_between) {
    for (const std::size_t ring : {1, 4, 1024}) {
        next = num_failed = 0;
        open({.ring = ring});
        // A small ring costs a switch between the threads every few completions, milliseconds on a busy machine.
        const std::uint32_t hundreds = ring < 1024 ? 4 : 50;
        for (std::uint32_t i = 0; i < hundreds; ++i) state.add(i * 100, 100, 7);
        ASSERT_TRUE(wait([&] {
            take();
            return next == hundreds * 100;
        })) << next;
        EXPECT_EQ(num_failed, (hundreds * 100 + 6) / 7);
        FailedCompletion failure;
        EXPECT_FALSE(nic->read_error(failure));
    }
}

TEST_F(Poller, a_full_ring_stops_polling_and_loses_nothing) {
    state.has_bell = true;  // rings all the time that the NIC is not polled
    Slow slow{80ms};
    for (int round = 0; round < 8; ++round) {
        open({.ring = 16});
        next = 0;
        state.taken = 0;
        state.add(0, 100);
        ASSERT_TRUE(wait([&] { return state.taken == 16; }));
        const auto polls = state.polls.load();
        std::this_thread::sleep_for(20ms);
        EXPECT_EQ(state.taken, 16u);
        EXPECT_EQ(state.polls, polls);
        EXPECT_LT(nic->sleeps(), 10u) << "it slept on the NIC, which had something";
        slow.start();
        ASSERT_TRUE(wait([&] {
            take();
            return next == 100;
        }));
        slow.stop();
    }
    EXPECT_LE(slow.count, 4) << "room did not wake it";
}

TEST_F(Poller, wakes_its_owner_and_is_woken_by_posts_and_by_its_nic) {
    state.has_bell = true;
    open();
    std::array<Completion, 4> out;
    Slow slow{90ms};
    for (std::uint32_t i = 0; i < 20; ++i) {
        ASSERT_TRUE(wait([&] { return nic->may_sleep(); }));
        std::this_thread::sleep_for(1ms);  // it sleeps by now, for up to 100 ms
        slow.start();
        if (i % 2) {
            const auto polls = state.polls.load();
            i % 4 == 1 ? nic->post_write({}) : nic->post_send({});  // refused ones want polls, too
            ASSERT_TRUE(wait([&] { return state.polls > polls; }));
        }
        state.add(i, 1);
        pollfd fd{nic->wait_fd(), POLLIN, 0};
        ASSERT_EQ(::poll(&fd, 1, 10'000), 1);
        ASSERT_EQ(nic->poll(out), 1);
        slow.stop();
        EXPECT_EQ(out[0].imm, i);
    }
    EXPECT_LE(slow.count, 4) << "the clock woke it";
}

TEST_F(Poller, an_idle_one_sleeps) {
    state.has_bell = true;
    open();
    EXPECT_TRUE(wait([&] {
        const auto polls = state.polls.load();
        std::this_thread::sleep_for(300ms);
        return state.polls <= polls + 10;
    }));
}

TEST_F(Poller, closing_ends_the_thread_first_and_drops_what_nobody_took) {
    for (const auto spin : {false, true}) {
        open({.spin = spin, .ring = 8});
        state.add(0, 100);
        ASSERT_TRUE(wait([&] { return state.taken >= 8; }));
        nic->close_endpoint();
        const auto polls = state.polls.load();
        std::array<Completion, 4> out;
        EXPECT_EQ(nic->poll(out), 0);
        nic->close_endpoint();
        EXPECT_EQ(state.polls, polls);
        EXPECT_TRUE(state.closed && !state.closed_under_a_poll);
        state.ready.clear();
        state.taken = 0;
    }
}

TEST_F(Poller, what_its_thread_throws_is_told_once_after_all_that_it_brought) {
    open();
    state.add(0, 3);
    ASSERT_TRUE(wait([&] { return state.taken == 3; }));
    ASSERT_TRUE(wait([&] {
        take();
        return next == 3;
    }));
    ASSERT_TRUE(wait([&] { return nic->may_sleep(); }));
    state.throws = true;
    nic->post_write({});
    pollfd fd{nic->wait_fd(), POLLIN, 0};
    std::array<Completion, 4> out;
    // As a progress thread does. The bell may ring once more for what has been taken already.
    ASSERT_TRUE(wait([&] {
        if (nic->poll(out) == -1) return true;
        if (nic->may_sleep()) {
            EXPECT_EQ(::poll(&fd, 1, 10'000), 1) << "nobody wakes whoever sleeps";
        }
        return false;
    }));
    FailedCompletion failure;
    ASSERT_TRUE(nic->read_error(failure));
    EXPECT_FALSE(failure.context);
    EXPECT_EQ(failure.error.text, "the thread that polls this NIC ended: out of order");
    EXPECT_FALSE(nic->read_error(failure));
    EXPECT_EQ(nic->poll(out), 0);
    EXPECT_TRUE(nic->may_sleep());
}

TEST_F(Poller, refuses_cpus_that_do_not_exist) { EXPECT_THROW(open({.cpus = {100'000}}), Error); }

// The fake fabric notices two threads that post, or poll, at the same time.
TEST_F(Poller, posts_of_one_thread_and_polls_of_another_are_no_misuse_but_two_that_poll_are) {
    fake::FakeFabric fabric(std::random_device{}());
    std::vector<Nic*> beneath;
    {
        NicPair pair([&](const Arena&) {
            auto bare = fabric.open_nic(fake::FakeProfile::strict());
            beneath.push_back(bare.get());
            return std::make_unique<PolledNic>(std::move(bare), PollerOptions{.spin = true});
        });
        for (std::uint32_t i = 0; i < 200; ++i) {
            write_stamp(pair.a->memory.subspan(i * 64, 64), i);
            ASSERT_TRUE(pair.write(*pair.a, *pair.b, i * 64, 64, i * 64, i));
        }
        ASSERT_TRUE(pair.drive([&] { return pair.b->imms.size() == 200 && pair.a->num_sent == 200; }));
        for (std::uint32_t i = 0; i < 200; ++i) EXPECT_TRUE(has_stamp(pair.b->memory.subspan(i * 64, 64), i));
        EXPECT_TRUE(fabric.violations().empty()) << fabric.describe();
        std::array<Completion, 1> out;
        EXPECT_TRUE(wait([&] {
            beneath[0]->poll(std::span(out).first(0));
            return !fabric.violations().empty();
        })) << "two threads polled";
    }
}

}  // namespace
}  // namespace fkv::test
