// The frames of control messages. A payload is cut into frames on the way out and put together by the receiver's owner.
//
// Bytes from a peer are untrusted: parse() accepts nothing that does not hold together.
#pragma once

#include <cstring>
#include <optional>
#include <span>

#include "engine/region.h"

namespace fkv {

constexpr std::size_t kFrameBytes = 16384;  // one posted receive; within every provider's eager range or just above
constexpr std::uint32_t kFrameMagic = 0x31564b46;  // "FKV1"
constexpr std::uint16_t kFrameVersion = 1;

enum class FrameKind : std::uint16_t {
    kPing = 1,
    kData = 2,
    kGoodbye = 3,  // message_id: the sender's group << 32 | over how many links it says so
};

// Little-endian, like every machine that runs this.
struct FrameHeader {
    std::uint32_t magic;
    std::uint16_t version;
    std::uint16_t kind;
    Epoch sender;
    std::uint64_t message_id;   // counts up per sender
    std::uint32_t total_bytes;  // of the whole message
    std::uint32_t offset;       // of this frame's payload in it
};
static_assert(sizeof(FrameHeader) == 40, "the layout is the wire format");

constexpr std::size_t kMaxFramePayload = kFrameBytes - sizeof(FrameHeader);
constexpr std::size_t kMaxMessageBytes = std::size_t{1} << 30;

struct Frame {
    FrameHeader header;
    std::span<const std::byte> payload;
};

inline std::optional<Frame> parse_frame(std::span<const std::byte> bytes) {
    Frame frame{};
    if (bytes.size() < sizeof(FrameHeader)) return std::nullopt;
    std::memcpy(&frame.header, bytes.data(), sizeof(FrameHeader));
    frame.payload = bytes.subspan(sizeof(FrameHeader));
    const auto& h = frame.header;
    if (h.magic != kFrameMagic || h.version != kFrameVersion) return std::nullopt;
    if (h.kind < static_cast<std::uint16_t>(FrameKind::kPing) ||
        h.kind > static_cast<std::uint16_t>(FrameKind::kGoodbye))
        return std::nullopt;
    if (h.offset > h.total_bytes || frame.payload.size() > h.total_bytes - h.offset) return std::nullopt;
    return frame;
}

}  // namespace fkv
