// shm endpoints within one process. They share each other's queues by pointer, and libfabric 1.17 unmaps the queue of
// an endpoint that closes under the others: whoever posts to it, or is just answering it, crashes. So no endpoint
// closes while another one is at work, and nothing is posted to a closed one.
//
// Threads: any.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>

namespace fkv::ofi {

class Neighbour {
  public:
    using Closed = std::shared_ptr<const std::atomic<bool>>;

    // Makes an open endpoint known by its name.
    explicit Neighbour(std::string name);
    ~Neighbour();
    Neighbour(const Neighbour&) = delete;
    Neighbour& operator=(const Neighbour&) = delete;

    // Becomes true when this process closes the endpoint of that name; null if it is another process's.
    static Closed find(const std::string& name);

    // Held around every call that may touch another endpoint's queue. Free while there is no other one.
    std::shared_lock<std::shared_timed_mutex> at_work() const;
    // Runs `close` while nobody is at work. False if somebody does not stop working, which is to say that a call of the
    // provider does not return: then it has not run, and the others have gone on meanwhile.
    template <typename Close>
    bool leave(Close&& close) {
        const Departure departure(street_);
        if (!departure.granted) return false;
        closed_->store(true);
        close();
        return true;
    }

  private:
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

    const std::string name_;
    Street& street_;
    const std::shared_ptr<std::atomic<bool>> closed_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace fkv::ofi
