#include "ofi/neighbours.h"

#include <pthread.h>

#include <chrono>
#include <map>
#include <thread>
#include <utility>

namespace fkv::ofi {
namespace {

// For so long the others stand still, and work again, so many times.
constexpr std::chrono::milliseconds kWait{20}, kPause{80};
constexpr int kTries = 50;

}  // namespace

struct Neighbour::Street {
    std::mutex mutex;  // of members
    std::map<std::string, std::shared_ptr<Member>> members;
    std::atomic<std::size_t> size{0};
    std::atomic<std::uint64_t> time{1};
    std::shared_timed_mutex work_mutex;
    std::mutex gate;  // whoever leaves closes it, lest busy neighbours keep work_mutex for ever
    std::atomic<bool> gate_closed{false};
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
    ++street_.size;
}

Neighbour::~Neighbour() {
    const std::lock_guard lock(street_.mutex);
    street_.members.erase(name_);
    --street_.size;
}

Neighbour::Closed Neighbour::find(const std::string& name) {
    auto& here = street();
    const std::lock_guard lock(here.mutex);
    const auto found = here.members.find(name);
    return found == here.members.end() ? nullptr : Closed(found->second, &found->second->closed);
}

std::uint64_t Neighbour::time() const { return street_.time.load(); }

std::uint64_t Neighbour::move_on() { return ++street_.time; }

std::vector<std::string> Neighbour::busy_before(std::uint64_t time, bool if_polled) const {
    std::vector<std::string> busy;
    const std::lock_guard lock(street_.mutex);
    for (const auto& [name, member] : street_.members)
        if (member != member_ && !member->gone.load() && member->poller.load() != &kThisThread &&
            member->idle_at.load(std::memory_order_acquire) < time && (!if_polled || member->polled_at.load() >= time))
            busy.push_back(name);
    return busy;
}

std::shared_lock<std::shared_timed_mutex> Neighbour::at_work() const {
    if (street_.size.load(std::memory_order_relaxed) < 2) return {};
    if (street_.gate_closed.load(std::memory_order_relaxed)) const std::lock_guard wait(street_.gate);
    return std::shared_lock(street_.work_mutex);
}

Neighbour::Departure::Departure(Street& street) : street_(street) {
    for (int tries = 0; tries < kTries; ++tries) {
        street_.gate.lock();
        street_.gate_closed.store(true);
        granted = street_.work_mutex.try_lock_for(kWait);
        if (granted) return;
        street_.gate_closed.store(false);
        street_.gate.unlock();
        std::this_thread::sleep_for(kPause);
    }
}

Neighbour::Departure::~Departure() {
    if (!granted) return;
    street_.work_mutex.unlock();
    street_.gate_closed.store(false);
    street_.gate.unlock();
}

}  // namespace fkv::ofi
