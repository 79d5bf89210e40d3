#include "engine/counters.h"

#include <string>

#include "base/error.h"

namespace fkv {
namespace {

// word = generation (5 bits, from bit 58) | ended (bit 57) | count (57 bits)
constexpr unsigned kGenerationShift = 58;
constexpr std::uint64_t kEnded = std::uint64_t{1} << 57;
constexpr std::uint64_t kCountMask = kEnded - 1;
constexpr std::uint64_t kNotArmed = ~std::uint64_t{0};

constexpr std::uint64_t generation_of(std::uint64_t word) { return word >> kGenerationShift; }

}  // namespace

CounterTable::CounterTable(std::uint32_t num_slots) : slots_(num_slots), in_use_(num_slots, false) {
    if (num_slots == 0 || num_slots > kUserSlot)
        throw Error(ErrorKind::kConfig, "num_counters=" + std::to_string(num_slots) + " must lie in [1, " +
                                            std::to_string(kUserSlot) + "]");
    for (std::uint32_t slot = 0; slot < num_slots; ++slot) {
        slots_[slot].word.store(kEnded);
        free_.push_back(slot);
    }
}

CounterToken CounterTable::allocate(std::uint64_t unit_bytes) {
    if (unit_bytes == 0) throw Error(ErrorKind::kConfig, "unit_bytes=0: a counter needs a unit of at least 1 byte");
    std::lock_guard lock(mutex_);
    if (free_.empty())
        throw Error(ErrorKind::kWouldBlock, "all " + std::to_string(slots_.size()) + " counters are in use (" +
                                                std::to_string(num_poisoned_) + " of them poisoned)");
    const auto index = free_.front();
    free_.pop_front();
    in_use_[index] = true;
    auto& slot = slots_[index];
    // The generation moved on when the slot was released. The total goes before the word opens the slot: an arrival
    // must never be held against the former one.
    slot.expected.store(kNotArmed);
    const auto generation = generation_of(slot.word.load());
    slot.word.store(generation << kGenerationShift);
    return {index, static_cast<std::uint32_t>(generation), unit_bytes};
}

CounterTable::Slot& CounterTable::checked(const CounterToken& token) {
    if (token.slot >= slots_.size() || !in_use_[token.slot] ||
        generation_of(slots_[token.slot].word.load()) != token.generation)
        throw Error(ErrorKind::kConfig, "counter slot " + std::to_string(token.slot) + " generation " +
                                            std::to_string(token.generation) + " is not in use (it was released)");
    return slots_[token.slot];
}

CounterVerdict CounterTable::arm(const CounterToken& token, std::uint64_t expected_units) {
    if (expected_units > kCountMask)
        throw Error(ErrorKind::kConfig,
                    "expected_units=" + std::to_string(expected_units) + " is above the limit of 2^57 - 1");
    std::lock_guard lock(mutex_);  // so that the slot cannot be released, and taken by another, in between
    auto& slot = checked(token);
    std::uint64_t none = kNotArmed;
    if (!slot.expected.compare_exchange_strong(none, expected_units))
        throw Error(ErrorKind::kConfig, "counter slot " + std::to_string(token.slot) + " is armed already, with " +
                                            std::to_string(none) + " units");
    return evaluate(slot, token.generation);
}

bool CounterTable::release(const CounterToken& token, bool quiescent) {
    std::lock_guard lock(mutex_);
    auto& slot = checked(token);
    // From here on every arrival is of a former generation.
    const std::uint64_t next = (token.generation + 1) % kNumGenerations;
    const auto last = slot.word.exchange(next << kGenerationShift | kEnded);
    const bool fired = (last & kEnded) && (last & kCountMask) == slot.expected.load();
    in_use_[token.slot] = false;
    if (quiescent || fired) {
        free_.push_back(token.slot);
        return true;
    }
    ++num_poisoned_;
    return false;
}

std::uint64_t CounterTable::received(const CounterToken& token) const {
    const auto word = slots_.at(token.slot).word.load();
    return generation_of(word) == token.generation ? word & kCountMask : 0;
}

CounterVerdict CounterTable::add(Imm imm) noexcept {
    if (imm.slot >= slots_.size()) return CounterVerdict::kStale;
    auto& slot = slots_[imm.slot];
    auto word = slot.word.load(std::memory_order_relaxed);
    do {
        if (generation_of(word) != imm.generation) return CounterVerdict::kStale;
        if (word & kEnded) return CounterVerdict::kLate;
        // seq_cst pairs with arm(): either this add sees the total, or arm() sees this count.
    } while (!slot.word.compare_exchange_weak(word, word + imm.weight));
    return evaluate(slot, imm.generation);
}

CounterVerdict CounterTable::evaluate(Slot& slot, std::uint64_t generation) noexcept {
    auto word = slot.word.load();
    for (;;) {
        if (generation_of(word) != generation || (word & kEnded)) return CounterVerdict::kNothing;
        const auto expected = slot.expected.load();
        const auto count = word & kCountMask;
        if (expected == kNotArmed || count < expected) return CounterVerdict::kNothing;
        // Whoever sets the bit reports it: a counter fires exactly once.
        if (slot.word.compare_exchange_weak(word, word | kEnded))
            return count == expected ? CounterVerdict::kFired : CounterVerdict::kOverrun;
    }
}

std::uint32_t CounterTable::num_in_use() const {
    std::lock_guard lock(mutex_);
    return static_cast<std::uint32_t>(slots_.size() - free_.size()) - num_poisoned_;
}

std::uint32_t CounterTable::num_poisoned() const {
    std::lock_guard lock(mutex_);
    return num_poisoned_;
}

}  // namespace fkv
