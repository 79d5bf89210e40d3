// What the engine relies on while nothing fails: immediates, data in place, order.
#include "contract.h"

#include <algorithm>
#include <map>
#include <random>

namespace fkv::test {
namespace {

class Traffic : public Contract {};
INSTANTIATE_TEST_SUITE_P(Fabrics, Traffic, ::testing::ValuesIn(subjects()), subject_name);

TEST_P(Traffic, immediates_arrive_intact) {
    auto pair = make_pair();
    auto &a = *pair->a, &b = *pair->b;
    b.keep_receives(8, 0);
    const std::vector<std::uint32_t> values = {0, 1, 0x7fffffff, 0x80000000, 0xffffffff};
    for (const auto imm : values) ASSERT_TRUE(pair->write(a, b, 0, 64, 0, imm)) << a.nic->last_post_error().text;
    ASSERT_TRUE(pair->drive([&] { return b.imms.size() == values.size() && a.num_sent == values.size(); }));
    settle(*pair);
    auto seen = b.imms;
    std::sort(seen.begin(), seen.end());
    EXPECT_EQ(seen, values);
    EXPECT_EQ(a.num_unknown + b.num_unknown, 0u);
    record("cq_data_bytes", std::to_string(info_.cq_data_bytes));
}

// The heart of counting: at the moment that a write's own immediate is seen, its bytes are there.
TEST_P(Traffic, data_is_in_place_when_its_immediate_is_seen) {
    constexpr std::size_t kPage = 16384, kPages = 48;
    auto pair = make_pair(kPage * kPages);
    auto &a = *pair->a, &b = *pair->b;
    b.keep_receives(16, 0);
    const std::size_t sizes[] = {1, 7, 64, 1000, 4096, 16384};
    for (int round = 0; round < 4; ++round) {
        b.fill(std::byte{0});
        b.imms.clear();
        for (std::size_t i = 0; i < kPages; ++i)
            write_stamp(std::span(a.memory).subspan(i * kPage, kPage), round * 1000 + i);
        std::size_t wrong = 0;
        b.on_imm = [&](std::uint32_t i) {
            wrong += i >= kPages || !has_stamp(std::span(b.memory).subspan(i * kPage, sizes[i % 6]), round * 1000 + i);
        };
        std::vector<Posted*> ops;
        for (std::size_t i = 0; i < kPages; ++i) {
            ops.push_back(pair->write(a, b, i * kPage, sizes[i % 6], i * kPage, static_cast<std::uint32_t>(i)));
            ASSERT_TRUE(ops.back()) << a.nic->last_post_error().text;
        }
        ASSERT_TRUE(pair->drive([&] { return b.imms.size() == kPages; }, patience(20'000)));
        ASSERT_TRUE(pair->drive(
            [&] { return std::all_of(ops.begin(), ops.end(), [](auto* op) { return op->num_ends == 1; }); }));
        EXPECT_EQ(wrong, 0u);
        for (std::size_t i = 0; i < kPages; ++i) {
            const auto nbytes = sizes[i % 6];
            EXPECT_TRUE(all_equal(std::span(b.memory).subspan(i * kPage + nbytes, kPage - nbytes), std::byte{0}))
                << "page " << i;
        }
    }
}

// A delivered write is complete for its sender only when the bytes are there.
TEST_P(Traffic, delivered_write_ends_when_its_data_is_in_place) {
    constexpr std::size_t kPage = 16384, kPages = 24;
    auto pair = make_pair(kPage * kPages);
    auto &a = *pair->a, &b = *pair->b;
    b.keep_receives(16, 0);
    std::map<const Posted*, std::size_t> page_of;
    std::size_t early = 0;
    a.on_sent = [&](const Posted& op) {
        const auto page = page_of.at(&op);
        early += !has_stamp(b.memory.subspan(page * kPage, kPage), page);
    };
    for (std::size_t i = 0; i < kPages; ++i) {
        write_stamp(a.memory.subspan(i * kPage, kPage), i);
        Posted* op = nullptr;
        ASSERT_TRUE(pair->drive([&] {
            const auto imm = i % 2 ? std::optional(static_cast<std::uint32_t>(i)) : std::nullopt;
            op = a.try_write(i * kPage, kPage, b.remote().base + i * kPage, b.remote().rkey, imm, true);
            return op || a.last_result == PostResult::kFailed;
        }));
        ASSERT_TRUE(op) << a.nic->last_post_error().text;
        page_of[op] = i;
    }
    ASSERT_TRUE(pair->drive([&] { return a.num_sent == kPages && b.imms.size() == kPages / 2; }, patience(20'000)));
    EXPECT_EQ(early, 0u);
}

// One operation, many places: its immediate tells of all of them. Some parts continue each other on one side.
TEST_P(Traffic, parts_of_a_write_are_all_in_place_when_its_immediate_is_seen) {
    constexpr std::size_t kPart = 4096, kParts = 4, kWrites = 24, kPages = kParts * kWrites;
    auto pair = make_pair(2 * kPages * kPart);
    auto &a = *pair->a, &b = *pair->b;
    b.keep_receives(16, 0);
    const auto places = std::min({kParts, info_.iov_limit, info_.rma_iov_limit});
    record("places", std::to_string(info_.iov_limit) + "/" + std::to_string(info_.rma_iov_limit));
    const std::size_t sizes[] = {1, 64, 1000, kPart};
    for (std::size_t i = 0; i < kPages; ++i) write_stamp(a.memory.subspan(2 * i * kPart, kPart), i);
    std::size_t wrong = 0;
    b.on_imm = [&](std::uint32_t write) {
        for (std::size_t i = write * places; i < (write + 1) * places; ++i)
            wrong += !has_stamp(b.memory.subspan(2 * (kPages - 1 - i) * kPart, sizes[i % 4]), i);
    };
    std::vector<Posted*> ops;
    for (std::uint32_t write = 0; write < kWrites; ++write) {
        std::vector<End::Part> parts;
        for (std::size_t i = write * places; i < (write + 1) * places; ++i)
            parts.push_back({2 * i * kPart, sizes[i % 4], b.remote().base + 2 * (kPages - 1 - i) * kPart});
        Posted* op = nullptr;
        ASSERT_TRUE(pair->drive([&] {
            op = a.try_write_parts(parts, b.remote().rkey, write);
            return op || a.last_result == PostResult::kFailed;
        }));
        ASSERT_TRUE(op) << a.nic->last_post_error().text;
        ops.push_back(op);
    }
    ASSERT_TRUE(pair->drive([&] { return b.imms.size() == kWrites && a.num_sent == kWrites; }, patience(20'000)));
    EXPECT_EQ(wrong, 0u);
    for (std::size_t i = 0; i < places * kWrites; ++i)
        EXPECT_TRUE(all_equal(b.memory.subspan((2 * (kPages - 1 - i)) * kPart + sizes[i % 4], kPart), std::byte{0}));
}

// Sources apart, one place at the target; the other way round; and where the provider takes one place only, one.
TEST_P(Traffic, parts_that_continue_each_other_are_one_place) {
    auto pair = make_pair();
    auto &a = *pair->a, &b = *pair->b;
    b.keep_receives(8, 0);
    for (std::size_t i = 0; i < a.memory.size(); ++i) a.memory[i] = static_cast<std::byte>(i * 7);
    const auto base = b.remote().base;
    const std::vector<std::vector<End::Part>> writes = {
        {{0, 100, base}, {100, 100, base + 100}, {200, 56, base + 200}},
        info_.iov_limit < 3 ? std::vector<End::Part>{{0, 100, base}}
                            : std::vector<End::Part>{{0, 100, base}, {500, 100, base + 100}, {900, 56, base + 200}},
        info_.rma_iov_limit < 3 ? std::vector<End::Part>{{0, 100, base}}
                                : std::vector<End::Part>{{0, 100, base}, {100, 100, base + 900}, {200, 56, base + 500}},
    };
    for (std::size_t n = 0; n < writes.size(); ++n) {
        b.fill(std::byte{0});
        auto* op = a.try_write_parts(writes[n], b.remote().rkey, 5u);
        pair->drive([&] {
            if (!op && a.last_result == PostResult::kAgain) op = a.try_write_parts(writes[n], b.remote().rkey, 5u);
            return op && b.imms.size() == n + 1 && op->num_ends == 1;
        });
        ASSERT_TRUE(op) << a.nic->last_post_error().text;
        EXPECT_FALSE(op->error);
        for (const auto& part : writes[n])
            EXPECT_TRUE(std::equal(b.memory.begin() + static_cast<std::ptrdiff_t>(part.dst - base),
                                   b.memory.begin() + static_cast<std::ptrdiff_t>(part.dst - base + part.nbytes),
                                   a.memory.begin() + static_cast<std::ptrdiff_t>(part.src_offset)))
                << n;
    }
}

TEST_P(Traffic, write_without_bytes_delivers_its_immediate) {
    auto pair = make_pair();
    auto &a = *pair->a, &b = *pair->b;
    b.keep_receives(4, 0);
    auto* op = pair->write(a, b, 0, 0, 0, 0x1234u);
    ASSERT_TRUE(op) << a.nic->last_post_error().text;
    EXPECT_TRUE(pair->drive([&] { return b.imms.size() == 1 && op->num_ends == 1; }));
    EXPECT_EQ(b.imms, std::vector<std::uint32_t>{0x1234});
    EXPECT_FALSE(op->error);
    EXPECT_TRUE(all_equal(b.memory, std::byte{0}));
}

// Where write-after-write order is granted, a later write's immediate implies the data of all earlier ones, and
// later bytes win in the same place.
TEST_P(Traffic, granted_order_holds) {
    constexpr std::size_t kPage = 4096, kPages = 32;
    auto pair = make_pair(2 * kPage * kPages);
    auto &a = *pair->a, &b = *pair->b;
    b.keep_receives(16, 0);
    std::size_t early = 0, wrong_winner = 0;
    bool in_order = true;
    for (std::uint32_t round = 0; round < 24; ++round) {
        b.imms.clear();
        b.fill(std::byte{0});
        for (std::size_t i = 0; i < 2 * kPages; ++i)
            write_stamp(std::span(a.memory).subspan(i * kPage, kPage), round * 1000 + i);
        b.on_imm = [&](std::uint32_t imm) {
            in_order &= b.imms.size() == imm + 1;
            if (imm != 1) return;
            for (std::size_t i = 0; i < kPages; ++i)
                early += !has_stamp(std::span(b.memory).subspan(i * kPage, kPage), round * 1000 + i);
            wrong_winner += !has_stamp(std::span(b.memory).subspan(kPages * kPage, kPage), round * 1000 + kPages - 1);
        };
        const auto sent_before = a.num_sent;
        ASSERT_TRUE(pair->write(a, b, 0, 64, 0, 0u));
        for (std::size_t i = 0; i < kPages; ++i) {
            ASSERT_TRUE(pair->write(a, b, i * kPage, kPage, i * kPage, {}));
            ASSERT_TRUE(pair->write(a, b, i * kPage, kPage, kPages * kPage, {}));
        }
        ASSERT_TRUE(pair->write(a, b, 0, 64, 0, 1u));
        ASSERT_TRUE(pair->drive([&] { return b.imms.size() == 2 && a.num_sent == sent_before + 2 * kPages + 2; },
                                patience(20'000)));
    }
    const bool ordered = early == 0 && wrong_winner == 0 && in_order;
    record_if("order_granted", info_.ordered_writes);
    record_if("order_seen", ordered);
    EXPECT_TRUE(ordered || !info_.ordered_writes) << early << " pages late, " << wrong_winner << " overtaken";
}

TEST_P(Traffic, large_writes_arrive_whole) {
    constexpr std::size_t kBytes = 3 << 20;
    if (info_.max_msg_bytes < kBytes) GTEST_SKIP() << "max_msg_bytes is " << info_.max_msg_bytes;
    auto pair = make_pair(kBytes);
    auto &a = *pair->a, &b = *pair->b;
    b.keep_receives(4, 0);
    write_stamp(a.memory, 4);
    bool whole = false;
    b.on_imm = [&](std::uint32_t) { whole = has_stamp(b.memory, 4); };
    auto* op = pair->write(a, b, 0, kBytes, 0, 1u);
    ASSERT_TRUE(op);
    ASSERT_TRUE(pair->drive([&] { return b.imms.size() == 1 && op->num_ends == 1; }, patience(20'000)));
    EXPECT_TRUE(whole);
}

TEST_P(Traffic, reads_fetch_what_is_there) {
    constexpr std::size_t kPages = 8;
    auto pair = make_pair(40'000 * kPages);
    const std::size_t page_bytes = std::min<std::uint64_t>(40'000, pair->a->nic->info().max_msg_bytes);
    write_stamp(pair->b->memory, 9);
    pair->a->fill(std::byte{0});
    std::vector<const Posted*> ops;
    for (std::size_t i = 0; i < kPages; ++i)
        ops.push_back(pair->read(*pair->a, *pair->b, i * page_bytes, page_bytes, (kPages - 1 - i) * page_bytes));
    for (const auto* op : ops) {
        ASSERT_TRUE(op);
        ASSERT_TRUE(pair->drive([&] { return op->num_ends > 0; }, patience(10'000)));
        ASSERT_FALSE(op->error) << op->error->text;
    }
    for (std::size_t i = 0; i < kPages; ++i) {
        const auto here = pair->a->memory.subspan(i * page_bytes, page_bytes);
        EXPECT_TRUE(std::equal(here.begin(), here.end(),
                               pair->b->memory.begin() + static_cast<long>((kPages - 1 - i) * page_bytes)));
    }
    EXPECT_TRUE(has_stamp(pair->b->memory, 9));
}

TEST_P(Traffic, both_directions_at_once) {
    constexpr std::size_t kPage = 2048, kPages = 128;
    auto pair = make_pair(2 * kPage * kPages);  // first half is sent, second half is received into
    std::mt19937 random(11);
    std::vector<std::uint32_t> order(kPages);
    for (std::uint32_t i = 0; i < kPages; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random);
    for (auto* end : {pair->a.get(), pair->b.get()}) {
        end->keep_receives(16, 0);
        write_stamp(std::span(end->memory).first(kPage * kPages), end == pair->a.get() ? 1 : 2);
    }
    for (const auto i : order) {
        ASSERT_TRUE(pair->write(*pair->a, *pair->b, i * kPage, kPage, (kPages + i) * kPage, i));
        ASSERT_TRUE(pair->write(*pair->b, *pair->a, i * kPage, kPage, (kPages + i) * kPage, i));
    }
    ASSERT_TRUE(pair->drive([&] { return pair->a->imms.size() == kPages && pair->b->imms.size() == kPages; },
                            patience(20'000)));
    ASSERT_TRUE(pair->drive([&] { return pair->a->num_sent == kPages && pair->b->num_sent == kPages; }));
    for (auto* end : {pair->a.get(), pair->b.get()}) {
        EXPECT_TRUE(has_stamp(std::span(end->memory).subspan(kPage * kPages), end == pair->a.get() ? 2 : 1));
        std::sort(end->imms.begin(), end->imms.end());
        for (std::uint32_t i = 0; i < kPages; ++i) EXPECT_EQ(end->imms[i], i);
    }
}

}  // namespace
}  // namespace fkv::test

int main(int argc, char** argv) { return fkv::test::contract_main(argc, argv); }
