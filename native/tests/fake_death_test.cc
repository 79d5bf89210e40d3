// Deaths and stops on the fake fabric, at every step of an operation, over many seeds.
#include <gtest/gtest.h>

#include "fake/fake_fabric.h"
#include "nic_pair.h"

namespace fkv::test {
namespace {

using namespace fkv::fake;

constexpr Step kSteps[] = {Step::kLeave,    Step::kArrive,     Step::kLandFirst,
                           Step::kLandLast, Step::kTellTarget, Step::kTellSource};

class FakeDeath : public ::testing::TestWithParam<Step> {
  protected:
    // Sixteen pages of 256 bytes from a to b; `rule` acts on the fifth operation that comes to this step.
    void start(std::uint64_t seed, Rule rule, const FakeProfile& profile) {
        fabric_ = std::make_unique<FakeFabric>(seed);
        pair_ = std::make_unique<NicPair>([&](const Arena&) { return fabric_->open_nic(profile); }, 1 << 14);
        rule.step = GetParam();
        rule.skip = 4;
        rule_ = fabric_->add_rule(rule);
        b().on_imm = [this](std::uint32_t i) { EXPECT_TRUE(landed(i)) << "page " << i << ", " << fabric_->describe(); };
        b().keep_receives(8, 0);
        for (std::uint32_t i = 0; i < kPages; ++i) {
            write_stamp(a().memory.subspan(i * 256, 256), i);
            pair_->write(a(), b(), i * 256, 256, i * 256, i);
        }
        polls(400);
        EXPECT_EQ(fabric_->num_fired(rule_), 1u) << fabric_->describe();
    }
    void polls(int count) {
        pair_->drive([&] { return count-- == 0; });
    }
    End& a() { return *pair_->a; }
    End& b() { return *pair_->b; }
    bool landed(std::uint32_t i) { return has_stamp(b().memory.subspan(i * 256, 256), i); }
    std::size_t num_open() {
        std::size_t count = 0;
        for (const auto& op : a().posted) count += op.num_ends == 0;
        return count;
    }
    void check_ends() {
        for (const auto& op : a().posted) EXPECT_LE(op.num_ends, 1) << fabric_->describe();
        EXPECT_EQ(a().num_unknown + b().num_unknown, 0u);
        EXPECT_TRUE(fabric_->violations().empty()) << fabric_->describe();
    }

    static constexpr std::uint32_t kPages = 16;
    std::unique_ptr<FakeFabric> fabric_;
    std::unique_ptr<NicPair> pair_;
    RuleId rule_ = 0;
};

std::string step_name(const ::testing::TestParamInfo<Step>& info) {
    const char* const names[] = {"leave", "arrive", "land_first", "land_last", "tell_target", "tell_source"};
    return names[static_cast<int>(info.param)];
}
INSTANTIATE_TEST_SUITE_P(AtEveryStep, FakeDeath, ::testing::ValuesIn(kSteps), step_name);

TEST_P(FakeDeath, target_that_dies_with_errors_ends_every_operation) {
    for (std::uint64_t seed = 1; seed <= 20; ++seed) {
        start(seed, {.action = Action::kKillTarget}, FakeProfile::strict());
        EXPECT_EQ(num_open(), 0u) << fabric_->describe();
        EXPECT_GT(a().num_failed, 0u);
        check_ends();
    }
}

TEST_P(FakeDeath, target_that_dies_silently_ends_nothing_that_it_did_not_accept) {
    for (std::uint64_t seed = 1; seed <= 20; ++seed) {
        start(seed, {.action = Action::kKillTarget, .death = Death::kSilent}, FakeProfile::strict());
        EXPECT_EQ(a().num_failed, 0u) << fabric_->describe();
        // The sender's own close is what is left, and the memory of the dead stays as it is.
        const auto snapshot = b().snapshot();
        a().nic->close_endpoint();
        polls(100);
        EXPECT_EQ(snapshot, b().snapshot());
        EXPECT_EQ(fabric_->stats().in_flight, 0u) << fabric_->describe();
        check_ends();
    }
}

TEST_P(FakeDeath, sender_that_dies_leaves_whole_pages_or_no_immediate) {
    bool late = false;
    for (std::uint64_t seed = 1; seed <= 20; ++seed) {
        bool dead = false;
        start(seed, {.action = Action::kKillSource, .call = [&](const OpView&) { dead = true; }},
              FakeProfile::strict());
        // To the killed side everything that was posted is over.
        EXPECT_EQ(num_open(), 0u) << fabric_->describe();
        EXPECT_TRUE(dead);
        late |= b().imms.size() > 4;
        const auto snapshot = b().snapshot();
        polls(100);
        EXPECT_EQ(snapshot, b().snapshot());
        check_ends();
    }
    EXPECT_TRUE(late) << "nothing that was on its way arrived after the death: too kind";
}

TEST_P(FakeDeath, frozen_target_loses_nothing) {
    for (std::uint64_t seed = 1; seed <= 10; ++seed)
        for (const auto& profile : {FakeProfile::strict(), FakeProfile::fail_stop()}) {
            start(seed, {.action = Action::kFreezeTarget}, profile);
            // Software that is stopped moves no data; an offloaded NIC goes on without it.
            EXPECT_EQ(num_open() == 0, profile.offloaded) << fabric_->describe();
            const auto imms = b().imms.size();
            polls(50);
            EXPECT_EQ(b().imms.size(), imms);
            fabric_->thaw(FakeFabric::id_of(*b().nic));
            EXPECT_TRUE(pair_->drive([&] { return b().imms.size() == kPages && num_open() == 0; }))
                << fabric_->describe();
            EXPECT_EQ(a().num_failed, 0u);
            check_ends();
        }
}

TEST_P(FakeDeath, frozen_sender_goes_on_where_it_was) {
    for (std::uint64_t seed = 1; seed <= 10; ++seed)
        for (auto profile : {FakeProfile::strict(), FakeProfile::fail_stop()}) {
            profile.eagain_percent = 0;  // all is posted before the first poll
            fabric_ = std::make_unique<FakeFabric>(seed);
            pair_ = std::make_unique<NicPair>([&](const Arena&) { return fabric_->open_nic(profile); }, 1 << 14);
            fabric_->add_rule({.step = GetParam(), .skip = 1, .action = Action::kFreezeSource});
            for (std::uint32_t i = 0; i < 4; ++i)
                ASSERT_TRUE(a().try_write(i * 256, 256, b().remote().base + i * 256, b().remote().rkey, i));
            polls(200);
            fabric_->thaw(FakeFabric::id_of(*a().nic));
            EXPECT_TRUE(pair_->drive([&] { return b().imms.size() == 4 && num_open() == 0; })) << fabric_->describe();
            check_ends();
        }
}

TEST(FakeProcess, nics_of_one_process_die_together) {
    FakeFabric fabric(1);
    auto profile = FakeProfile::strict();
    profile.process = 7;
    auto first = fabric.open_nic(profile), second = fabric.open_nic(profile), other = fabric.open_nic();
    fabric.kill(FakeFabric::id_of(*first));
    std::byte buffer[8]{};
    OpContext context{};
    auto mr = second->register_memory(buffer, sizeof buffer);
    EXPECT_EQ(second->post_recv({buffer, mr->local_desc(), sizeof buffer, 0, &context}), PostResult::kFailed);
    auto other_mr = other->register_memory(buffer, sizeof buffer);
    EXPECT_NE(other->post_recv({buffer, other_mr->local_desc(), sizeof buffer, 0, &context}), PostResult::kFailed);
    other->close_endpoint();
}

// Everything at once, over seeds: failures now and then, and each operation ends once, with its data in place.
TEST(FakeSoak, every_operation_ends_once) {
    for (std::uint64_t seed = 1; seed <= 15; ++seed) {
        FakeFabric fabric(seed);
        NicPair pair([&](const Arena&) { return fabric.open_nic(); }, 1 << 16);
        auto &a = *pair.a, &b = *pair.b;
        fabric.add_rule({.step = Step::kArrive, .times = Rule::kAlways, .one_in = 20, .action = Action::kFail});
        const auto held =
            fabric.add_rule({.step = Step::kTellTarget, .times = 5, .one_in = 9, .action = Action::kHold});
        std::size_t wrong = 0;
        b.on_imm = [&](std::uint32_t i) { wrong += !has_stamp(b.memory.subspan(i * 256, 256), i); };
        for (std::uint32_t i = 0; i < 200; ++i) {
            write_stamp(a.memory.subspan(i * 256, 256), i);
            ASSERT_TRUE(pair.write(a, b, i * 256, 256, i * 256, i)) << fabric.describe();
            if (i == 150) fabric.release(held);
        }
        EXPECT_TRUE(pair.drive([&] { return fabric.stats().in_flight == 0; })) << fabric.describe();
        pair.drive_for(milliseconds(1));
        EXPECT_EQ(wrong, 0u);
        EXPECT_EQ(a.num_sent + a.num_failed, 200u) << fabric.describe();
        EXPECT_EQ(b.imms.size(), a.num_sent) << fabric.describe();
        EXPECT_GT(a.num_failed, 0u);
        EXPECT_TRUE(fabric.violations().empty()) << fabric.describe();
    }
}

}  // namespace
}  // namespace fkv::test
