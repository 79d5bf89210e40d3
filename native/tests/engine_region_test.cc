// Registrations: parts where a NIC's limit wants them, regions that have them in common, and refusals that leave
// nothing.
#include <gtest/gtest.h>

#include "engine_cluster.h"

namespace fkv::test {
namespace {

constexpr std::uint64_t kMiB = 1 << 20;

// The strict profile's NICs take 4 MiB in one registration, and do not say so.
TEST(EngineRegion, what_a_nic_finds_too_large_is_registered_in_parts) {
    Cluster cluster(1);
    auto& a = cluster.add({.rails = {2}});
    const auto before = a.engine->region_figures(0);
    std::vector<std::byte> memory(11 * kMiB);
    const auto region = a.engine->register_region(memory.data(), memory.size(), 0);
    EXPECT_EQ(region->segments.ends(), (std::vector<std::uint64_t>{4 * kMiB, 8 * kMiB, 11 * kMiB}));
    auto now = a.engine->region_figures(0);
    EXPECT_EQ(now.registrations - before.registrations, 6u);
    EXPECT_EQ(now.bytes - before.bytes, memory.size());
    EXPECT_EQ(a.engine->group(0).max_registration_bytes(), 4 * kMiB) << "the next one is cut at once";
    a.engine->deregister(region);
    now = a.engine->region_figures(0);
    EXPECT_EQ(now.registrations, before.registrations);
    EXPECT_EQ(now.bytes, before.bytes);
}

TEST(EngineRegion, a_write_crosses_the_parts) {
    Cluster cluster(2);
    auto& a = cluster.add({.memory_bytes = 9 * kMiB});
    auto& b = cluster.add({.memory_bytes = 9 * kMiB});
    for (std::size_t i = 0; i < a.memory.size(); ++i) a.memory[i] = static_cast<std::byte>(i * 7 + (i >> 11));
    const std::uint64_t from = 4 * kMiB - 5000;
    const std::uint64_t to = 8 * kMiB - 3001;
    const auto token = b.counter(4096, 3);
    const auto id = a.write(b, from, to, 10000, token);
    ASSERT_TRUE(cluster.wait([&] { return a.ended(id) && b.fired(token); })) << cluster.where();
    EXPECT_EQ(a.outcome(id), Outcome::kOk);
    EXPECT_TRUE(std::equal(a.memory.begin() + from, a.memory.begin() + from + 10000, b.memory.begin() + to));
}

TEST(EngineRegion, what_is_refused_for_another_reason_is_refused_once_and_leaves_nothing) {
    Cluster cluster(3);
    auto profile = fake::FakeProfile::strict();
    profile.max_mrs = 6;
    auto& a = cluster.add({.profile = profile});
    const auto before = a.engine->region_figures(0);
    std::vector<std::byte> memory(40 * kMiB);
    EXPECT_THROW(a.engine->register_region(memory.data(), memory.size(), 0), Error);
    EXPECT_EQ(a.engine->region_figures(0).registrations, before.registrations);
    const auto region = a.engine->register_region(memory.data(), 12 * kMiB, 0);  // what there is room for
    EXPECT_EQ(region->segments.size(), 3u);
}

TEST(EngineRegion, regions_in_common_are_closed_with_the_last) {
    Cluster cluster(4);
    auto& a = cluster.add({});
    const auto before = a.engine->region_figures(0);
    std::vector<std::byte> memory(kMiB);
    const auto first = a.engine->register_region(memory.data(), memory.size(), 0);
    const auto key = first->rails[0][0]->rkey();
    const auto second = a.engine->register_again(first);
    EXPECT_EQ(second->rails[0][0]->rkey(), key);
    EXPECT_EQ(a.engine->region_figures(0).regions, before.regions + 2);
    EXPECT_EQ(a.engine->region_figures(0).registrations, before.registrations + 1);
    a.engine->deregister(first);
    EXPECT_FALSE(first->begin_use()) << "one that was deregistered is not to be used, whatever others hold";
    EXPECT_EQ(a.engine->region_figures(0).registrations, before.registrations + 1);
    EXPECT_THROW(a.engine->register_again(first), Error);
    a.engine->deregister(second);
    EXPECT_EQ(a.engine->region_figures(0).registrations, before.registrations);
    // The same address again is another registration.
    EXPECT_NE(a.engine->register_region(memory.data(), memory.size(), 0)->rails[0][0]->rkey(), key);
}

TEST(EngineRegion, device_memory_is_refused_by_a_nic_without) {
    Cluster cluster(5);
    auto& a = cluster.add({});
    try {
        a.engine->register_device({{a.memory.data(), 4096, 3}}, 0);
        FAIL();
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kRegistration);
        EXPECT_NE(std::string(error.what()).find("cuda:3"), std::string::npos) << error.what();
        EXPECT_NE(std::string(error.what()).find("fake"), std::string::npos) << error.what();
    }
    EXPECT_THROW(a.engine->register_device({{a.memory.data(), 4096, 0}, {a.memory.data(), 4096, 0}}, 0), Error);
    EXPECT_THROW(a.engine->register_device({}, 0), Error);
}

}  // namespace
}  // namespace fkv::test
