// Stands in for native/engine/stats.h in engine_cost_without: the same figures, which nobody counts. The difference of
// the two programs is what counting costs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/clock.h"

namespace fkv {

struct Count {
    void add(std::uint64_t) {}
    std::uint64_t get() const { return 1; }  // not a multiple of kPostSample: no post is timed
};

struct Stopwatch {
    void begin(std::int64_t) {}
    void end(std::int64_t) {}
    std::uint64_t get_ns() const { return 0; }
};

struct LatencyHistogram {
    static constexpr std::size_t kNumBuckets = 25;
    void add(std::uint64_t) {}
    std::uint64_t bucket(std::size_t) const { return 0; }
};

struct RailStats {
    Count ops, bytes, completions, again, errors, imms, messages;
    Stopwatch busy;
    LatencyHistogram write_latency, post_latency;
};
constexpr std::uint64_t kPostSample = 64;

struct PeerStats {
    Count ops, bytes, errors;
    LatencyHistogram write_latency;
};

struct ReceiverStats {
    Count stale_imms, violations, malformed_frames, dropped_imms;
};

}  // namespace fkv
