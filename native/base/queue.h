// A bounded queue from many threads to one consumer.
//
// Threads:  push(), push_all() and close() from any thread; pop_all() by the consumer only.
// Blocking: never for longer than a swap of two vectors; a full or closed queue answers false.
#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>
#include <utility>
#include <vector>

namespace fkv {

template <typename T>
class BoundedQueue {
  public:
    explicit BoundedQueue(std::size_t capacity) : capacity_(capacity) { items_.reserve(capacity < 64 ? capacity : 64); }

    bool push(T item) {
        std::lock_guard lock(mutex_);
        if (closed_ || items_.size() >= capacity_) return false;
        items_.push_back(std::move(item));
        size_.store(items_.size(), std::memory_order_seq_cst);
        return true;
    }

    // All or none.
    bool push_all(std::vector<T>& items) {
        std::lock_guard lock(mutex_);
        if (closed_ || items_.size() + items.size() > capacity_) return false;
        for (auto& item : items) items_.push_back(std::move(item));
        size_.store(items_.size(), std::memory_order_seq_cst);
        return true;
    }

    // From here on nothing is taken, so that a last pop_all() is the last one.
    void close() {
        std::lock_guard lock(mutex_);
        closed_ = true;
    }

    // Moves everything queued into `out`, which must be empty. Costs one load when nothing is there.
    void pop_all(std::vector<T>& out) {
        if (empty()) return;
        std::lock_guard lock(mutex_);
        items_.swap(out);
        size_.store(0, std::memory_order_seq_cst);
    }

    // seq_cst: a consumer that says "I sleep" and then sees an empty queue is sure to be woken by the next push.
    bool empty() const { return size_.load(std::memory_order_seq_cst) == 0; }

  private:
    const std::size_t capacity_;
    std::mutex mutex_;
    std::vector<T> items_;  // guarded by mutex_
    bool closed_ = false;   // guarded by mutex_
    std::atomic<std::size_t> size_{0};
};

}  // namespace fkv
