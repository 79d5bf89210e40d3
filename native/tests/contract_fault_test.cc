// What the engine relies on when an operation fails: keys, fail-stop, closed registrations, messages too long.
//
// Every test opens its own pair: on several providers a failure takes the connection down.
#include <algorithm>

#include "contract.h"

namespace fkv::test {
namespace {

class Faults : public Contract {
  protected:
    Habits habits() const { return habits_of(GetParam(), info_); }
};
INSTANTIATE_TEST_SUITE_P(Fabrics, Faults, ::testing::ValuesIn(subjects()), subject_name);

// kBurst: all writes at once. kPause: after the bad one the sender polls for a while, so that it can learn of its fate.
// kBatch: like kBurst, and the last write alone carries an immediate.
enum class Style { kBurst, kPause, kBatch };

// The test that decides whether one immediate may stand for several writes: see "fail-stop" in docs/providers.md. For
// those that a burst posts, it may where NicInfo::fail_stop says so.
TEST_P(Faults, later_immediates_after_a_bad_key) {
    constexpr std::size_t kPage = 4096, kWrites = 12;
    std::size_t later = 0;
    for (const auto style : {Style::kBurst, Style::kPause, Style::kBatch})
        for (const std::size_t bad : {std::size_t{1}, kWrites - 2}) {
            auto pair = make_pair(kPage * kWrites);
            auto &a = *pair->a, &b = *pair->b;
            b.keep_receives(16, 0);
            for (std::size_t i = 0; i < kWrites; ++i) write_stamp(std::span(a.memory).subspan(i * kPage, kPage), i);
            auto arrived_with_data = [&](std::size_t i) {
                return has_stamp(std::span(b.memory).subspan(i * kPage, kPage), i);
            };
            bool data_in_place = true;
            b.on_imm = [&](std::uint32_t i) { data_in_place &= i < kWrites && arrived_with_data(i); };
            std::vector<Posted*> ops;
            for (std::size_t i = 0; i < kWrites; ++i) {
                auto where = b.remote();
                if (i == bad) where.rkey ^= 0x5a5a5a;
                const bool with_imm = style != Style::kBatch || i == kWrites - 1;
                auto* op = pair->write(a, b, i * kPage, kPage, i * kPage,
                                       with_imm ? std::optional(static_cast<std::uint32_t>(i)) : std::nullopt, where);
                if (op) ops.push_back(op);
                if (i == bad && op) record("bad_key_post", "taken");
                if (style == Style::kPause && i == bad) settle(*pair);
            }
            pair->drive([&] { return all_ended(ops); }, patience(250));
            settle(*pair);
            for (const auto* op : ops) EXPECT_LE(op->num_ends, 1);
            EXPECT_EQ(a.num_unknown + b.num_unknown, 0u);
            EXPECT_TRUE(data_in_place) << "an immediate without its data; bad key at " << bad;
            EXPECT_EQ(arrived_with_data(bad), !habits().checks(kPage, style != Style::kBatch));
            const auto came = std::count_if(b.imms.begin(), b.imms.end(), [&](std::uint32_t imm) { return imm > bad; });
            const char* names[] = {"in_a_burst", "after_a_pause", "in_a_batch"};
            record(std::string("later_immediates_") + names[static_cast<int>(style)], came ? "arrive" : "none");
            later += static_cast<std::size_t>(came);
            if (ops.size() > bad) record("bad_key_write", ends_of({ops[bad]}, a));
            if (info_.fail_stop && style != Style::kPause) {
                EXPECT_EQ(came, 0) << "behind a bad key at " << bad;
                EXPECT_TRUE(ops.size() <= bad || ops[bad]->num_ends == 0 || ops[bad]->error) << "reported as done";
            }
            if (ops.size() > bad + 1)
                record("writes_after_it", ends_of({ops.begin() + static_cast<std::ptrdiff_t>(bad) + 1, ops.end()}, a));
            record("target_of_bad_key", b.stray_errors.empty() ? "quiet" : "errors");
        }
    record_if("fail_stop_in_a_burst", info_.fail_stop);
    record_if("fail_stop", later == 0);
    EXPECT_EQ(later == 0, habits().fail_stop) << later << " immediates of writes after the bad one arrived";
}

// What brings a pair back after a write was refused: nothing but patience, a new entry in the address table, or
// nothing.
TEST_P(Faults, pair_recovers_after_a_refused_write) {
    auto pair = make_pair();
    auto &a = *pair->a, &b = *pair->b;
    b.keep_receives(16, 0);
    auto bad = b.remote();
    bad.rkey ^= 0x5a5a5a;
    ASSERT_TRUE(pair->write(a, b, 0, 4096, 0, 1u, bad));
    settle(*pair);
    auto works = [&] {
        for (int attempt = 0; attempt < 3 && b.imms.empty(); ++attempt) {
            a.try_write(0, 4096, b.remote().base, b.remote().rkey, 2u);
            settle(*pair);
        }
        return !b.imms.empty();
    };
    std::string how = "by_itself";
    if (!works()) {
        a.nic->remove_peer(a.peer);
        a.peer = a.nic->insert_peer(b.nic->address());
        how = works() ? "by_reinsertion" : "not";
    }
    record("recovers_from_a_refused_write", how);
    EXPECT_EQ(how != "not", habits().recovers);
}

TEST_P(Faults, wrong_keys_and_ranges_are_refused) {
    constexpr std::uint64_t kBytes = 64 << 10, kRange = 16 << 10;
    struct Case {
        const char* name;
        std::uint64_t offset, nbytes;  // within the registered range at kRange
        std::uint64_t key_change;
    };
    for (const Case& attempt : {Case{"wrong_key", 0, 4096, 0x40}, Case{"one_byte_beyond", kRange - 4095, 4096, 0},
                                Case{"far_beyond", 2 * kRange, 4096, 0}, Case{"before", ~std::uint64_t{0}, 4096, 0},
                                Case{"longer_than_the_range", 0, kRange + 1, 0}})
        for (const bool with_imm : {true, false}) {
            if (attempt.nbytes > info_.max_msg_bytes) continue;
            auto pair = make_pair(kBytes);
            auto &a = *pair->a, &b = *pair->b;
            b.keep_receives(8, 0);
            a.fill(std::byte{0xff});
            auto range = b.nic->register_memory(b.memory.data() + kRange, kRange);
            const RemoteMemory where{range->remote_base(), range->rkey() ^ attempt.key_change};
            auto* op = pair->write(a, b, 0, attempt.nbytes, attempt.offset, with_imm ? std::optional(7u) : std::nullopt,
                                   where);
            if (op) pair->drive([&] { return op->num_ends > 0; }, patience(200));
            settle(*pair);
            const bool refused = all_equal(b.memory, std::byte{0}) && b.imms.empty();
            const std::string name = std::string(attempt.name) + (with_imm ? "" : "_without_imm");
            record(name, std::string(refused ? "refused:" : "lands:") + (op ? ends_of({op}, a) : "by_post"));
            EXPECT_EQ(refused, habits().checks(attempt.nbytes, with_imm)) << name;
        }
}

// The sender of a delivered write that was refused is told, or hears nothing: never that it is done.
TEST_P(Faults, delivered_write_that_is_refused_does_not_succeed) {
    for (const bool with_imm : {true, false}) {
        if (!habits().checks(4096, with_imm)) continue;
        auto pair = make_pair();
        auto &a = *pair->a, &b = *pair->b;
        b.keep_receives(8, 0);
        a.fill(std::byte{0xff});
        // The first one makes the connection.
        ASSERT_TRUE(pair->write(a, b, 0, 64, 8192, 1u));
        ASSERT_TRUE(pair->drive([&] { return b.imms.size() == 1 && a.num_sent == 1; }));
        auto* op = a.try_write(0, 4096, b.remote().base, b.remote().rkey ^ 0x5a5a,
                               with_imm ? std::optional(2u) : std::nullopt, true);
        for (int tries = 0; !op && tries < 1000; ++tries) {
            pair->drive_for(milliseconds(1));
            op = a.try_write(0, 4096, b.remote().base, b.remote().rkey ^ 0x5a5a,
                             with_imm ? std::optional(2u) : std::nullopt, true);
        }
        ASSERT_TRUE(op);
        pair->drive([&] { return op->num_ends > 0; }, patience(500));
        record(with_imm ? "refused_delivered_write" : "refused_delivered_write_without_imm", ends_of({op}, a));
        EXPECT_EQ(op->num_ends == 0 || op->error.has_value(), habits().tells_of_refusal) << "with_imm " << with_imm;
        EXPECT_TRUE(all_equal(b.memory.first(4096), std::byte{0}));
    }
}

TEST_P(Faults, closed_registration_refuses_later_writes) {
    auto pair = make_pair();
    auto &a = *pair->a, &b = *pair->b;
    b.keep_receives(8, 0);
    a.fill(std::byte{0xff});
    auto other = b.nic->register_memory(b.memory.data(), 65536);
    const RemoteMemory where{other->remote_base(), other->rkey()};
    ASSERT_TRUE(pair->write(a, b, 0, 4096, 0, 1u, where));
    ASSERT_TRUE(pair->drive([&] { return b.imms.size() == 1 && a.num_sent == 1; }));
    other.reset();
    for (const bool with_imm : {false, true}) {
        b.fill(std::byte{0});
        auto* op = pair->write(a, b, 0, 4096, 0, with_imm ? std::optional(2u) : std::nullopt, where);
        if (op) pair->drive([&] { return op->num_ends > 0; }, patience(300));
        settle(*pair);
        const bool stopped = all_equal(b.memory, std::byte{0}) && b.imms.size() == 1;
        record(with_imm ? "closed_mr" : "closed_mr_without_imm", stopped ? "refuses" : "takes");
        EXPECT_EQ(stopped, habits().checks(4096, with_imm));
    }
}

// What is under way may or may not arrive; an immediate must not claim what did not. Whether the close is a fence is
// seen by registration_is_closed_in_the_middle_of_a_payload.
TEST_P(Faults, closed_registration_and_writes_under_way) {
    constexpr std::size_t kWrites = 8;
    for (const std::size_t seen : {0, 2}) {
        auto pair = make_pair(kWrites * large());
        auto &a = *pair->a, &b = *pair->b;
        b.keep_receives(16, 0);
        a.fill(std::byte{0xff});
        auto other = b.nic->register_memory(b.memory.data(), b.memory.size());
        const auto ops = start_writes(*pair, a, b, kWrites, seen, RemoteMemory{other->remote_base(), other->rkey()});
        other.reset();
        const auto imms = b.imms.size();
        pair->drive([&] { return all_ended(ops); }, patience(300));
        settle(*pair);
        for (const auto imm : b.imms)
            EXPECT_TRUE(all_equal(std::span(b.memory).subspan(imm * large(), large()), std::byte{0xff})) << imm;
        record("immediates_after_mr_close", b.imms.size() > imms ? "some" : "none");
        record("senders_after_mr_close", ends_of(ops, a));
    }
}

// A new endpoint takes the place of one that left, and the same sender reaches it.
TEST_P(Faults, a_successor_is_reached_after_its_predecessor_left) {
    auto pair = make_pair();
    auto& a = *pair->a;
    pair->b->keep_receives(8, 0);
    ASSERT_TRUE(pair->write(a, *pair->b, 0, 4096, 0, 1u));
    ASSERT_TRUE(pair->drive([&] { return pair->b->imms.size() == 1 && a.num_sent == 1; }));
    pair->b.reset();
    a.nic->remove_peer(a.peer);
    pair->b = make_end(1, a.memory.size());
    auto& b = *pair->b;
    b.keep_receives(8, 0);
    a.peer = a.nic->insert_peer(b.nic->address());
    auto* op = pair->write(a, b, 0, 4096, 0, 2u);
    ASSERT_TRUE(op) << a.nic->last_post_error().text;
    EXPECT_TRUE(pair->drive([&] { return b.imms.size() == 1 && op->num_ends == 1; }));
    EXPECT_FALSE(op->error);
}

TEST_P(Faults, message_longer_than_its_receive) {
    auto pair = make_pair();
    auto &a = *pair->a, &b = *pair->b;
    auto* receive = b.post_recv(1024);
    auto* beyond = b.post_recv(4096);
    ASSERT_TRUE(receive && beyond);
    a.fill(std::byte{0xff});
    auto* sent = pair->send(a, 0, 4096);
    ASSERT_TRUE(sent);
    pair->drive([&] { return receive->num_ends && sent->num_ends; }, patience(500));
    settle(*pair);
    record("too_long_message_receiver", ends_of({receive}, b));
    record("too_long_message_sender", ends_of({sent}, a));
    // Whatever is reported, the bytes stay within the receive's buffer.
    EXPECT_TRUE(all_equal(beyond->buffer, std::byte{0}));
    EXPECT_FALSE(receive->num_ends && !receive->error && receive->nbytes > 1024);
}

}  // namespace
}  // namespace fkv::test

int main(int argc, char** argv) { return fkv::test::contract_main(argc, argv); }
