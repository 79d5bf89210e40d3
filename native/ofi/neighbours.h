// shm endpoints within one process. They share each other's queues by pointer, and libfabric 1.17 unmaps the queue of
// an endpoint that closes under the others. What it has posted, and what it has answered, lies in their queues still,
// and whoever takes that out looks at the queue of the sender and crashes: at once, or much later, where it stands
// behind what somebody else has not answered. No look at a queue tells when the last is out. So an endpoint that leaves
// stays as it is, but for that nobody polls it, until all that it has met have left, too.
//
// Threads: any; posts of one endpoint from one at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <set>
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

    // To be called before this endpoint learns that name. Becomes true when the endpoint of that name, of this process,
    // is about to close; null if it is another process's.
    Closed meet(const std::string& name);

    // Runs `post`, a post to a neighbour, unless that is about to close: then returns `refused`.
    template <typename Post, typename Result>
    Result post_to(const std::atomic<bool>& closed, Post&& post, Result refused) {
        const Posting posting(member_->posts);
        return closed.load() ? refused : post();
    }
    // From here on nobody posts to this one. Waits for those who are at it: whoever does not return harms only itself.
    // False if it has no neighbours.
    bool retire();
    // Its neighbours, if there are any, keep what is left of it until they leave, too. Lets go of what it has kept.
    bool leave(const std::shared_ptr<void>& remains);

  private:
    // Counts up at both ends of a post: odd in between.
    class Posting {
      public:
        explicit Posting(std::atomic<std::uint64_t>& posts) : posts_(posts) { posts_.fetch_add(1); }
        ~Posting() { posts_.fetch_add(1); }
        Posting(const Posting&) = delete;
        Posting& operator=(const Posting&) = delete;

      private:
        std::atomic<std::uint64_t>& posts_;
    };
    struct Member {
        alignas(64) std::atomic<bool> closed{false};      // read by all in every post to it
        alignas(64) std::atomic<std::uint64_t> posts{0};  // written by its owner in every post to a neighbour
        std::set<std::shared_ptr<Member>> met;            // open ones; guarded by the street's mutex, as is the next
        std::vector<std::shared_ptr<void>> kept;
    };
    struct Street;
    static Street& street();

    const std::string name_;
    Street& street_;
    const std::shared_ptr<Member> member_ = std::make_shared<Member>();
};

}  // namespace fkv::ofi
