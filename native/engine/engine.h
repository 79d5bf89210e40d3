// All device groups of one process: regions, peers, transfers, counters.
//
// Owns:     the groups with their NICs and threads. Regions keep their registrations until close().
// Threads:  every call from any thread.
// Blocking: close(), for its drain time and its groups' end_ns at most; events().take() and fence() for their timeouts.
// Failure:  calls throw Error before anything is posted; submit() throws kWouldBlock when the group is full; whatever
//           was accepted ends in exactly one event, unless a provider never returns from a call (close() says so).
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <vector>

#include "engine/group.h"

namespace fkv {

// A peer's address in parts; Python gives it its bytes.
struct EngineAddress {
    Epoch epoch{};
    std::vector<std::vector<std::vector<std::byte>>> groups;  // [group][rail]
    std::optional<ProcessId> process;                         // where the system tells
};

// What is known of a peer that was fenced.
struct Fence {
    // Nothing that it has posted can land any more: by `kRegistrations` in the memory that it was given by
    // share_region(), by `kExit` in any.
    bool proven;
    enum Means : std::uint8_t { kNone, kRegistrations, kExit } means;  // what was looked at
    std::string why;
};

class Engine {
  public:
    static constexpr std::size_t kMaxPeerRegistrations = 4096;

    // One list of NICs per group; the groups' options pair up with them.
    Engine(std::vector<std::vector<std::unique_ptr<Nic>>> nics, const std::vector<GroupOptions>& options,
           std::size_t max_peer_registrations = kMaxPeerRegistrations);
    ~Engine();

    // In a forked child the engine is closed and must not be destroyed: its threads and NICs are the parent's.
    bool in_child() const { return fork_.in_child(); }

    const EngineAddress& address() const { return address_; }
    std::size_t num_groups() const { return groups_.size(); }
    Group& group(std::uint32_t index);
    EventQueue& events() { return *events_; }
    // Posts an event for each thread that a NIC has held for longer than its group's stall_ns. To be called now and
    // then, by a thread that is none of the engine's own: they cannot tell.
    void check_stuck();

    // A range that a NIC finds too large is registered in several parts. Throws Error(kRegistration) when a NIC refuses
    // it in any size; nothing is left behind then.
    std::shared_ptr<Region> register_region(void* base, std::uint64_t nbytes, std::uint32_t group);
    // The same for a CUDA device's memory; its parts follow each other in the address space.
    std::shared_ptr<Region> register_device(const std::vector<DeviceMemory>& parts, std::uint32_t group);
    // Another region over the registrations of `region`: they are closed when both are deregistered. The caller says by
    // this that the memory is still the same. Throws Error(kClosed) if `region` was deregistered.
    std::shared_ptr<Region> register_again(const std::shared_ptr<Region>& region);
    struct RegionFigures {
        std::size_t regions = 0, registrations = 0;  // that are open; a registration counts once on each NIC
        std::uint64_t bytes = 0;                     // that the first NIC has registered
    };
    RegionFigures region_figures(std::uint32_t group) const;
    // Drops the registrations. Throws Error(kConfig) while a transfer uses the region; twice is fine.
    void deregister(const std::shared_ptr<Region>& region);
    RemoteRegion describe_region(const Region& region) const;

    // The region's memory with keys for this peer alone: registered on every rail at the first call for the pair,
    // closed with the region, by fence(), or with the engine. Throws Error(kWouldBlock) beyond max_peer_registrations.
    // `parts`: of device memory, once more as register_device() got them, whose dma-bufs are closed by now; without
    // them it is registered by address. Throws Error(kConfig) where they are not the region's.
    RemoteRegion share_region(const std::shared_ptr<Region>& region, const std::shared_ptr<Peer>& peer,
                              const std::vector<DeviceMemory>& parts = {});
    std::size_t num_shares(std::uint32_t group) const { return share_counts_->by_group[group].load(); }

    // The same epoch gives the same peer. Throws Error(kUnreachable) for an address without groups or rails.
    std::shared_ptr<Peer> add_peer(const EngineAddress& address, bool monitor);
    void remove_peer(const std::shared_ptr<Peer>& peer);
    // Removes a peer and closes its registrations, then looks for proof that nothing it has posted can land any more,
    // for at most `timeout_ns`. Again is fine: what could not be proven may be provable later.
    Fence fence(const std::shared_ptr<Peer>& peer, std::int64_t timeout_ns);
    // What fence() looks at with these NICs.
    Fence::Means fence_means() const;

    struct Submission {
        std::shared_ptr<Peer> peer;
        std::vector<PagePiece> pieces;
        CounterToken token;
        // Pieces with a layer wait for it; they must come in the order of their layers. Null: nothing waits.
        std::shared_ptr<const Watch> watch = nullptr;
        std::uint64_t step = 0;
    };
    // A submission that is made once and posted many times, each time with new page lists: pieces name a pair of them.
    struct Prepared {
        std::shared_ptr<Peer> peer;
        std::vector<PagePiece> pieces;     // without pages
        std::vector<std::uint32_t> lists;  // [piece]: which pair of page lists it uses
    };
    using PageLists = std::vector<std::pair<Pages, Pages>>;  // source, destination
    static Submission with_pages(Prepared prepared, const PageLists& lists);

    // Checks everything, then hands the transfers to the group of their source regions: all or none. Each one's id is
    // in the event that ends it. `deadline_ns` is on now_ns()'s clock; 0: none.
    // kRead goes the other way: from the remote regions into the pieces' src.
    std::vector<std::shared_ptr<Transfer>> submit_pages(Transfer::Kind kind, std::vector<Submission> submissions,
                                                        std::int64_t deadline_ns);
    std::shared_ptr<Transfer> submit_message(const std::shared_ptr<Peer>& peer, std::span<const std::byte> payload);
    // Immediates without data: `units` for a counter, or, with no token, the bits of a user event. `dst` is any region
    // of the peer; nothing is written into it.
    struct Signal {
        std::shared_ptr<Peer> peer;
        std::shared_ptr<const RemoteRegion> dst;
        CounterToken token;
        std::uint64_t units;
        std::uint32_t user_value;
    };
    std::vector<std::shared_ptr<Transfer>> submit_signals(std::vector<Signal> signals, std::uint32_t group);
    // kFlush: ends when every write of our `group` to the peer's group of `dst` that had ended before is in the
    // target's memory; fails on a rail that does not keep writes in order. kConnect: ends when every rail has reached
    // its peer.
    std::shared_ptr<Transfer> submit_on_all_rails(Transfer::Kind kind, const std::shared_ptr<Peer>& peer,
                                                  std::shared_ptr<const RemoteRegion> dst, std::uint32_t group);
    void cancel(Transfer& transfer);
    // Sets the word and wakes whoever waits for it. (A GPU only writes the word: it is looked at every 50 us, or all
    // the time where the engine spins.)
    void set_watch(Watch& watch, std::uint64_t step, std::uint64_t layers);

    CounterToken allocate_counter(std::uint32_t group, std::uint64_t unit_bytes);
    void arm_counter(std::uint32_t group, const CounterToken& token, std::uint64_t expected_units);

    // Every caller returns only once no NIC touches caller memory any more. Throws Error(kStuck) where that cannot be
    // had, since a NIC has not returned from a call: then memory of that group's regions must stay what it is. Every
    // later call looks again.
    void close(std::int64_t drain_ns);

  private:
    void check_open() const;
    std::shared_ptr<Region> new_region(void* base, std::uint64_t nbytes, std::uint32_t group) const;
    void register_parts(Region& region);
    void enter(const std::shared_ptr<Region>& region);
    Registrations register_on_rails(const Region& region, const std::vector<DeviceMemory>& parts);
    std::shared_ptr<PeerKeys> keys_of(const Epoch& peer);
    void close_shares(const std::shared_ptr<Peer>& peer);
    // False at the deadline. Throws Error(kClosed) when the engine closes.
    bool wait_until(std::int64_t deadline_ns, const std::function<bool()>& done);
    bool drain_queues(std::int64_t deadline_ns);
    Fence fence_by_registrations(const Peer& peer, std::int64_t deadline_ns);
    Fence fence_by_exit(Peer& peer, std::int64_t deadline_ns);
    void submit_to(Group& group, const std::vector<std::shared_ptr<Transfer>>& transfers);
    std::shared_ptr<Transfer> new_transfer(Transfer::Kind kind, const std::shared_ptr<Peer>& peer);
    void check_remote(const Peer& peer, const RemoteRegion& region) const;
    void check_piece(const Peer& peer, const PagePiece& piece, std::uint32_t group, const CounterToken& token);

    EngineAddress address_;
    const std::shared_ptr<EventQueue> events_ = std::make_shared<EventQueue>();
    const std::shared_ptr<Peers> peers_ = std::make_shared<Peers>();
    std::vector<std::unique_ptr<Group>> groups_;
    std::atomic<std::uint64_t> next_id_{1};

    const std::size_t max_peer_registrations_;
    const std::shared_ptr<ShareCounts> share_counts_;
    std::shared_timed_mutex registering_;  // shared while a registration is made, so that close() can wait for it
    mutable std::mutex mutex_;
    std::vector<std::weak_ptr<Region>> regions_;     // guarded by mutex_
    std::size_t tidy_at_ = 64;                       // how many regions_ there may be until the dead ones are dropped
    std::map<Epoch, std::weak_ptr<PeerKeys>> keys_;  // of peers, removed ones too; guarded by mutex_
    std::atomic<bool> closed_{false};
    ForkGuard fork_;
};

}  // namespace fkv
