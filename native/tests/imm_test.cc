// The 32 bits of a counted write: packing loses nothing, and every word means something.
#include "engine/imm.h"

#include <gtest/gtest.h>

#include <random>

namespace fkv {
namespace {

TEST(Imm, fields_fill_the_word_without_overlap) {
    EXPECT_EQ(pack({kUserSlot, 0, 0}) | pack({0, kNumGenerations - 1, 0}) | pack({0, 0, kMaxWeight}), 0xffffffffu);
    EXPECT_EQ(pack({kUserSlot, 0, 0}) & pack({0, kNumGenerations - 1, 0}), 0u);
    EXPECT_EQ(pack({0, kNumGenerations - 1, 0}) & pack({0, 0, kMaxWeight}), 0u);
}

TEST(Imm, layout_is_the_wire_format) {
    // Frozen: both sides of a version must agree on it.
    EXPECT_EQ(pack({1, 0, 0}), 0x8000u);
    EXPECT_EQ(pack({0, 1, 0}), 0x400u);
    EXPECT_EQ(pack({0, 0, 1}), 1u);
    EXPECT_EQ(pack({0x1abcd, 0x15, 0x2aa}), 0xd5e6d6aau);
}

TEST(Imm, every_word_survives_a_round_trip) {
    const auto seed = std::random_device{}();
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    std::vector<std::uint32_t> words = {0, 1, 0x7fffffff, 0x80000000, 0xffffffff};
    for (int i = 0; i < 100'000; ++i) words.push_back(static_cast<std::uint32_t>(random()));
    for (const auto word : words) {
        const auto imm = unpack(word);
        EXPECT_LE(imm.slot, kUserSlot);
        EXPECT_LT(imm.generation, kNumGenerations);
        EXPECT_LE(imm.weight, kMaxWeight);
        ASSERT_EQ(pack(imm), word);
    }
}

}  // namespace
}  // namespace fkv
