// The fake fabric keeps its promises: it is late and unordered, and loses nothing without saying so.
#include <gtest/gtest.h>

#include <thread>

#include "fake/fake_fabric.h"
#include "nic_pair.h"

namespace fkv::test {
namespace {

using namespace fkv::fake;

// Two NICs of one fabric; every failure message has the seed.
struct Rig {
    explicit Rig(std::uint64_t seed, const FakeProfile& profile = FakeProfile::strict(), std::size_t bytes = 64 << 10)
        : fabric(seed), pair([&](const Arena&) { return fabric.open_nic(profile); }, bytes), a(*pair.a), b(*pair.b) {}
    ~Rig() { EXPECT_TRUE(fabric.violations().empty()) << fabric.describe(); }
    Rig(const Rig&) = delete;
    Rig& operator=(const Rig&) = delete;

    // `count` pages of 64 bytes from a to b, each with its index as immediate.
    void write_pages(std::uint32_t count) {
        for (std::uint32_t i = 0; i < count; ++i) {
            write_stamp(a.memory.subspan(i * 64, 64), i);
            ASSERT_TRUE(pair.write(a, b, i * 64, 64, i * 64, i)) << a.nic->last_post_error().text;
        }
    }
    bool page_landed(std::uint32_t i) const { return has_stamp(b.memory.subspan(i * 64, 64), i); }
    void polls(int count) {
        pair.drive([&] { return count-- == 0; });
    }

    FakeFabric fabric;
    NicPair pair;
    End &a, &b;
};

FakeProfile plain() {  // without storms, where a test counts posts
    auto profile = FakeProfile::strict();
    profile.eagain_percent = 0;
    return profile;
}

std::vector<std::uint64_t> trace_of(std::uint64_t seed) {
    std::vector<std::uint64_t> trace;
    Rig rig(seed);
    for (const auto step : {Step::kArrive, Step::kLandLast, Step::kTellTarget, Step::kTellSource})
        rig.fabric.add_rule({.step = step, .times = Rule::kAlways, .call = [&trace, step](const OpView& op) {
                                 trace.push_back(op.id * 8 + static_cast<std::uint64_t>(step));
                             }});
    rig.write_pages(50);
    EXPECT_TRUE(rig.pair.drive([&] { return rig.b.imms.size() == 50 && rig.a.num_sent == 50; }));
    return trace;
}

TEST(Fake, same_seed_gives_the_same_run) {
    EXPECT_EQ(trace_of(7), trace_of(7));
    EXPECT_NE(trace_of(7), trace_of(8));
}

TEST(Fake, strict_profile_reorders_everything) {
    bool imms_reordered = false, sender_first = false, target_first = false;
    for (std::uint64_t seed = 1; seed <= 5; ++seed) {
        Rig rig(seed);
        rig.b.on_imm = [&](std::uint32_t imm) {
            EXPECT_TRUE(rig.page_landed(imm)) << rig.fabric.describe();
            (rig.a.posted[imm].num_ends ? sender_first : target_first) = true;
        };
        rig.write_pages(30);
        ASSERT_TRUE(rig.pair.drive([&] { return rig.b.imms.size() == 30; })) << rig.fabric.describe();
        imms_reordered |= !std::is_sorted(rig.b.imms.begin(), rig.b.imms.end());
    }
    EXPECT_TRUE(imms_reordered && sender_first && target_first);
}

TEST(Fake, held_operation_waits_until_its_release) {
    for (const bool ordered : {false, true}) {
        auto profile = ordered ? FakeProfile::fail_stop() : FakeProfile::strict();
        Rig rig(3, profile);
        const auto rule = rig.fabric.add_rule(
            {.step = Step::kArrive, .match = [](const OpView& op) { return op.imm == 4; }, .action = Action::kHold});
        rig.write_pages(10);
        rig.polls(500);
        EXPECT_EQ(rig.fabric.num_fired(rule), 1u);
        // Where order is granted, whatever was posted later waits too.
        EXPECT_EQ(rig.b.imms.size(), ordered ? 4u : 9u);
        EXPECT_FALSE(rig.page_landed(4));
        rig.fabric.release(rule);
        EXPECT_TRUE(rig.pair.drive([&] { return rig.b.imms.size() == 10 && rig.a.num_sent == 10; }));
    }
}

TEST(Fake, storm_ends_by_polling_only) {
    auto profile = FakeProfile::strict();
    profile.eagain_percent = 99;
    Rig rig(1, profile);
    while (rig.a.try_write(0, 64, rig.b.remote().base, rig.b.remote().rkey, 1u)) continue;
    for (int i = 0; i < 1000; ++i) EXPECT_FALSE(rig.a.try_write(0, 64, rig.b.remote().base, rig.b.remote().rkey, 1u));
    EXPECT_TRUE(rig.pair.write(rig.a, rig.b, 0, 64, 0, 1u));
}

TEST(Fake, limits_are_kept) {
    auto profile = plain();
    profile.tx_depth = 4;
    profile.rx_depth = 3;
    profile.max_mr_bytes = 5 << 20;
    profile.max_mrs = 3;
    Rig rig(1, profile);
    std::vector<std::byte> memory(6 << 20);
    EXPECT_THROW(rig.a.nic->register_memory(memory.data(), memory.size()), Error);
    const auto third = rig.a.nic->register_memory(memory.data(), 4096);
    EXPECT_THROW(rig.a.nic->register_memory(memory.data(), 4096), Error);
    for (int i = 0; i < 4; ++i) EXPECT_TRUE(rig.a.try_write(0, 8, rig.b.remote().base, rig.b.remote().rkey, 1u));
    EXPECT_FALSE(rig.a.try_write(0, 8, rig.b.remote().base, rig.b.remote().rkey, 1u));
    EXPECT_EQ(rig.a.last_result, PostResult::kAgain);
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(rig.b.post_recv(64));
    EXPECT_FALSE(rig.b.post_recv(64));
    EXPECT_FALSE(rig.pair.write(rig.a, rig.b, 0, profile.max_msg_bytes + 1, 0, 1u));
    EXPECT_TRUE(rig.pair.drive([&] { return rig.b.imms.size() == 4 && rig.a.num_sent == 4; }));
}

TEST(Fake, calls_fail_when_told_to) {
    Rig rig(1, plain());
    auto kind_of = [&](auto&& call) {
        try {
            call();
        } catch (const Error& error) {
            EXPECT_NE(std::string(error.what()).find("seed 1"), std::string::npos) << error.what();
            return error.kind();
        }
        return ErrorKind::kInternal;
    };
    rig.fabric.fail_call({.call = Call::kOpen});
    EXPECT_EQ(kind_of([&] { rig.fabric.open_nic(); }), ErrorKind::kFabric);
    rig.fabric.fail_call({.call = Call::kRegister, .nic = 0});
    EXPECT_EQ(kind_of([&] { rig.a.nic->register_memory(rig.a.memory.data(), 64); }), ErrorKind::kRegistration);
    rig.fabric.fail_call({.call = Call::kInsert, .nic = 0, .skip = 1});
    rig.a.nic->insert_peer(rig.b.nic->address());
    EXPECT_EQ(kind_of([&] { rig.a.nic->insert_peer(rig.b.nic->address()); }), ErrorKind::kUnreachable);
    rig.fabric.fail_call({.call = Call::kPost, .nic = 0, .skip = 2, .fi_errno = 12});
    EXPECT_TRUE(rig.pair.write(rig.a, rig.b, 0, 8, 0, 1u));
    EXPECT_TRUE(rig.pair.write(rig.a, rig.b, 0, 8, 0, 1u));
    EXPECT_FALSE(rig.pair.write(rig.a, rig.b, 0, 8, 0, 1u));
    EXPECT_EQ(rig.a.nic->last_post_error().fi_errno, 12);
    EXPECT_TRUE(rig.pair.write(rig.a, rig.b, 0, 8, 0, 1u));
}

TEST(Fake, failures_come_with_and_without_context) {
    for (const auto action : {Action::kFail, Action::kFailNoContext, Action::kFailAsReceive}) {
        Rig rig(2, plain());
        rig.fabric.add_rule({.step = Step::kLandFirst, .skip = 2, .action = action, .fi_errno = 71});
        rig.write_pages(8);
        ASSERT_TRUE(rig.pair.drive([&] {
            return rig.a.num_sent == 7 && rig.a.num_failed + rig.a.stray_errors.size() == 1;
        })) << rig.fabric.describe();
        rig.polls(200);
        EXPECT_EQ(rig.b.imms.size(), 7u);
        EXPECT_EQ(rig.a.num_failed, action == Action::kFail ? 1u : 0u);
        if (action == Action::kFail) continue;
        EXPECT_EQ(rig.a.stray_errors[0].error.fi_errno, 71);
        EXPECT_EQ(rig.a.stray_errors[0].error.op, action == Action::kFailAsReceive ? "recv" : "write");
    }
}

TEST(Fake, closed_registration_flushes_or_is_outlived) {
    for (const auto habit : {MrClose::kFlush, MrClose::kOutlived}) {
        auto profile = plain();
        profile.mr_close = habit;
        Rig rig(4, profile);
        auto mr = rig.b.nic->register_memory(rig.b.memory.data(), rig.b.memory.size());
        const auto rule = rig.fabric.add_rule({.step = Step::kLandLast, .action = Action::kHold});
        write_stamp(rig.a.memory.first(64), 0);
        ASSERT_TRUE(rig.pair.write(rig.a, rig.b, 0, 64, 0, 0u, RemoteMemory{mr->remote_base(), mr->rkey()}));
        ASSERT_TRUE(rig.pair.drive([&] { return rig.fabric.num_fired(rule) == 1; }));
        EXPECT_FALSE(rig.page_landed(0));
        mr.reset();
        EXPECT_EQ(rig.page_landed(0), habit == MrClose::kFlush);
        rig.fabric.release(rule);
        EXPECT_TRUE(rig.pair.drive([&] { return rig.b.imms.size() == 1; }));
        EXPECT_TRUE(rig.page_landed(0));
    }
}

// Whoever uses a NIC wrongly is told, although a provider might let it pass.
TEST(Fake, misuse_is_written_down) {
    FakeFabric fabric(9);
    NicPair pair([&](const Arena&) { return fabric.open_nic(plain()); }, 4096);
    auto &a = *pair.a, &b = *pair.b;
    auto num = [&] { return fabric.violations().size(); };
    const auto rule = fabric.add_rule({.step = Step::kLandLast, .action = Action::kHold});
    auto* op = a.try_write(0, 64, b.remote().base, b.remote().rkey, 1u);
    ASSERT_TRUE(op);
    WritePart part{a.memory.data(), a.mr->local_desc(), 8, b.remote().base, b.remote().rkey};
    const WriteOp again{{&part, 1}, a.peer, false, 0, &op->context};
    EXPECT_EQ(a.nic->post_write(again), PostResult::kFailed);
    EXPECT_EQ(num(), 1u) << "a context in use";
    a.memory[3] = std::byte{1};
    fabric.release(rule);
    ASSERT_TRUE(pair.drive([&] { return b.imms.size() == 1 && op->num_ends == 1; }));
    EXPECT_EQ(num(), 2u) << "a source that changed";
    part.local_desc = nullptr;
    EXPECT_FALSE(a.nic->post_write(again) == PostResult::kOk);
    EXPECT_EQ(num(), 3u) << "no local descriptor";
    a.nic->remove_peer(77);
    EXPECT_EQ(num(), 4u) << "an unknown peer";
}

TEST(Fake, two_threads_may_drive_two_nics) {
    for (const auto& profile : {FakeProfile::strict(), FakeProfile::fail_stop()}) {
        Rig rig(5, profile);
        std::atomic<bool> done{false};
        std::thread target([&] {
            rig.b.on_imm = [&](std::uint32_t imm) { EXPECT_TRUE(rig.page_landed(imm)); };
            while (rig.b.imms.size() < 60) rig.b.poll();
            done = true;
        });
        for (std::uint32_t i = 0; i < 60; ++i) {
            write_stamp(rig.a.memory.subspan(i * 64, 64), i);
            while (!rig.a.try_write(i * 64, 64, rig.b.remote().base + i * 64, rig.b.remote().rkey, i)) rig.a.poll();
        }
        while (!done || rig.a.num_sent < 60) rig.a.poll();
        target.join();
    }
}

}  // namespace
}  // namespace fkv::test
