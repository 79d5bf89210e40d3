// Completion counters of the receiving side: a flat array indexed by slot, no lock on the data path.
//
// Threads:  add() from progress threads; everything else from any thread.
// Failure:  a count above its total is kOverrun (once) and kLate (afterwards), a former generation is kStale.
//
// One 64-bit word per slot holds generation, an "ended" bit and the count, so that adding, firing and reusing a slot
// are decided by compare-and-swap on the same word: a slow thread can never fire, or add to, the slot's next life. A
// slot that nobody holds counts as ended, so that it takes no arrivals for its next owner.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/imm.h"

namespace fkv {

struct CounterToken {
    std::uint32_t slot = 0;
    std::uint32_t generation = 0;
    std::uint64_t unit_bytes = 0;  // 0: no counter, the write carries no immediate
};

enum class CounterVerdict : std::uint8_t { kNothing, kFired, kOverrun, kLate, kStale };

class CounterTable {
  public:
    explicit CounterTable(std::uint32_t num_slots);

    // Takes the slot that has been free for longest. Throws Error(kWouldBlock) when none is.
    CounterToken allocate(std::uint64_t unit_bytes);
    // Sets the total. Arrivals before this were kept; kFired or kOverrun may be the answer at once.
    CounterVerdict arm(const CounterToken& token, std::uint64_t expected_units);
    // Gives the slot back, and says whether it will be used again: that takes proof that no write can arrive any more,
    // which is the caller's word or the counter's having fired. Otherwise the slot is poisoned: never used again.
    bool release(const CounterToken& token, bool quiescent);
    std::uint64_t received(const CounterToken& token) const;

    CounterVerdict add(Imm imm) noexcept;

    std::uint32_t num_slots() const { return static_cast<std::uint32_t>(slots_.size()); }
    std::uint32_t num_in_use() const;
    std::uint32_t num_poisoned() const;

  private:
    struct Slot {
        std::atomic<std::uint64_t> word{0};
        std::atomic<std::uint64_t> expected{~std::uint64_t{0}};
    };

    Slot& checked(const CounterToken& token);  // with mutex_ held
    CounterVerdict evaluate(Slot& slot, std::uint64_t generation) noexcept;

    std::vector<Slot> slots_;
    mutable std::mutex mutex_;
    std::deque<std::uint32_t> free_;  // guarded by mutex_; oldest first
    std::vector<bool> in_use_;        // guarded by mutex_
    std::uint32_t num_poisoned_ = 0;  // guarded by mutex_
};

}  // namespace fkv
