// Monotonic time in nanoseconds; the only clock that native code reads.
#pragma once

#include <chrono>
#include <cstdint>

namespace fkv {

inline std::int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

constexpr std::int64_t kMicrosecond = 1'000;
constexpr std::int64_t kMillisecond = 1'000'000;
constexpr std::int64_t kSecond = 1'000'000'000;

}  // namespace fkv
