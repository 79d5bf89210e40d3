// Turns a paged copy into single writes: merges neighbouring pages, splits what is too large, weighs each write.
//
// Pure functions over plain data: no NIC, no thread. Offsets are 64-bit throughout.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/page_list.h"
#include "engine/region.h"

namespace fkv {

// Page i, row r: src_offset + src_pages[i] * src_stride + r * src_row_stride  ->  the same with dst; nbytes each.
struct PagePiece {
    std::shared_ptr<Region> src;
    std::uint64_t src_offset;
    std::uint64_t src_stride;
    std::shared_ptr<const RemoteRegion> dst;
    std::uint64_t dst_offset;
    std::uint64_t dst_stride;
    std::uint64_t nbytes;
    Pages src_pages;
    Pages dst_pages;
    std::uint64_t rows = 1;
    std::uint64_t src_row_stride = 0;
    std::uint64_t dst_row_stride = 0;
    std::uint16_t layer = 0;  // in a submission with a watch: how many layers must be done; 0: none

    std::size_t num_pages() const { return src_pages ? src_pages->size() : 0; }
};

// Throws Error(kConfig) naming the first value that leaves its region, with its unit and limit. Nothing has been
// posted.
void check_bounds(const PagePiece& piece);

struct WriteLimits {
    std::uint64_t max_bytes;       // of one write; at least one unit
    std::uint64_t unit_bytes;      // writes are split at multiples of it
    std::uint64_t max_units;       // that one write may stand for
    std::size_t max_src_runs = 1;  // places that one write may read from ...
    std::size_t max_dst_runs = 1;  // ... and write to
};

// Bytes that lie together on both sides.
struct PlannedRun {
    std::uint64_t src_offset;
    std::uint64_t dst_offset;
    std::uint64_t nbytes;
};

struct PlannedWrite {
    const PagePiece* piece;
    std::array<PlannedRun, kMaxParts> runs;  // num_runs of them
    std::size_t num_runs;
    std::uint64_t nbytes;      // of all runs
    std::uint64_t units;       // 0: a part that a later write answers for
    bool after_plain;          // to be posted only when every such part has been delivered
    std::uint64_t first_page;  // index into the piece's page lists
    std::uint64_t num_pages;
};

// Walks the pieces in order and joins fragments that are neighbours on both sides to runs, and runs to writes. The
// units of all writes add up to the sum of ceil(nbytes / unit) over all fragments, however they were joined and split.
//
// No run crosses a border between registrations. A unit that such a border cuts cannot be counted in parts: its first
// parts are yielded with 0 units, its last one carries the units and must be posted after the others are delivered.
class PageCursor {
  public:
    PageCursor() = default;
    PageCursor(std::span<const PagePiece> pieces, WriteLimits limits);

    bool next(PlannedWrite& out);
    // The piece that next() will be about; null at the end.
    const PagePiece* next_piece();

  private:
    bool at_fragment(std::uint64_t& src, std::uint64_t& dst);
    void advance();
    void next_part(PlannedWrite& out);
    std::uint64_t room_at(const PagePiece& piece, const PlannedRun& run) const;

    std::span<const PagePiece> pieces_;
    WriteLimits limits_{};
    std::size_t piece_ = 0;
    std::size_t page_ = 0;
    std::uint64_t row_ = 0;
    std::uint64_t within_ = 0;  // bytes of the present fragment that are planned already
    // A block of whole units (or a fragment's end) that is being yielded in parts; see next_part().
    std::uint64_t block_end_ = 0;  // offset in the fragment; 0: no block
    std::uint64_t block_units_ = 0;
    bool block_cut_ = false;
};

}  // namespace fkv
