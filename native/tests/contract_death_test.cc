// What the engine relies on when an endpoint is closed, or a peer is removed, stopped or killed.
//
// libfabric's providers have a process for each end here, neither of them this one: some crash, and that is a result.
#include "contract.h"

namespace fkv::test {
namespace {

class Deaths : public Contract {
  protected:
    Habits habits() const { return habits_of(GetParam(), info_); }

    bool page_is(const End& end, std::size_t page, std::byte value) const {
        return all_equal(end.memory.subspan(page * large(), large()), value);
    }
    // Every immediate stands for a whole page of 0xff.
    bool immediates_are_true(const End& end) const {
        return std::all_of(end.imms.begin(), end.imms.end(),
                           [&](auto imm) { return page_is(end, imm, std::byte{0xff}); });
    }
    static constexpr std::size_t kWrites = 8;

    std::string what_happened_to(const End& end) const {
        return !alive(end) ? "crashes" : end.stray_errors.empty() ? "quiet" : ends_of({}, end);
    }

    // A payload that a socket cannot hold, so that the target can be caught in the middle of it.
    std::size_t middle() const { return std::min<std::uint64_t>(info_.max_msg_bytes, 16 << 20); }
    std::vector<Posted*> start_one_large(NicPair& pair, End& from, End& to, std::optional<RemoteMemory> where = {}) {
        auto* op = pair.write(from, to, 0, middle(), 0, 1u, where);
        pair.drive([&] { return to.memory[middle() / 4] != std::byte{0} || to.memory[middle() - 1] != std::byte{0}; },
                   patience(2000));
        return op ? std::vector{op} : std::vector<Posted*>{};
    }
};
INSTANTIATE_TEST_SUITE_P(Fabrics, Deaths, ::testing::ValuesIn(subjects_in_two_processes()), subject_name);

// close_endpoint() is the last resort: when it returns, nothing lands in its memory any more. The last round catches it
// in the middle of a large payload.
TEST_P(Deaths, closed_endpoint_is_not_written_to) {
    bool survived = true;
    for (const std::size_t seen : {0, 99}) {
        auto pair = make_pair(std::max(kWrites * large(), middle()));
        auto &a = *pair->a, &b = *pair->b;
        b.keep_receives(16, 0);
        a.fill(std::byte{0xff});
        auto ops = seen == 99 ? start_one_large(*pair, a, b) : start_writes(*pair, a, b, kWrites, seen);
        b.nic->close_endpoint();
        survived &= alive(b);
        const auto snapshot = b.snapshot();
        pair->drive([&] { return all_ended(ops); }, patience(250));
        for (std::uint32_t i = 0; i < 4; ++i)
            if (auto* op = a.try_write(0, 4096, b.remote().base, b.remote().rkey, i)) ops.push_back(op);
        settle(*pair);
        EXPECT_EQ(snapshot, b.snapshot()) << "after " << seen << " immediates";
        EXPECT_TRUE(seen == 99 || immediates_are_true(b));
        record("writers_to_closed_endpoint", ends_of(ops, a));
    }
    record("close_with_inbound_writes", survived ? "ok" : "crashes");
    EXPECT_TRUE(survived || !habits().survives_close);
}

// After close_endpoint() the source belongs to the caller again: no later value of it may arrive.
TEST_P(Deaths, closed_endpoint_is_not_read_from) {
    auto pair = make_pair(kWrites * large());
    auto &a = *pair->a, &b = *pair->b;
    b.keep_receives(16, 0);
    a.fill(std::byte{0xff});
    start_writes(*pair, a, b, kWrites, 0);
    a.nic->close_endpoint();
    a.fill(std::byte{0x11});
    pair->drive([&] { return b.imms.size() == kWrites; }, patience(250));
    const bool stops = std::count(b.memory.begin(), b.memory.end(), std::byte{0x11}) == 0 && immediates_are_true(b);
    record("close_stops_reads_of_source", stops ? "yes" : "no");
    EXPECT_EQ(stops, habits().close_stops_reads);
    record("sender_leaves", what_happened_to(b));
    EXPECT_TRUE(alive(b) || !habits().survives_departure);
}

// Both ways of removing: the peer that we write to, and the peer that writes to us.
TEST_P(Deaths, peer_is_removed_with_writes_under_way) {
    bool all_survived = true;
    for (const bool outbound : {true, false}) {
        auto pair = make_pair(kWrites * large());
        auto &a = *pair->a, &b = *pair->b;
        auto& from = outbound ? b : a;
        auto& to = outbound ? a : b;
        to.keep_receives(16, 0);
        from.fill(std::byte{0xff});
        const auto ops = start_writes(*pair, from, to, kWrites, 0);
        b.nic->remove_peer(b.peer);
        pair->drive([&] { return (all_ended(ops) && to.imms.size() == kWrites) || !alive(b); }, patience(500));
        const bool survived = alive(b);
        all_survived &= survived;
        record(outbound ? "removing_a_target" : "removing_a_sender",
               survived ? "harmless:" + ends_of(ops, from) : "crashes");
        EXPECT_TRUE(immediates_are_true(to));
        for (const auto* op : ops) EXPECT_LE(op->num_ends, 1);
    }
    EXPECT_EQ(all_survived, habits().survives_removal);
}

TEST_P(Deaths, target_is_killed) {
    auto pair = make_pair(kWrites * large());
    auto &a = *pair->a, &b = *pair->b;
    b.keep_receives(16, 0);
    a.fill(std::byte{0xff});
    auto ops = start_writes(*pair, a, b, kWrites, 1);
    kill(b);
    pair->drive([&] { return all_ended(ops); }, patience(500));
    record("writers_to_killed_peer", ends_of(ops, a));
    // What is posted from now on; the first may still find a connection.
    std::vector<Posted*> later;
    bool again = false;
    for (int i = 0; i < 5; ++i) {
        if (auto* op = a.try_write(0, 4096, b.remote().base, b.remote().rkey, 1u))
            later.push_back(op);
        else
            again |= a.last_result == PostResult::kAgain;
        pair->drive_for(patience(20));
    }
    pair->drive([&] { return all_ended(later); }, patience(300));
    record("later_writes_to_killed_peer",
           later.empty() ? (again ? "again" : "refused") : ends_of(later, a) + (again ? "+again" : ""));
    for (const auto& op : a.posted) EXPECT_LE(op.num_ends, 1);
    EXPECT_EQ(a.num_unknown, 0u);
}

// No immediate may tell of a payload whose sender died, and this side lives on.
TEST_P(Deaths, sender_is_killed) {
    auto pair = make_pair(middle());
    auto &a = *pair->a, &b = *pair->b;
    a.keep_receives(16, 0);
    b.fill(std::byte{0xff});
    start_one_large(*pair, b, a);
    kill(b);
    settle(*pair);
    settle(*pair);
    const auto snapshot = a.snapshot();
    EXPECT_TRUE(a.imms.empty() || all_equal(a.memory, std::byte{0xff}));
    settle(*pair);
    record("late_bytes_of_killed_sender", snapshot == a.snapshot() ? "none_after_settling" : "some");
    record("target_of_killed_sender", what_happened_to(a));
    EXPECT_TRUE(alive(a) || !habits().survives_departure);
    EXPECT_EQ(a.num_unknown + a.num_failed, 0u);
}

// A stopped sender goes on after the target has closed the registration, and perhaps removed the sender too: whether
// that was a fence.
TEST_P(Deaths, registration_is_closed_in_the_middle_of_a_payload) {
    for (const bool remove : {false, true}) {
        if (remove && !habits().survives_removal) continue;
        auto pair = make_pair(middle());
        auto &a = *pair->a, &b = *pair->b;
        a.keep_receives(16, 0);
        b.fill(std::byte{0xff});
        auto mr = a.nic->register_memory(a.memory.data(), middle());
        start_one_large(*pair, b, a, RemoteMemory{mr->remote_base(), mr->rkey()});
        stop(b);
        auto count = [&] {
            return static_cast<std::size_t>(std::count(a.memory.begin(), a.memory.end(), std::byte{0xff}));
        };
        const auto before = count();
        mr.reset();
        if (remove) a.nic->remove_peer(a.peer);
        const auto flushed = count();  // what the close itself has let in
        go_on(b);
        pair->drive([&] { return !a.imms.empty(); }, patience(300));
        EXPECT_TRUE(a.imms.empty() || count() == middle());
        std::string what = before == 0 || before == middle() ? "never_caught_in_the_middle"
                           : count() > flushed               ? "rest_lands"
                                                             : "stops";
        if (!a.imms.empty()) what += "+immediate";
        record(remove ? "mr_closed_and_sender_removed_in_mid_payload" : "mr_closed_in_mid_payload", what);
    }
}

// A stopped peer costs nothing but its own operations.
TEST_P(Deaths, target_is_stopped_and_goes_on) {
    auto pair = make_pair(kWrites * large());
    auto &a = *pair->a, &b = *pair->b;
    b.keep_receives(16, 0);
    a.fill(std::byte{0xff});
    const auto ops = start_writes(*pair, a, b, kWrites, 1);
    stop(b);
    settle(*pair);
    record("writers_to_stopped_peer", ends_of(ops, a));
    go_on(b);
    EXPECT_TRUE(pair->drive([&] { return all_ended(ops) && b.imms.size() == kWrites; }, patience(5000)));
    EXPECT_TRUE(immediates_are_true(b));
    EXPECT_EQ(a.num_failed + a.stray_errors.size() + b.stray_errors.size(), 0u);
}

// A new process takes the place of a killed one, and the same sender reaches it.
TEST_P(Deaths, successor_of_a_killed_peer_is_reached) {
    auto pair = make_pair();
    auto& a = *pair->a;
    for (std::uint32_t life = 0; life < 2; ++life) {
        auto& b = *pair->b;
        b.keep_receives(8, 0);
        auto* op = pair->write(a, b, 0, 4096, 0, life);
        ASSERT_TRUE(op) << a.nic->last_post_error().text;
        ASSERT_TRUE(pair->drive([&] { return b.imms.size() == 1 && op->num_ends == 1; })) << "life " << life;
        ASSERT_FALSE(op->error);
        kill(b);
        pair->b = make_end(1, a.memory.size());
        a.peer = a.nic->insert_peer(pair->b->nic->address());
    }
}

}  // namespace
}  // namespace fkv::test

int main(int argc, char** argv) { return fkv::test::contract_main(argc, argv); }
