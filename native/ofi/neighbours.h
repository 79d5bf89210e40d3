// shm endpoints within one process. They share each other's queues by pointer, and libfabric 1.17 unmaps the queue of
// an endpoint that closes under the others: whoever posts to it, or is just answering it, crashes. So no endpoint
// closes while another one is at work, and nothing is posted to one that is about to. What it has posted or answered
// lies in the queues of its neighbours, too, and whoever takes that out looks at the queue of the sender: before it
// closes all must have polled once more, and found nothing left, which helps, and proves nothing: docs/providers.md.
//
// Threads: any.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

namespace fkv::ofi {

class Neighbour {
  public:
    using Closed = std::shared_ptr<const std::atomic<bool>>;

    // Makes an open endpoint known by its name.
    explicit Neighbour(std::string name);
    ~Neighbour();
    Neighbour(const Neighbour&) = delete;
    Neighbour& operator=(const Neighbour&) = delete;

    // Becomes true when this process is about to close the endpoint of that name; null if it is another process's.
    static Closed find(const std::string& name);

    // The time of this process's endpoints, to be read before a poll. It moves on when one of them is about to close.
    std::uint64_t time() const;
    // A poll that began at that time is over. Where it brought nothing it has taken out all there was, as far as a poll
    // can tell.
    void polled(std::uint64_t time, bool nothing) {
        member_->poller.store(&kThisThread, std::memory_order_relaxed);
        member_->polled_at.store(time, std::memory_order_relaxed);
        if (nothing) member_->idle_at.store(time, std::memory_order_release);
    }
    // Begins a new time.
    std::uint64_t move_on();
    // The others that have not yet found nothing in a poll that began at this time, by name; or of these only those
    // that somebody has polled since. Without those that the calling thread polls: it does not meanwhile.
    std::vector<std::string> busy_before(std::uint64_t time, bool if_polled = false) const;

    // Held around every call that may touch another endpoint's queue. Free while there is no other one.
    std::shared_lock<std::shared_timed_mutex> at_work() const;
    // From here on nobody posts to this one. False as leave().
    bool retire() {
        return while_nobody_works([this] { member_->closed.store(true); });
    }
    // Runs `close` while nobody is at work. False if somebody does not stop working, which is to say that a call of the
    // provider does not return: then it has not run, and the others have gone on meanwhile.
    template <typename Close>
    bool leave(Close&& close) {
        return while_nobody_works([&] {
            close();
            member_->gone.store(true);
        });
    }

  private:
    inline static thread_local const char kThisThread = 0;  // whose address names it
    struct Member {
        alignas(64) std::atomic<bool> closed{false}, gone{false};         // read by all in every post
        alignas(64) std::atomic<std::uint64_t> polled_at{0}, idle_at{0};  // written by its owner in every poll
        std::atomic<const char*> poller{nullptr};
    };
    struct Street;
    static Street& street();
    class Departure {
      public:
        explicit Departure(Street& street);
        ~Departure();
        Departure(const Departure&) = delete;
        Departure& operator=(const Departure&) = delete;

        bool granted = false;

      private:
        Street& street_;
    };

    template <typename Run>
    bool while_nobody_works(Run&& run) {
        const Departure departure(street_);
        if (departure.granted)
            run();
        else
            member_->gone.store(true);  // it stays open for ever, and nobody is to wait for it
        return departure.granted;
    }

    const std::string name_;
    Street& street_;
    const std::shared_ptr<Member> member_ = std::make_shared<Member>();
};

}  // namespace fkv::ofi
