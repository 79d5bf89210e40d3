// Frames from peers: what holds together is taken as it is, everything else is refused without a look past its end.
#include "engine/message.h"

#include <gtest/gtest.h>

#include <random>

namespace fkv {
namespace {

FrameHeader header_of(std::uint32_t total, std::uint32_t offset) {
    FrameHeader header{kFrameMagic, kFrameVersion, static_cast<std::uint16_t>(FrameKind::kData), {}, 7, total, offset};
    for (std::size_t i = 0; i < header.sender.size(); ++i) header.sender[i] = static_cast<std::byte>(i);
    return header;
}

// Exactly as long as its content, so that AddressSanitizer sees a read past the end.
std::vector<std::byte> frame_of(const FrameHeader& header, std::size_t payload_bytes) {
    std::vector<std::byte> bytes(sizeof header + payload_bytes, std::byte{0xab});
    std::memcpy(bytes.data(), &header, sizeof header);
    return bytes;
}

TEST(Frame, a_frame_comes_out_as_it_went_in) {
    const auto bytes = frame_of(header_of(100, 40), 60);
    const auto frame = parse_frame(bytes);
    ASSERT_TRUE(frame);
    EXPECT_EQ(frame->header.message_id, 7u);
    EXPECT_EQ(frame->header.total_bytes, 100u);
    EXPECT_EQ(frame->header.offset, 40u);
    EXPECT_EQ(frame->header.sender[15], std::byte{15});
    EXPECT_EQ(frame->payload.data(), bytes.data() + sizeof(FrameHeader));
    EXPECT_EQ(frame->payload.size(), 60u);
}

TEST(Frame, layout_is_the_wire_format) {
    const auto bytes = frame_of(header_of(0x01020304, 0x11121314), 0);
    const unsigned char expected[] = {'F', 'K', 'V', '1', 1, 0, 2, 0};
    EXPECT_EQ(std::memcmp(bytes.data(), expected, sizeof expected), 0);
    EXPECT_EQ(bytes[8], std::byte{0});      // sender
    EXPECT_EQ(bytes[24], std::byte{7});     // message id
    EXPECT_EQ(bytes[32], std::byte{0x04});  // total
    EXPECT_EQ(bytes[36], std::byte{0x14});  // offset
    EXPECT_EQ(bytes.size(), 40u);
}

TEST(Frame, an_empty_message_is_a_frame_without_payload) {
    const auto bytes = frame_of(header_of(0, 0), 0);
    ASSERT_TRUE(parse_frame(bytes));
    EXPECT_TRUE(parse_frame(bytes)->payload.empty());
}

TEST(Frame, a_truncated_header_is_refused_at_every_length) {
    const auto whole = frame_of(header_of(8, 0), 8);
    for (std::size_t n = 0; n < sizeof(FrameHeader); ++n)
        EXPECT_FALSE(parse_frame(std::vector<std::byte>(whole.begin(), whole.begin() + n))) << n << " bytes";
}

TEST(Frame, payload_beyond_the_announced_total_is_refused) {
    EXPECT_FALSE(parse_frame(frame_of(header_of(10, 0), 11)));
    EXPECT_FALSE(parse_frame(frame_of(header_of(10, 10), 1)));
    EXPECT_FALSE(parse_frame(frame_of(header_of(10, 11), 0)));
    // offset + payload wraps around 2^32
    EXPECT_FALSE(parse_frame(frame_of(header_of(0xffffffff, 0xffffffff), 8)));
    EXPECT_FALSE(parse_frame(frame_of(header_of(8, 0xfffffffc), 8)));
}

TEST(Frame, another_magic_version_or_kind_is_refused) {
    const auto good = header_of(4, 0);
    auto header = good;
    header.magic ^= 1;
    EXPECT_FALSE(parse_frame(frame_of(header, 4)));
    header = good;
    header.version = 2;
    EXPECT_FALSE(parse_frame(frame_of(header, 4)));
    for (const std::uint16_t kind : {0, 4, 0x100, 0xffff}) {
        header = good;
        header.kind = kind;
        EXPECT_FALSE(parse_frame(frame_of(header, 4))) << kind;
    }
    EXPECT_TRUE(parse_frame(frame_of(good, 4)));
}

TEST(Frame, no_bytes_are_read_as_more_than_they_are) {
    const auto seed = std::random_device{}();
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    int num_accepted = 0;
    for (int round = 0; round < 100'000; ++round) {
        auto header = header_of(static_cast<std::uint32_t>(random()), static_cast<std::uint32_t>(random()));
        if (round % 2) header.total_bytes = random() % 100, header.offset = random() % 100;
        auto bytes = frame_of(header, random() % 100);
        // Half of them with a bit flipped anywhere.
        if (random() % 2) bytes[random() % bytes.size()] ^= std::byte(1 << random() % 8);
        const auto frame = parse_frame(bytes);
        if (!frame) continue;
        ++num_accepted;
        ASSERT_EQ(frame->payload.data() + frame->payload.size(), bytes.data() + bytes.size());
        ASSERT_LE(std::uint64_t{frame->header.offset} + frame->payload.size(), frame->header.total_bytes);
    }
    EXPECT_GT(num_accepted, 1000);
}

TEST(Frame, a_full_frame_fits_a_receive) {
    static_assert(sizeof(FrameHeader) + kMaxFramePayload == kFrameBytes);
    EXPECT_TRUE(parse_frame(frame_of(header_of(1 << 20, 0), kMaxFramePayload)));
}

}  // namespace
}  // namespace fkv
