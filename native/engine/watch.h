// A word that says how far a computation is: `step << 16 | layers done`, bumped by a GPU or by CPU threads.
//
// Transfers may wait for it piece by piece: what belongs to layer n of a step goes once the word says that n layers of
// that step are done, or that a later step has begun. That is a level, not an edge: who comes late goes at once, and
// steps that nobody waits for are nothing.
//
// Threads: set() and word() from any; the word itself may be written by anything that shares its memory.
#pragma once

#include <atomic>
#include <cstdint>

namespace fkv {

class Watch {
  public:
    static constexpr unsigned kLayerBits = 16;

    // The word is the caller's and outlives the watch. It must be aligned to 8 bytes. `is_polled`: something writes it
    // that wakes nobody, so that engines look at it while a transfer waits.
    explicit Watch(std::uint64_t* word, bool is_polled = true) : word_(word), is_polled_(is_polled) {}

    static constexpr std::uint64_t pack(std::uint64_t step, std::uint64_t layers) {
        return step << kLayerBits | layers;
    }
    // Releases what the caller has written before. A store, since each step starts at 0 layers anew. In the one order
    // of all (seq_cst), as word(): whoever sets it and sees a thread awake knows that the thread will see the word
    // before it sleeps.
    void set(std::uint64_t step, std::uint64_t layers) { std::atomic_ref(*word_).store(pack(step, layers)); }
    // Acquires what was written before the word was.
    std::uint64_t word() const { return std::atomic_ref(*word_).load(); }
    bool is_polled() const { return is_polled_; }

    // Words of one watch are compared as they are: a later step is larger, whatever its layers.
    bool has_reached(std::uint64_t wanted) const { return word() >= wanted; }

  private:
    std::uint64_t* const word_;
    const bool is_polled_;
};

}  // namespace fkv
