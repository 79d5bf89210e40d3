// A bounded queue from one thread to one other.
//
// Threads:  room(), full() and push() by the producer only; front() and pop() by the consumer only; empty() by both.
// Blocking: never; push() needs room().
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <utility>
#include <vector>

namespace fkv {

template <typename T>
class Ring {
  public:
    // Rounded up to a power of two.
    explicit Ring(std::size_t capacity) : items_(std::bit_ceil(capacity)), mask_(items_.size() - 1) {}

    std::size_t capacity() const { return items_.size(); }

    // seq_cst throughout: who says "I sleep" and then sees an empty (or a full) ring is sure that the other side sees
    // that it sleeps once it has pushed (or popped).
    std::size_t room() const { return items_.size() - (tail_.load(std::memory_order_relaxed) - head_.load()); }
    bool full() const { return room() == 0; }
    void push(T item) {
        const auto tail = tail_.load(std::memory_order_relaxed);
        items_[tail & mask_] = std::move(item);
        tail_.store(tail + 1);
    }

    bool empty() const { return head_.load() == tail_.load(); }
    T& front() { return items_[head_.load(std::memory_order_relaxed) & mask_]; }
    T pop() {
        const auto head = head_.load(std::memory_order_relaxed);
        T item = std::move(items_[head & mask_]);
        head_.store(head + 1);
        return item;
    }

  private:
    // Each side writes one of them and reads the other: apart, lest every write takes the other's cache line away.
    static constexpr std::size_t kCacheLine = 64;

    std::vector<T> items_;
    const std::size_t mask_;
    alignas(kCacheLine) std::atomic<std::size_t> head_{0};  // taken so far
    alignas(kCacheLine) std::atomic<std::size_t> tail_{0};  // brought so far
};

}  // namespace fkv
