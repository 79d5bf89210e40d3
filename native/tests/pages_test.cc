// Page expansion against an oracle that knows nothing of runs: every byte once, every unit once, every limit kept.
#include "engine/pages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "base/error.h"

namespace fkv {
namespace {

constexpr std::uint64_t kHuge = std::uint64_t{1} << 62;

// Both in one segment, or in segments that end at `ends` and then at the region's end.
std::shared_ptr<Region> region_of(std::uint64_t nbytes, std::vector<std::uint64_t> ends = {}) {
    auto region = std::make_shared<Region>();
    region->nbytes = nbytes;
    ends.push_back(nbytes);
    region->segments = Segments(std::move(ends));
    return region;
}

std::shared_ptr<RemoteRegion> remote_of(std::uint64_t nbytes, std::vector<std::uint64_t> ends = {}) {
    auto region = std::make_shared<RemoteRegion>();
    region->nbytes = nbytes;
    ends.push_back(nbytes);
    region->segments = Segments(std::move(ends));
    return region;
}

PagePiece piece_of(std::uint64_t nbytes, std::vector<std::int64_t> src_pages, std::vector<std::int64_t> dst_pages) {
    PagePiece piece;
    piece.src = region_of(kHuge);
    piece.dst = remote_of(kHuge);
    piece.src_offset = piece.dst_offset = 0;
    piece.src_stride = piece.dst_stride = piece.nbytes = nbytes;
    piece.src_pages = make_pages(std::move(src_pages));
    piece.dst_pages = make_pages(std::move(dst_pages));
    return piece;
}

std::vector<PlannedWrite> plan(std::span<const PagePiece> pieces, WriteLimits limits) {
    std::vector<PlannedWrite> writes;
    PageCursor cursor(pieces, limits);
    for (PlannedWrite write; cursor.next(write);) {
        writes.push_back(write);
        if (write.nbytes == 0) {
            ADD_FAILURE() << "an empty write: the cursor would never end";
            break;
        }
    }
    return writes;
}

std::vector<PlannedWrite> plan(const PagePiece& piece, WriteLimits limits) { return plan({&piece, 1}, limits); }

std::string refusal(const PagePiece& piece) {
    try {
        check_bounds(piece);
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kConfig);
        return error.what();
    }
    return "accepted";
}

constexpr WriteLimits kPlain{1 << 20, 1, ~std::uint64_t{0}};

// -- the oracle
// --------------------------------------------------------------------------------------------------------

struct Fragment {
    const PagePiece* piece;
    std::uint64_t src, dst, nbytes;
};

std::vector<Fragment> fragments_of(std::span<const PagePiece> pieces) {
    std::vector<Fragment> fragments;
    for (const auto& p : pieces)
        for (std::size_t i = 0; i < p.num_pages(); ++i)
            for (std::uint64_t r = 0; r < p.rows && p.nbytes > 0; ++r)
                fragments.push_back({&p, p.src_offset + (*p.src_pages)[i] * p.src_stride + r * p.src_row_stride,
                                     p.dst_offset + (*p.dst_pages)[i] * p.dst_stride + r * p.dst_row_stride, p.nbytes});
    return fragments;
}

void check_runs(const PlannedWrite& w, const WriteLimits& limits) {
    ASSERT_GE(w.num_runs, 1u);
    ASSERT_LE(w.num_runs, kMaxParts);
    const auto &src = w.piece->src->segments, &dst = w.piece->dst->segments;
    std::uint64_t nbytes = 0;
    std::size_t sources = 1, targets = 1;
    for (std::size_t i = 0; i < w.num_runs; ++i) {
        const auto& run = w.runs[i];
        nbytes += run.nbytes;
        ASSERT_GT(run.nbytes, 0u);
        ASSERT_LE(run.nbytes, src.room_at(run.src_offset)) << "crosses a border of the source";
        ASSERT_LE(run.nbytes, dst.room_at(run.dst_offset)) << "crosses a border of the destination";
        if (i == 0) continue;
        const auto& before = w.runs[i - 1];
        sources += before.src_offset + before.nbytes != run.src_offset ||
                   src.index_of(before.src_offset) != src.index_of(run.src_offset);
        targets += before.dst_offset + before.nbytes != run.dst_offset ||
                   dst.index_of(before.dst_offset) != dst.index_of(run.dst_offset);
        ASSERT_TRUE(sources > 1 || targets > 1) << "two runs where one would do";
    }
    ASSERT_EQ(nbytes, w.nbytes);
    ASSERT_LE(sources, limits.max_src_runs);
    ASSERT_LE(targets, limits.max_dst_runs);
}

// Walks writes and fragments side by side: the writes must be the fragments, cut and joined, in the same order.
void check_against_oracle(std::span<const PagePiece> pieces, WriteLimits limits) {
    const auto fragments = fragments_of(pieces);
    const auto writes = plan(pieces, limits);
    const auto ceil_units = [&](std::uint64_t n) { return (n + limits.unit_bytes - 1) / limits.unit_bytes; };
    std::size_t at = 0;
    std::uint64_t within = 0, total = 0, expected_total = 0, block_begin = 0;
    bool after_plain = false;
    for (const auto& f : fragments) expected_total += ceil_units(f.nbytes);
    for (const auto& w : writes) {
        ASSERT_GT(w.nbytes, 0u);
        ASSERT_LE(w.nbytes, limits.max_bytes);
        ASSERT_LE(w.units, limits.max_units);
        check_runs(w, limits);
        ASSERT_EQ(w.after_plain, after_plain && w.units > 0) << "must wait for the parts that it answers for";
        if (!after_plain) block_begin = within;
        ASSERT_EQ(block_begin % limits.unit_bytes, 0u) << "cut inside a unit";
        std::uint64_t units = 0;
        for (std::size_t i = 0; i < w.num_runs; ++i) {
            for (std::uint64_t done = 0; done < w.runs[i].nbytes;) {
                ASSERT_LT(at, fragments.size()) << "more bytes than there are";
                const auto& f = fragments[at];
                ASSERT_EQ(w.piece, f.piece);
                ASSERT_EQ(w.runs[i].src_offset + done, f.src + within);
                ASSERT_EQ(w.runs[i].dst_offset + done, f.dst + within);
                const auto part = std::min(w.runs[i].nbytes - done, f.nbytes - within);
                done += part;
                within += part;
                units += ceil_units(within - block_begin);
                if (within == f.nbytes) {
                    ++at;
                    within = 0;
                    block_begin = 0;
                }
            }
        }
        after_plain = w.units == 0;
        if (w.units > 0) {
            ASSERT_EQ(w.units, units);
        }
        total += w.units;
    }
    ASSERT_FALSE(after_plain) << "the last parts are never counted";
    ASSERT_EQ(at, fragments.size()) << "bytes are missing";
    ASSERT_EQ(within, 0u);
    ASSERT_EQ(total, expected_total);
}

// -- runs
// --------------------------------------------------------------------------------------------------------------

TEST(Pages, neighbours_on_both_sides_become_one_write) {
    const auto writes = plan(piece_of(4096, {3, 4, 5, 9, 10, 6}, {7, 8, 9, 10, 11, 0}), kPlain);
    ASSERT_EQ(writes.size(), 3u);
    EXPECT_EQ(writes[0].runs[0].src_offset, 3u * 4096);
    EXPECT_EQ(writes[0].runs[0].dst_offset, 7u * 4096);
    EXPECT_EQ(writes[0].nbytes, 3u * 4096);
    EXPECT_EQ(writes[1].nbytes, 2u * 4096);
    EXPECT_EQ(writes[2].nbytes, 1u * 4096);
}

TEST(Pages, neighbours_on_one_side_only_stay_apart) {
    EXPECT_EQ(plan(piece_of(64, {1, 2}, {5, 4}), kPlain).size(), 2u);
    EXPECT_EQ(plan(piece_of(64, {1, 3}, {4, 5}), kPlain).size(), 2u);
    EXPECT_EQ(plan(piece_of(64, {1, 1}, {4, 4}), kPlain).size(), 2u);
}

TEST(Pages, a_stride_larger_than_the_page_keeps_pages_apart) {
    auto piece = piece_of(64, {1, 2, 3}, {1, 2, 3});
    piece.dst_stride = 65;
    EXPECT_EQ(plan(piece, kPlain).size(), 3u);
}

TEST(Pages, rows_that_touch_are_merged_also_across_pages) {
    auto piece = piece_of(16, {2, 3}, {0, 1});
    piece.rows = 4;
    piece.src_stride = piece.dst_stride = 64;
    piece.src_row_stride = piece.dst_row_stride = 16;
    EXPECT_EQ(plan(piece, kPlain).size(), 1u);
    piece.src_row_stride = 24;
    EXPECT_EQ(plan(piece, kPlain).size(), 8u);
}

TEST(Pages, merging_stops_at_the_weight_field) {
    std::vector<std::int64_t> pages(3000);
    for (std::size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<std::int64_t>(i);
    const auto writes = plan(piece_of(64, pages, pages), {1 << 20, 64, 1023});
    ASSERT_EQ(writes.size(), 3u);
    EXPECT_EQ(writes[0].units, 1023u);
    EXPECT_EQ(writes[2].units, 3000u - 2 * 1023);
}

TEST(Pages, a_large_page_is_cut_at_units) {
    // 3 MiB + 5 bytes in units of 3000 bytes, at most 1 MiB a write: 349 units of it.
    const std::uint64_t nbytes = (3u << 20) + 5;
    const auto writes = plan(piece_of(nbytes, {0}, {0}), {1 << 20, 3000, 1023});
    ASSERT_EQ(writes.size(), 4u);
    EXPECT_EQ(writes[0].nbytes, 349u * 3000);
    EXPECT_EQ(writes[3].nbytes, nbytes - 3 * 349 * 3000);
    EXPECT_EQ(writes[3].units, (writes[3].nbytes + 2999) / 3000);
}

TEST(Pages, odd_pages_round_up_one_by_one_even_when_merged) {
    const auto writes = plan(piece_of(5000, {0, 1, 2}, {0, 1, 2}), {1 << 20, 4096, 1023});
    ASSERT_EQ(writes.size(), 1u);
    EXPECT_EQ(writes[0].nbytes, 15000u);
    EXPECT_EQ(writes[0].units, 6u);
}

TEST(Pages, a_page_across_a_border_is_cut_and_its_last_part_carries_the_units) {
    auto piece = piece_of(4096, {0, 1, 2}, {0, 1, 2});
    piece.dst = remote_of(3 * 4096, {5000});
    const auto writes = plan(piece, {1 << 20, 4096, 1023});
    ASSERT_EQ(writes.size(), 4u);
    EXPECT_EQ(writes[0].nbytes, 4096u);
    EXPECT_EQ(writes[1].nbytes, 904u);
    EXPECT_EQ(writes[1].units, 0u);
    EXPECT_FALSE(writes[1].after_plain);
    EXPECT_EQ(writes[2].nbytes, 4096u - 904);
    EXPECT_EQ(writes[2].units, 1u);
    EXPECT_TRUE(writes[2].after_plain);
    EXPECT_EQ(writes[3].nbytes, 4096u);
    EXPECT_FALSE(writes[3].after_plain);
}

TEST(Pages, writes_say_which_pages_they_stand_for) {
    auto piece = piece_of(4096, {5, 6, 9}, {5, 6, 9});
    piece.src = region_of(64 * 4096, {9 * 4096 + 1});
    const auto writes = plan(piece, {1 << 20, 4096, 1023});
    ASSERT_EQ(writes.size(), 3u);
    EXPECT_EQ(writes[0].first_page, 0u);
    EXPECT_EQ(writes[0].num_pages, 2u);
    EXPECT_EQ(writes[1].first_page, 2u);
    EXPECT_EQ(writes[2].first_page, 2u);
    EXPECT_EQ(writes[2].num_pages, 1u);
}

TEST(Pages, nothing_to_do_is_no_write) {
    EXPECT_TRUE(plan(std::span<const PagePiece>{}, kPlain).empty());
    EXPECT_TRUE(plan(piece_of(64, {}, {}), kPlain).empty());
    EXPECT_TRUE(plan(piece_of(0, {1}, {1}), kPlain).empty());
    auto piece = piece_of(64, {1}, {1});
    piece.rows = 0;
    EXPECT_TRUE(plan(piece, kPlain).empty());
}

TEST(Pages, empty_pieces_between_others_are_passed_over) {
    const std::vector<PagePiece> pieces = {piece_of(0, {1}, {1}), piece_of(64, {1}, {1}), piece_of(64, {}, {}),
                                           piece_of(64, {2}, {2})};
    const auto writes = plan(pieces, kPlain);
    ASSERT_EQ(writes.size(), 2u);
    EXPECT_EQ(writes[1].piece, &pieces[3]);
}

TEST(Pages, offsets_are_64_bit) {
    auto piece = piece_of(4096, {3'000'000}, {5'000'000'000});
    piece.src_offset = std::uint64_t{7} << 32;
    EXPECT_EQ(refusal(piece), "accepted");
    const auto writes = plan(piece, kPlain);
    ASSERT_EQ(writes.size(), 1u);
    EXPECT_EQ(writes[0].runs[0].src_offset, (std::uint64_t{7} << 32) + std::uint64_t{3'000'000} * 4096);
    EXPECT_EQ(writes[0].runs[0].dst_offset, std::uint64_t{5'000'000'000} * 4096);
    check_against_oracle({&piece, 1}, {1000, 100, 1023});
}

// -- properties
// --------------------------------------------------------------------------------------------------------

class RandomPages : public ::testing::Test {
  protected:
    std::uint64_t below(std::uint64_t limit) { return random() % limit; }

    // Sizes as they come: mostly small, sometimes exactly at a boundary, sometimes large.
    std::uint64_t size() {
        switch (below(4)) {
            case 0:
                return 1 + below(64);
            case 1:
                return (std::uint64_t{2} << below(14)) + below(3) - 1;
            case 2:
                return 1 + below(5000);
            default:
                return 1 + below(20'000);
        }
    }

    std::vector<std::int64_t> pages(std::size_t count) {
        std::vector<std::int64_t> out;
        std::int64_t page = static_cast<std::int64_t>(below(1000));
        for (std::size_t i = 0; i < count; ++i) {
            out.push_back(page);
            page = below(3) ? page + 1 : static_cast<std::int64_t>(below(1 << 20));
        }
        return out;
    }

    PagePiece piece() {
        PagePiece p;
        p.nbytes = below(16) ? size() : 0;
        p.rows = below(3) ? 1 : below(9);
        p.src_row_stride = below(2) ? p.nbytes : p.nbytes + below(100);
        p.dst_row_stride = below(2) ? p.nbytes : p.nbytes + below(100);
        p.src_stride = p.rows * p.src_row_stride + (below(2) ? 0 : below(5000));
        p.dst_stride = p.rows * p.dst_row_stride + (below(2) ? 0 : below(5000));
        p.src_offset = below(2) ? 0 : below(std::uint64_t{1} << 40);
        p.dst_offset = below(2) ? 0 : below(std::uint64_t{1} << 40);
        const auto count = below(20);
        p.src_pages = make_pages(pages(count));
        p.dst_pages = below(2) ? p.src_pages : make_pages(pages(count));
        p.src = region_of(kHuge, ends());
        p.dst = remote_of(kHuge, ends());
        return p;
    }

    // Borders between registrations; often none, often where the pages are.
    std::vector<std::uint64_t> ends() {
        std::vector<std::uint64_t> out;
        if (below(2)) return out;
        for (auto n = below(200); n > 0; --n) out.push_back(1 + below(below(2) ? 1 << 20 : std::uint64_t{1} << 40));
        std::sort(out.begin(), out.end());
        out.erase(std::unique(out.begin(), out.end()), out.end());
        return out;
    }

    WriteLimits limits() {
        auto limits = sizes_and_units();
        limits.max_src_runs = 1 + below(kMaxParts);
        limits.max_dst_runs = 1 + below(kMaxParts);
        return limits;
    }

    WriteLimits sizes_and_units() {
        const auto unit = below(4) ? size() : 1;
        // The smallest limits only where they do not make thousands of writes of every page.
        if (unit < 256) return {unit + 500 + below(30'000), unit, 1023};
        return {unit + (below(2) ? below(3) : below(30'000)), unit, below(3) ? 1023 : 1 + below(4)};
    }

    std::uint32_t seed = std::random_device{}();
    std::mt19937_64 random{seed};
};

TEST_F(RandomPages, every_byte_and_every_unit_once_within_all_limits) {
    for (int round = 0; round < 2000; ++round) {
        SCOPED_TRACE("seed " + std::to_string(seed) + " round " + std::to_string(round));
        std::vector<PagePiece> pieces;
        for (auto n = below(4); n > 0; --n) pieces.push_back(piece());
        check_against_oracle(pieces, limits());
        if (HasFatalFailure()) return;
    }
}

TEST_F(RandomPages, what_the_bounds_accept_stays_inside_and_what_they_refuse_does_not) {
    int num_accepted = 0;
    for (int round = 0; round < 2000; ++round) {
        SCOPED_TRACE("seed " + std::to_string(seed) + " round " + std::to_string(round));
        auto p = piece();
        std::uint64_t src_end = 0, dst_end = 0;
        for (const auto& f : fragments_of({&p, 1})) {
            src_end = std::max(src_end, f.src + f.nbytes);
            dst_end = std::max(dst_end, f.dst + f.nbytes);
        }
        const std::uint64_t src_slack = below(3), dst_slack = below(3);
        p.src = region_of(src_end + src_slack - 1 + (src_end == 0));
        p.dst = remote_of(dst_end + dst_slack - 1 + (dst_end == 0));
        const bool fits = src_end == 0 || (src_slack > 0 && dst_slack > 0);
        num_accepted += fits;
        ASSERT_EQ(refusal(p) == "accepted", fits);
    }
    EXPECT_GT(num_accepted, 100);
}

// -- gathering
// ---------------------------------------------------------------------------------------------------------

constexpr WriteLimits kGather{1 << 20, 4096, 1023, 4, 4};

TEST(Pages, scattered_pages_share_a_write) {
    const auto writes = plan(piece_of(4096, {9, 7, 5, 3, 1}, {0, 2, 4, 6, 8}), kGather);
    ASSERT_EQ(writes.size(), 2u);
    EXPECT_EQ(writes[0].num_runs, 4u);
    EXPECT_EQ(writes[0].units, 4u);
    EXPECT_EQ(writes[0].num_pages, 4u);
    EXPECT_EQ(writes[1].first_page, 4u);
}

TEST(Pages, neighbours_on_one_side_are_one_place_there) {
    auto limits = kGather;
    limits.max_dst_runs = 1;
    const auto writes = plan(piece_of(4096, {9, 7, 5, 3, 1}, {0, 1, 2, 4, 5}), limits);
    ASSERT_EQ(writes.size(), 2u);
    EXPECT_EQ(writes[0].num_runs, 3u);
    EXPECT_EQ(writes[1].num_runs, 2u);
}

TEST(Pages, several_places_are_no_longer_than_one) {
    EXPECT_EQ(plan(piece_of(1 << 19, {4, 2, 0, 6}, {0, 2, 4, 6}), kGather).size(), 2u);
    EXPECT_EQ(plan(piece_of((1 << 19) + 1, {4, 2, 0, 6}, {0, 2, 4, 6}), kGather).size(), 4u);
}

TEST(Pages, pieces_are_not_gathered) {
    const std::vector pieces{piece_of(64, {1, 3}, {1, 3}), piece_of(64, {1, 3}, {1, 3})};
    EXPECT_EQ(plan(pieces, kGather).size(), 2u);
}

// -- refusals
// ----------------------------------------------------------------------------------------------------------

TEST(PageBounds, the_error_names_entry_value_unit_and_limit) {
    auto piece = piece_of(4096, {0, 1, 64, 2}, {0, 1, 2, 3});
    piece.src = region_of(64 * 4096);
    const auto text = refusal(piece);
    EXPECT_NE(text.find("src_pages[2] = 64 (page index)"), std::string::npos) << text;
    EXPECT_NE(text.find("262144 bytes"), std::string::npos) << text;
    EXPECT_NE(text.find("the largest page index that fits is 63"), std::string::npos) << text;
}

TEST(PageBounds, the_destination_is_checked_too) {
    auto piece = piece_of(4096, {0}, {16});
    piece.dst = remote_of(16 * 4096);
    EXPECT_NE(refusal(piece).find("dst_pages[0] = 16"), std::string::npos);
    piece.dst = remote_of(17 * 4096 - 1);
    EXPECT_NE(refusal(piece).find("largest page index that fits is 15"), std::string::npos);
    piece.dst = remote_of(17 * 4096);
    EXPECT_EQ(refusal(piece), "accepted");
}

TEST(PageBounds, a_negative_page_is_named) {
    EXPECT_NE(refusal(piece_of(4096, {0, -3}, {0, 1})).find("src_pages[1] = -3 is negative"), std::string::npos);
}

TEST(PageBounds, lists_must_pair_up) {
    EXPECT_NE(refusal(piece_of(4096, {0, 1}, {0})).find("src_pages has 2 entries, dst_pages has 1"), std::string::npos);
}

TEST(PageBounds, a_page_that_fits_nowhere_says_so) {
    auto piece = piece_of(4096, {0}, {0});
    piece.src = region_of(4095);
    EXPECT_NE(refusal(piece).find("no page fits"), std::string::npos);
}

TEST(PageBounds, nothing_to_copy_is_within_any_bounds) {
    auto piece = piece_of(0, {1 << 30}, {1 << 30});
    piece.src = region_of(1);
    EXPECT_EQ(refusal(piece), "accepted");
}

// Sizes that wrap around 2^64, and around 2^128, must not come out small.
TEST(PageBounds, absurd_numbers_do_not_wrap_around) {
    constexpr auto kMax = ~std::uint64_t{0};
    const std::int64_t page = std::int64_t{1} << 62;
    auto wraps_64 = piece_of(4096, {page}, {0});
    wraps_64.src_stride = 4;
    EXPECT_NE(refusal(wraps_64), "accepted");
    auto offset = piece_of(4096, {0}, {0});
    offset.src_offset = kMax - 4000;
    EXPECT_NE(refusal(offset), "accepted");
    // The rows end 3 x 2^64 - 3 bytes below 2^128; page 3 lies exactly so much further and would wrap to 0.
    auto rows = piece_of(1, {3}, {0});
    rows.rows = kMax;
    rows.src_row_stride = kMax;
    rows.src_stride = kMax;
    EXPECT_NE(refusal(rows), "accepted");
}

}  // namespace
}  // namespace fkv
