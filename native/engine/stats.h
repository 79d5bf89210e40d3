// Figures that one progress thread writes and anyone may read.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>

#include "base/clock.h"

namespace fkv {

// A count with a single writer: a plain load and store is enough and costs no locked instruction.
class Count {
  public:
    void add(std::uint64_t n) { value_.store(value_.load(std::memory_order_relaxed) + n, std::memory_order_relaxed); }
    std::uint64_t get() const { return value_.load(std::memory_order_relaxed); }

  private:
    std::atomic<std::uint64_t> value_{0};
};

// How long something has lasted in all, what lasts now included. A single writer. One number, so that a reader never
// sees half of a change: what has been spent, and while it lasts that less the time at which it began, which is
// negative. A reader may be ahead of the writer by what that takes from its look at the clock to its store.
class Stopwatch {
  public:
    void begin(std::int64_t now) { add(-now); }
    void end(std::int64_t now) { add(now); }
    std::uint64_t get_ns() const {
        for (;;) {
            const auto value = value_.load(std::memory_order_acquire);
            if (value >= 0) return static_cast<std::uint64_t>(value);
            const auto now = now_ns();
            // Had it ended before the clock was read, what has passed since would be counted, and later not.
            if (value_.load(std::memory_order_acquire) == value) return static_cast<std::uint64_t>(value + now);
        }
    }

  private:
    void add(std::int64_t n) { value_.store(value_.load(std::memory_order_relaxed) + n, std::memory_order_release); }

    std::atomic<std::int64_t> value_{0};
};

// How long something took: bucket i counts durations below 2^i units (and not below 2^(i-1)).
class LatencyHistogram {
  public:
    static constexpr std::size_t kNumBuckets = 25;  // the last one takes all from 8 s on, where the unit is 1 us

    void add(std::uint64_t units) {
        const auto bucket = static_cast<std::size_t>(std::bit_width(units));
        buckets_[bucket < kNumBuckets ? bucket : kNumBuckets - 1].add(1);
    }
    std::uint64_t bucket(std::size_t index) const { return buckets_[index].get(); }

  private:
    std::array<Count, kNumBuckets> buckets_{};
};

struct RailStats {
    Count ops, bytes, completions, again, errors, imms, messages;
    Stopwatch busy;                  // with at least one operation in flight
    LatencyHistogram write_latency;  // from post to completion, in us
    LatencyHistogram post_latency;   // of the call that posts a write, in ns; one in kPostSample
};
constexpr std::uint64_t kPostSample = 64;  // looking at the clock twice costs as much as a fast post

struct PeerStats {
    Count ops, bytes, errors;
    LatencyHistogram write_latency;  // as RailStats'
};

struct ReceiverStats {
    Count stale_imms, violations, malformed_frames;
    Count dropped_imms;  // the user's own, for which the inbox had no room
};

}  // namespace fkv
