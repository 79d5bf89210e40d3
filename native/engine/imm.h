// The 32 bits that travel with a counted write: slot | generation | weight.
//
// Nothing may assume that writes arrive in order (EFA), so the receiver counts. `slot` says which of its counters,
// `weight` how many units of the transfer this write stands for, `generation` guards against a slot's former life.
// The last slot is not a counter: its immediates carry 15 bits of the user's own.
#pragma once

#include <cstdint>

namespace fkv {

constexpr unsigned kWeightBits = 10;
constexpr unsigned kGenerationBits = 5;
constexpr unsigned kSlotBits = 17;
static_assert(kWeightBits + kGenerationBits + kSlotBits == 32, "providers deliver as few as 4 bytes: fi_domain(3)");

constexpr std::uint32_t kMaxWeight = (1u << kWeightBits) - 1;
constexpr std::uint32_t kNumGenerations = 1u << kGenerationBits;
constexpr std::uint32_t kUserSlot = (1u << kSlotBits) - 1;

struct Imm {
    std::uint32_t slot;
    std::uint32_t generation;
    std::uint32_t weight;
};

constexpr std::uint32_t pack(Imm imm) {
    return imm.slot << (kGenerationBits + kWeightBits) | imm.generation << kWeightBits | imm.weight;
}

constexpr Imm unpack(std::uint32_t word) {
    return {word >> (kGenerationBits + kWeightBits), (word >> kWeightBits) & (kNumGenerations - 1), word & kMaxWeight};
}

constexpr unsigned kUserBits = kGenerationBits + kWeightBits;

constexpr std::uint32_t pack_user(std::uint32_t value) {
    return kUserSlot << kUserBits | (value & ((1u << kUserBits) - 1));
}

constexpr std::uint32_t unpack_user(std::uint32_t word) { return word & ((1u << kUserBits) - 1); }

}  // namespace fkv
