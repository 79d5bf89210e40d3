// Engines over one fake fabric, and everything that each of them reported.
//
//     Cluster cluster(seed);
//     auto& a = cluster.add({}); auto& b = cluster.add({.rails = {2}});
//     const auto id = a.write(b, 0, 0, 4096, b.counter(0, 64));
//     ASSERT_TRUE(cluster.wait([&] { return a.ended(id); })) << cluster.where();
//
// With FABRIC_KV_NIC_THREADS in the environment every NIC is polled by a thread of its own; ctest runs both.
// Whatever ends twice, and every misuse that the fabric has noticed, fails the test.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <set>

#include "engine/engine.h"
#include "fake/fake_fabric.h"

namespace fkv::test {

constexpr std::byte kCanary{0xc5};

// Whether two ranges are equal, one of which a NIC may be writing: not a race for whoever waits for data this way.
__attribute__((no_sanitize("thread"))) inline bool equal_now(const std::byte* a, const std::byte* b, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i)
        if (a[i] != b[i]) return false;
    return true;
}

bool nic_threads();  // whether FABRIC_KV_NIC_THREADS is set

struct NodeShape {
    std::vector<std::size_t> rails{1};  // NICs of each group
    fake::FakeProfile profile = fake::FakeProfile::strict();
    GroupOptions options{};
    std::size_t max_peer_registrations = Engine::kMaxPeerRegistrations;
    std::size_t memory_bytes = 1 << 16;     // registered once in each group
    std::vector<std::uint64_t> link_bps{};  // [rail] of every group; empty: the profile's
};

// One engine with its memory, all of it canaries at first.
class Node {
  public:
    Node(fake::FakeFabric& fabric, std::uint32_t process, const NodeShape& shape);
    ~Node();
    Node(const Node&) = delete;
    Node& operator=(const Node&) = delete;

    std::shared_ptr<Peer> peer(Node& other) { return engine->add_peer(other.engine->address(), false); }
    CounterToken counter(std::uint64_t unit_bytes, std::optional<std::uint64_t> expected = {}, std::uint32_t group = 0);
    // One write of `nbytes`, as one page. Returns its id.
    std::uint64_t write(Node& to, std::uint64_t src_offset, std::uint64_t dst_offset, std::uint64_t nbytes,
                        const CounterToken& token = {}, std::int64_t deadline_ns = 0);
    // `count` pages of `nbytes` from `src_offset` on, to every second place from `dst_offset` on: none can be merged.
    std::shared_ptr<Transfer> write_pages(Node& to, std::uint64_t src_offset, std::uint64_t dst_offset,
                                          std::uint64_t count, std::uint64_t nbytes, const CounterToken& token = {},
                                          std::int64_t deadline_ns = 0);
    std::uint64_t read(Node& from, std::uint64_t dst_offset, std::uint64_t src_offset, std::uint64_t nbytes);
    PagePiece piece(Node& to, std::uint64_t src_offset, std::uint64_t dst_offset, std::uint64_t nbytes);
    std::uint64_t send(Node& to, std::size_t nbytes);  // bytes that its length tells

    void take();  // the events that wait
    const Event* ended(std::uint64_t id) const;
    Outcome outcome(std::uint64_t id) const { return transfers.at(id).outcome; }
    const CounterVerdict* fired(const CounterToken& token, std::uint32_t group = 0) const;
    std::size_t num_received(const Node& from) const;  // whole messages
    Rail& rail(std::size_t index, std::uint32_t group = 0) { return *engine->group(group).rails()[index]; }

    std::vector<std::byte> memory;
    std::vector<std::shared_ptr<Region>> regions;              // [group]
    std::vector<std::shared_ptr<const RemoteRegion>> remotes;  // [group]
    std::vector<std::vector<fake::NicId>> nics;                // [group][rail]
    std::unique_ptr<Engine> engine;
    std::map<std::uint64_t, Event> transfers;      // by id
    std::map<std::uint64_t, std::uint64_t> order;  // id -> how many transfers had ended before
    std::vector<Event> users, lost, faults, stalls, held_up;
    std::function<void(const Event&)> on_counter, on_transfer;  // called while the event is taken

  private:
    struct Message {
        std::uint64_t arrived = 0;
        std::set<std::uint32_t> offsets;
        bool whole = false;
    };
    void take_frame(const Event& event);

    std::map<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>, CounterVerdict> counters_;
    std::map<std::pair<Epoch, std::uint64_t>, Message> messages_;
};

class Cluster {
  public:
    explicit Cluster(std::uint64_t seed) : fabric(seed) {}
    ~Cluster() { check(); }
    Cluster(const Cluster&) = delete;
    Cluster& operator=(const Cluster&) = delete;

    Node& add(const NodeShape& shape);
    // Takes events until `done`; false when `bound` passed first.
    bool wait(const std::function<bool()>& done, std::chrono::milliseconds bound = std::chrono::seconds(30));
    // Takes events while the fabric makes `count` steps: for what must not happen.
    void steps(std::uint64_t count);
    void check() const;  // that no NIC was misused
    std::string where() const { return fabric.describe(); }

    fake::FakeFabric fabric;
    std::deque<Node> nodes;
};

}  // namespace fkv::test
