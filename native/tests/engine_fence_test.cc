// Registrations for one peer, and fences: what proves that a lost peer can write no more, and what does not.
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <iterator>
#include <random>
#include <sstream>
#include <string>
#include <thread>

#include "engine_cluster.h"

extern char** environ;

namespace fkv::test {
namespace {

using namespace fkv::fake;
using std::chrono::milliseconds;
using std::chrono::seconds;

// As libfabric's shm: nobody checks keys, and what a peer has left us is carried out when we look.
FakeProfile shared_memory() {
    auto profile = FakeProfile::fail_stop();
    profile.virtual_addresses = true;
    profile.checks_keys = false;
    profile.shared_memory = true;
    return profile;
}

ErrorKind kind_of(const std::function<void()>& call) {
    try {
        call();
    } catch (const Error& error) {
        return error.kind();
    }
    ADD_FAILURE() << "nothing was thrown";
    return ErrorKind::kInternal;
}

// A process that does nothing until it is killed.
class Sleeper {
  public:
    Sleeper() {
        const char* const args[] = {"sleep", "600", nullptr};
        if (posix_spawnp(&pid_, "sleep", nullptr, nullptr, const_cast<char* const*>(args), environ) != 0)
            ADD_FAILURE() << "no sleep";
    }
    ~Sleeper() {
        signal(SIGKILL);
        ::waitpid(pid_, nullptr, 0);
    }
    Sleeper(const Sleeper&) = delete;
    Sleeper& operator=(const Sleeper&) = delete;

    void signal(int number) const { ::kill(pid_, number); }
    ProcessId id() const {
        auto process = this_process().value();
        process.pid = pid_;
        std::ifstream file("/proc/" + std::to_string(pid_) + "/stat");
        const std::string text{std::istreambuf_iterator<char>(file), {}};
        std::istringstream fields(text.substr(text.rfind(')') + 1));
        std::string ticks;
        for (int field = 3; field <= 22; ++field) fields >> ticks;
        process.start_ticks = std::stoull(ticks);
        return process;
    }

  private:
    pid_t pid_ = 0;
};

ProcessId ended_process() { return Sleeper().id(); }

class EngineFence : public ::testing::Test {
  protected:
    void start(const NodeShape& shape) {
        a = &cluster.add(shape);
        b = &cluster.add(shape);
    }
    // What b may write to in a.
    std::shared_ptr<const RemoteRegion> shared_with(Node& peer) {
        return std::make_shared<RemoteRegion>(a->engine->share_region(a->regions[0], a->peer(peer)));
    }
    std::uint64_t write(Node& from, const std::shared_ptr<const RemoteRegion>& to, std::uint64_t nbytes = 100,
                        const CounterToken& token = {}) {
        auto piece = from.piece(*a, 0, 0, nbytes);
        piece.dst = to;
        return from.engine->submit_pages(Transfer::Kind::kWrite, {{from.peer(*a), {piece}, token}}, 0)[0]->id;
    }
    Outcome outcome_of_write(Node& from, const std::shared_ptr<const RemoteRegion>& to) {
        const auto id = write(from, to);
        EXPECT_TRUE(cluster.wait([&] { return from.ended(id); })) << cluster.where();
        return from.outcome(id);
    }
    // Its end alone does not say that the data has landed.
    void expect_lands(Node& from, const std::shared_ptr<const RemoteRegion>& to) {
        const auto token = a->counter(100, 1);
        write(from, to, 100, token);
        EXPECT_TRUE(cluster.wait([&] { return a->fired(token); })) << cluster.where();
    }
    // A peer of a's that lives in that process.
    std::shared_ptr<Peer> peer_in(std::optional<ProcessId> process) {
        auto address = b->engine->address();
        address.epoch[0] ^= std::byte(++num_peers);
        address.process = process;
        return a->engine->add_peer(address, false);
    }
    Fence fence(const std::shared_ptr<Peer>& peer, std::int64_t timeout_ns = 5 * kSecond) {
        const auto began = now_ns();
        auto result = a->engine->fence(peer, timeout_ns);
        EXPECT_LT(now_ns() - began, timeout_ns + 5 * kSecond);
        EXPECT_FALSE(result.why.empty());
        return result;
    }

    Cluster cluster{std::random_device{}()};
    Node *a = nullptr, *b = nullptr;
    unsigned num_peers = 0;
};

TEST_F(EngineFence, a_pair_has_keys_of_its_own) {
    NodeShape shape{.rails = {2}};
    shape.options.max_registration_bytes = 1 << 14;
    start(shape);
    auto& c = cluster.add(shape);
    const auto before = cluster.fabric.stats().open_mrs;
    const auto one = shared_with(*b), again = shared_with(*b), other = shared_with(c);
    EXPECT_EQ(cluster.fabric.stats().open_mrs, before + 2u * 2 * 4) << "two peers, two NICs, four segments";
    EXPECT_EQ(a->engine->num_shares(0), 2u);
    ASSERT_EQ(one->rails.size(), 2u);
    std::set<std::uint64_t> keys;
    for (const auto& remote : {one, other, a->remotes[0]})
        for (const auto& rail : remote->rails)
            for (const auto& segment : rail) EXPECT_TRUE(keys.insert(segment.rkey).second);
    for (std::size_t rail = 0; rail < 2; ++rail)
        for (std::size_t i = 0; i < 4; ++i) {
            EXPECT_EQ(one->rails[rail][i].rkey, again->rails[rail][i].rkey);
            EXPECT_EQ(one->rails[rail][i].base, a->remotes[0]->rails[rail][i].base);
        }
    b->memory[0] = std::byte{1};
    expect_lands(*b, one);
    EXPECT_EQ(a->memory[0], std::byte{1});
}

TEST_F(EngineFence, their_number_is_bounded) {
    start({.max_peer_registrations = 2});
    auto& c = cluster.add({});
    auto second = a->engine->register_region(a->memory.data(), 100, 0);
    shared_with(*b);
    shared_with(c);
    const auto before = cluster.fabric.stats().open_mrs;
    try {
        a->engine->share_region(second, a->peer(*b));
        FAIL() << "a third pair";
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kWouldBlock);
        EXPECT_NE(std::string(error.what()).find("max_peer_registrations"), std::string::npos);
    }
    EXPECT_NO_THROW(shared_with(*b)) << "one that is there";
    EXPECT_EQ(cluster.fabric.stats().open_mrs, before);
    EXPECT_TRUE(fence(a->peer(c)).proven);
    a->engine->share_region(second, a->peer(*b));
    EXPECT_EQ(a->engine->num_shares(0), 2u);
    second.reset();
    EXPECT_EQ(a->engine->num_shares(0), 1u) << "a region that is dropped takes its pairs along";
    a->engine->deregister(a->regions[0]);
    EXPECT_EQ(a->engine->num_shares(0), 0u);
    EXPECT_EQ(cluster.fabric.stats().open_mrs, before - 4);
}

TEST_F(EngineFence, a_failed_registration_leaves_nothing) {
    start({.rails = {2}});
    const auto before = cluster.fabric.stats().open_mrs;
    cluster.fabric.fail_call({.call = Call::kRegister, .nic = a->nics[0][1]});
    EXPECT_EQ(kind_of([&] { shared_with(*b); }), ErrorKind::kRegistration);
    EXPECT_EQ(cluster.fabric.stats().open_mrs, before);
    EXPECT_EQ(a->engine->num_shares(0), 0u);
    EXPECT_FALSE(fence(a->peer(*b), 0).proven) << "it was given nothing";
}

TEST_F(EngineFence, its_keys_write_no_more_and_the_others_do) {
    start({.rails = {2}});
    auto& c = cluster.add({});
    const auto keys = shared_with(*b), others = shared_with(c);
    expect_lands(*b, keys);
    const auto result = fence(a->peer(*b));
    EXPECT_TRUE(result.proven) << result.why;
    EXPECT_EQ(result.means, Fence::kRegistrations);
    std::fill(a->memory.begin(), a->memory.end(), std::byte{7});
    EXPECT_EQ(outcome_of_write(*b, keys), Outcome::kFailed);
    EXPECT_EQ(a->memory, std::vector(a->memory.size(), std::byte{7}));
    expect_lands(c, others);
    expect_lands(c, a->remotes[0]);
    EXPECT_EQ(a->memory[0], kCanary);
}

// Writes at every stage of their way when the fence falls: each has landed before, or never does.
TEST_F(EngineFence, nothing_lands_after_it) {
    start({.rails = {2}, .memory_bytes = 1 << 17});
    for (int round = 0; round < 30; ++round) {
        const auto keys = shared_with(*b);
        for (int i = 0; i < 30; ++i) write(*b, keys, 2000);
        cluster.steps(static_cast<std::uint64_t>(round));
        ASSERT_TRUE(fence(a->peer(*b)).proven);
        const auto value = std::byte(round);
        std::fill(a->memory.begin(), a->memory.end(), value);
        ASSERT_TRUE(cluster.wait([&] { return b->engine->group(0).sender().in_flight() == 0; })) << cluster.where();
        ASSERT_EQ(a->memory, std::vector(a->memory.size(), value)) << cluster.where();
    }
}

TEST_F(EngineFence, without_keys_of_its_own_nothing_is_proven) {
    start({});
    const auto result = fence(a->peer(*b));
    EXPECT_FALSE(result.proven) << "it may use the keys that everybody knows";
    EXPECT_NE(result.why.find("remote_for"), std::string::npos) << result.why;
}

TEST_F(EngineFence, it_holds_however_often_it_is_asked_for) {
    start({});
    const auto peer = a->peer(*b);
    shared_with(*b);
    a->engine->remove_peer(peer);
    EXPECT_EQ(kind_of([&] { a->engine->share_region(a->regions[0], peer); }), ErrorKind::kClosed);
    EXPECT_EQ(a->engine->num_shares(0), 1u) << "removal alone closes none";
    const auto reborn = a->peer(*b);  // the same epoch, another Peer
    EXPECT_NE(peer, reborn);
    EXPECT_TRUE(fence(reborn).proven) << "the keys were given to that life of the engine";
    EXPECT_TRUE(fence(reborn, 0).proven);
    EXPECT_TRUE(fence(peer).proven);
    EXPECT_EQ(a->engine->num_shares(0), 0u);
}

TEST_F(EngineFence, a_registration_that_will_not_close_is_no_proof) {
    start({.rails = {2}});
    const auto peer = a->peer(*b);
    shared_with(*b);
    cluster.fabric.fail_call({.call = Call::kDeregister, .nic = a->nics[0][1]});
    const auto result = fence(peer, 20 * kMillisecond);
    EXPECT_FALSE(result.proven);
    EXPECT_NE(result.why.find("could not be closed"), std::string::npos) << result.why;
    EXPECT_FALSE(fence(peer, 0).proven) << "nor later";
    EXPECT_EQ(a->engine->num_shares(0), 1u) << "it goes on to count";
}

TEST_F(EngineFence, software_that_checks_keys_is_no_proof) {
    start({.profile = FakeProfile::tcp()});
    const auto peer = peer_in(ended_process());  // it has exited
    a->engine->share_region(a->regions[0], peer);
    const auto result = fence(peer);
    EXPECT_FALSE(result.proven);
    EXPECT_EQ(result.means, Fence::kNone);
    EXPECT_EQ(a->engine->num_shares(0), 0u) << "closed all the same";
}

TEST_F(EngineFence, the_end_of_the_peers_process_is_proof_over_shared_memory) {
    start({.rails = {1, 1}, .profile = shared_memory()});
    const Sleeper sleeper;
    const auto peer = peer_in(sleeper.id());
    for (const int number : {SIGCONT, SIGSTOP}) {
        sleeper.signal(number);
        const auto result = fence(peer, 50 * kMillisecond);
        EXPECT_FALSE(result.proven) << "it lives";
        EXPECT_EQ(result.means, Fence::kExit);
    }
    std::thread killing([&] {
        std::this_thread::sleep_for(milliseconds(50));
        sleeper.signal(SIGKILL);
    });
    const auto result = fence(peer);
    killing.join();
    EXPECT_TRUE(result.proven) << result.why << " (a zombie by now)";
    EXPECT_TRUE(fence(peer).proven);
}

TEST_F(EngineFence, an_end_before_the_fence_or_a_successor_with_its_pid) {
    start({.profile = shared_memory()});
    EXPECT_TRUE(fence(peer_in(ended_process())).proven);
    auto former = this_process().value();
    --former.start_ticks;
    EXPECT_TRUE(fence(peer_in(former)).proven) << "somebody else had our pid";
    EXPECT_FALSE(fence(peer_in(this_process()), kMillisecond).proven);
}

TEST_F(EngineFence, a_process_that_cannot_be_seen_is_no_proof) {
    start({.profile = shared_memory()});
    auto elsewhere = ended_process();
    elsewhere.host[3] ^= std::byte{1};
    for (const auto& process : {std::optional<ProcessId>(), std::optional(elsewhere)}) {
        const auto result = fence(peer_in(process));
        EXPECT_FALSE(result.proven);
        EXPECT_EQ(result.means, Fence::kExit);
    }
    auto nobody = elsewhere;
    nobody.host = this_process()->host;
    for (const std::int64_t pid : {std::int64_t{0}, std::int64_t{-1}, std::int64_t{1} << 40}) {
        nobody.pid = pid;
        EXPECT_FALSE(fence(peer_in(nobody)).proven) << pid;
    }
}

TEST_F(EngineFence, what_it_has_left_in_the_queue_must_be_carried_out_first) {
    start({.rails = {1, 1}, .profile = shared_memory()});
    const auto own = a->nics[1][0];
    const auto held = cluster.fabric.add_rule({.step = Step::kLandFirst,
                                               .match = [=](const OpView& op) { return op.dst == own; },
                                               .times = Rule::kAlways,
                                               .action = Action::kHold});
    const auto peer = peer_in(ended_process());
    const auto result = fence(peer, 50 * kMillisecond);
    EXPECT_FALSE(result.proven);
    EXPECT_NE(result.why.find("has exited, but"), std::string::npos) << result.why;
    EXPECT_EQ(a->engine->group(1).counters().num_poisoned(), 1u);
    cluster.fabric.release(held);
    EXPECT_TRUE(fence(peer).proven);
    EXPECT_EQ(a->engine->group(0).counters().num_in_use(), 0u);
    EXPECT_EQ(a->engine->group(0).counters().num_poisoned(), 0u);
}

TEST_F(EngineFence, several_nics_with_queues_in_shared_memory_are_too_many) {
    start({.rails = {2}, .profile = shared_memory()});
    EXPECT_FALSE(fence(peer_in(ended_process())).proven);
}

TEST_F(EngineFence, closing_and_dropping_in_any_order) {
    start({});
    auto& stranger = cluster.add({});
    const auto region = a->regions[0];
    const auto peer = a->peer(*b);
    const auto before = cluster.fabric.stats().open_mrs;
    shared_with(*b);
    EXPECT_EQ(kind_of([&] { b->engine->share_region(region, b->peer(*a)); }), ErrorKind::kConfig);
    EXPECT_EQ(kind_of([&] { a->engine->share_region(region, stranger.peer(*b)); }), ErrorKind::kConfig);
    EXPECT_EQ(kind_of([&] { a->engine->fence(stranger.peer(*b), 0); }), ErrorKind::kConfig);
    a->engine->deregister(region);
    EXPECT_EQ(cluster.fabric.stats().open_mrs, before - 1);
    EXPECT_EQ(kind_of([&] { a->engine->share_region(region, peer); }), ErrorKind::kClosed);
    EXPECT_TRUE(fence(peer).proven) << "the region's end has closed them";
    auto last = a->engine->register_region(a->memory.data(), a->memory.size(), 0);
    a->engine->share_region(last, a->peer(*b));
    a->engine->close(0);
    EXPECT_EQ(a->engine->num_shares(0), 0u);
    EXPECT_EQ(kind_of([&] { a->engine->fence(peer, kSecond); }), ErrorKind::kClosed);
    EXPECT_EQ(kind_of([&] { a->engine->share_region(last, peer); }), ErrorKind::kClosed);
}

TEST_F(EngineFence, a_close_ends_the_wait_for_one) {
    start({.profile = shared_memory()});
    const Sleeper sleeper;
    const auto peer = peer_in(sleeper.id());
    std::thread closing([&] {
        std::this_thread::sleep_for(milliseconds(30));
        a->engine->close(0);
    });
    const auto began = now_ns();
    EXPECT_EQ(kind_of([&] { a->engine->fence(peer, 600 * kSecond); }), ErrorKind::kClosed);
    EXPECT_LT(now_ns() - began, 60 * kSecond);
    closing.join();
}

// Whoever fences has the proof only once the last registration is closed, whoever closes it.
TEST_F(EngineFence, many_threads_share_and_fence_and_deregister) {
    start({.rails = {2}, .max_peer_registrations = 64});
    std::atomic<bool> stop{false};
    std::atomic<int> num_proven{0}, num_shared{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 6; ++t)
        threads.emplace_back([&, t] {
            while (!stop) try {
                    const auto peer = a->peer(*b);
                    auto region = a->engine->register_region(a->memory.data(), 4096, 0);
                    a->engine->share_region(region, peer);
                    ++num_shared;
                    if (t % 3 == 0) {
                        if (a->engine->fence(peer, kSecond).proven) ++num_proven;
                    } else if (t % 3 == 1) {
                        a->engine->deregister(region);
                    }
                } catch (const Error& error) {
                    EXPECT_EQ(error.kind(), ErrorKind::kClosed) << error.what();
                }
        });
    EXPECT_TRUE(cluster.wait([&] { return num_proven > 20 && num_shared > 200; })) << cluster.where();
    stop = true;
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(a->engine->num_shares(0), 0u) << "all regions are gone";
}

}  // namespace
}  // namespace fkv::test
