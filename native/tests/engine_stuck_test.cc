// A provider that does not return from a call: it is told, close() has a bound, and memory is given back to nobody.
#include <gtest/gtest.h>

#include <condition_variable>
#include <mutex>
#include <random>
#include <thread>

#include "engine/engine.h"
#include "engine_cluster.h"
#include "fake/fake_fabric.h"

namespace fkv::test {
namespace {

// Holds whoever polls or closes a NIC, from when it is told to until it is told otherwise.
class Gate {
  public:
    void set(bool polls, bool closes) {
        std::lock_guard lock(mutex_);
        polls_ = polls;
        closes_ = closes;
        changed_.notify_all();
    }
    void pass(bool Gate::* what) {
        std::unique_lock lock(mutex_);
        ++num_waiting_;
        changed_.wait(lock, [&] { return !(this->*what); });
        --num_waiting_;
    }
    void poll() { pass(&Gate::polls_); }
    void close() { pass(&Gate::closes_); }
    bool holds() {
        std::lock_guard lock(mutex_);
        return num_waiting_ > 0;
    }

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool polls_ = false, closes_ = false;
    int num_waiting_ = 0;
};

class GatedNic final : public Nic {
  public:
    GatedNic(std::unique_ptr<Nic> nic, std::shared_ptr<Gate> gate) : nic_(std::move(nic)), gate_(std::move(gate)) {}
    void close_endpoint() override {
        gate_->close();
        nic_->close_endpoint();
    }
    const NicInfo& info() const override { return nic_->info(); }
    std::vector<std::byte> address() const override { return nic_->address(); }
    std::unique_ptr<MemoryHandle> register_memory(void* base, std::uint64_t nbytes) override {
        return nic_->register_memory(base, nbytes);
    }
    PeerAddress insert_peer(std::span<const std::byte> address) override { return nic_->insert_peer(address); }
    void remove_peer(PeerAddress peer) override { nic_->remove_peer(peer); }
    PostResult post_write(const WriteOp& op) override { return nic_->post_write(op); }
    PostResult post_read(const ReadOp& op) override { return nic_->post_read(op); }
    PostResult post_send(const MessageOp& op) override { return nic_->post_send(op); }
    PostResult post_recv(const MessageOp& op) override { return nic_->post_recv(op); }
    OpError last_post_error() const override { return nic_->last_post_error(); }
    int poll(std::span<Completion> out) override {
        gate_->poll();
        return nic_->poll(out);
    }
    bool read_error(FailedCompletion& out) override { return nic_->read_error(out); }
    int wait_fd() const override { return nic_->wait_fd(); }
    bool may_sleep() override { return nic_->may_sleep(); }

  private:
    std::unique_ptr<Nic> nic_;
    std::shared_ptr<Gate> gate_;
};

// An engine of two groups with a NIC each; the gate is before the first.
class EngineStuck : public ::testing::Test {
  protected:
    EngineStuck() {
        GroupOptions options, patient;
        options.nic_threads_from = patient.nic_threads_from = nic_threads() ? 1 : 0;
        options.end_ns = options.stall_ns = 200 * kMillisecond;
        patient.end_ns = patient.stall_ns = 60 * kSecond;  // of the group that must not be stuck, however busy we are
        std::vector<std::vector<std::unique_ptr<Nic>>> nics(2);
        nics[0].push_back(std::make_unique<GatedNic>(fabric.open_nic(), gate));
        nics[1].push_back(fabric.open_nic());
        engine = std::make_unique<Engine>(std::move(nics), std::vector{options, patient});
        for (const std::uint32_t group : {0, 1})
            regions.push_back(engine->register_region(memory.data(), memory.size(), group));
    }
    void TearDown() override {
        gate->set(false, false);
        EXPECT_TRUE(fabric.violations().empty()) << fabric.describe();
    }

    template <typename Done>
    bool wait(Done&& done) {
        for (int i = 0; i < 4000; ++i) {
            if (done()) return true;
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
        return false;
    }
    void expect_stuck() {
        try {
            engine->close(0);
            ADD_FAILURE() << "it is not closed";
        } catch (const Error& error) {
            EXPECT_EQ(error.kind(), ErrorKind::kStuck);
            EXPECT_EQ(error.op().provider, "fake") << error.what();
        }
    }
    std::size_t count_stalls() {
        engine->check_stuck();
        std::size_t count = 0;
        for (const auto& event : engine->events().take(0)) {
            if (event.kind != Event::kStalled) continue;
            EXPECT_EQ(event.group, 0u);
            EXPECT_EQ(event.error.provider, "fake");
            EXPECT_GE(event.id, static_cast<std::uint64_t>(200 * kMillisecond));
            ++count;
        }
        return count;
    }

    fake::FakeFabric fabric{std::random_device{}()};
    std::shared_ptr<Gate> gate = std::make_shared<Gate>();  // of a thread that outlives the test, too
    std::vector<std::byte> memory{4096};
    std::unique_ptr<Engine> engine;
    std::vector<std::shared_ptr<Region>> regions;  // [group]
};

TEST_F(EngineStuck, a_call_that_does_not_return_is_reported_once_and_again_after_it_has_returned) {
    for (int round = 0; round < 2; ++round) {
        gate->set(true, false);
        engine->submit_signals({}, 0);
        ASSERT_TRUE(wait([&] { return count_stalls() == 1; }));
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        EXPECT_EQ(count_stalls(), 0u);
        gate->set(false, false);
        ASSERT_TRUE(wait([&] { return !gate->holds() && !engine->group(0).stuck(now_ns(), 200 * kMillisecond); }));
    }
    engine->close(0);
}

TEST_F(EngineStuck, an_idle_engine_is_not_stuck) {
    // For ever, that is: a busy machine may stop a thread anywhere for a while.
    for (int i = 0; i < 50; ++i) {
        EXPECT_TRUE(wait([&] { return !engine->group(0).stuck(now_ns(), 1); }));
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
}

TEST_F(EngineStuck, close_gives_up_in_a_poll_and_keeps_what_the_nic_may_touch) {
    gate->set(true, false);
    ASSERT_TRUE(wait([&] { return gate->holds(); }));
    expect_stuck();
    EXPECT_FALSE(regions[0]->rails.empty()) << "the NIC may still use it";
    EXPECT_THROW(engine->deregister(regions[0]), Error);
    EXPECT_TRUE(regions[1]->rails.empty()) << "the other group's NIC is closed";
    EXPECT_EQ(fabric.stats().open_nics, 1u);
    expect_stuck();
    regions.clear();
    engine.reset();
    EXPECT_EQ(fabric.stats().open_mrs, 2u) << "the region's and the frames'";
    // What was left behind runs on, and finds everything that it needs.
    gate->set(false, false);
    EXPECT_TRUE(wait([&] { return fabric.stats().open_nics == 0; }));
}

TEST_F(EngineStuck, close_gives_up_in_a_close_and_a_later_one_succeeds) {
    gate->set(false, true);
    expect_stuck();
    EXPECT_TRUE(wait([&] { return gate->holds(); }));
    EXPECT_FALSE(regions[0]->rails.empty());
    gate->set(false, false);
    ASSERT_TRUE(wait([&] {
        try {
            engine->close(0);
            return true;
        } catch (const Error&) {
            return false;
        }
    }));
    EXPECT_TRUE(regions[0]->rails.empty());
    engine.reset();
    EXPECT_EQ(fabric.stats().open_nics, 0u);
}

}  // namespace
}  // namespace fkv::test
