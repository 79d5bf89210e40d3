#include "ofi/neighbours.h"

#include <pthread.h>

#include <chrono>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "base/clock.h"

namespace fkv::ofi {
namespace {

// A post that takes longer does not return: it waits for a lock that somebody has died with.
constexpr std::int64_t kPostNs = 2 * kSecond;

}  // namespace

struct Neighbour::Street {
    std::mutex mutex;
    std::map<std::string, std::shared_ptr<Member>> members;
};

// Never destroyed, since engines may be closed at the very end of the process. A forked child has one of its own: the
// parent's locks may be held by threads that the child does not have.
Neighbour::Street& Neighbour::street() {
    static std::atomic<Street*> street{new Street};
    [[maybe_unused]] static const int registered =
        pthread_atfork(nullptr, nullptr, [] { street.store(new Street, std::memory_order_relaxed); });
    return *street.load(std::memory_order_relaxed);
}

Neighbour::Neighbour(std::string name) : name_(std::move(name)), street_(street()) {
    const std::lock_guard lock(street_.mutex);
    street_.members[name_] = member_;
}

Neighbour::~Neighbour() { leave(nullptr); }

Neighbour::Closed Neighbour::meet(const std::string& name) {
    const std::lock_guard lock(street_.mutex);
    const auto found = street_.members.find(name);
    if (found == street_.members.end()) return nullptr;
    const auto& other = found->second;
    if (other != member_ && !other->closed) {
        member_->met.insert(other);
        other->met.insert(member_);
    }
    return Closed(other, &other->closed);
}

bool Neighbour::retire() {
    // Who begins to post after this sees it, and who has begun before is waited for.
    member_->closed.store(true);
    std::unique_lock lock(street_.mutex);
    const auto met = member_->met;
    lock.unlock();
    const auto until = now_ns() + kPostNs;
    for (const auto& other : met) {
        const auto posts = other->posts.load();
        while (posts % 2 != 0 && other->posts.load() == posts && now_ns() < until)
            std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return !met.empty();
}

bool Neighbour::leave(const std::shared_ptr<void>& remains) {
    std::vector<std::shared_ptr<void>> kept;  // closed without the lock, which takes a moment
    const std::lock_guard lock(street_.mutex);
    street_.members.erase(name_);
    kept.swap(member_->kept);
    const auto met = std::exchange(member_->met, {});
    for (const auto& other : met) {
        other->met.erase(member_);
        if (remains) other->kept.push_back(remains);
    }
    return !met.empty();
}

}  // namespace fkv::ofi
