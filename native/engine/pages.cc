#include "engine/pages.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace fkv {
namespace {

using Wide = unsigned __int128;  // products of 64-bit sizes; what a caller passes may be anything

void check_side(const char* side, const PageList& pages, std::uint64_t offset, std::uint64_t stride, std::uint64_t rows,
                std::uint64_t row_stride, std::uint64_t nbytes, std::uint64_t region_bytes) {
    const std::string name(side);
    const auto entry = [&](std::int64_t page) {
        return name + "_pages[" + std::to_string(pages.index_of(page)) + "] = " + std::to_string(page);
    };
    if (pages.low() < 0) throw Error(ErrorKind::kConfig, entry(pages.low()) + " is negative: page indices start at 0");
    // Compared in two steps, since the whole sum can pass 2^128.
    const Wide tail = Wide{offset} + Wide{rows - 1} * row_stride + nbytes;
    if (tail <= region_bytes && Wide(static_cast<std::uint64_t>(pages.high())) * stride <= region_bytes - tail) return;
    std::string limit = "no page fits";
    if (tail <= region_bytes)
        limit = stride == 0 ? "only offset 0 fits"
                            : "the largest page index that fits is " +
                                  std::to_string(static_cast<std::uint64_t>((region_bytes - tail) / stride));
    throw Error(ErrorKind::kConfig, entry(pages.high()) + " (page index) is out of range: with offset " +
                                        std::to_string(offset) + ", stride " + std::to_string(stride) + " and " +
                                        std::to_string(nbytes) + " bytes" +
                                        (rows > 1 ? " x " + std::to_string(rows) + " rows" : "") + ", in a region of " +
                                        std::to_string(region_bytes) + " bytes, " + limit);
}

}  // namespace

void check_bounds(const PagePiece& piece) {
    if (piece.src_pages->size() != piece.dst_pages->size())
        throw Error(ErrorKind::kConfig, "src_pages has " + std::to_string(piece.src_pages->size()) +
                                            " entries, dst_pages has " + std::to_string(piece.dst_pages->size()) +
                                            ": they must pair up");
    if (piece.src_pages->empty() || piece.rows == 0 || piece.nbytes == 0) return;
    check_side("src", *piece.src_pages, piece.src_offset, piece.src_stride, piece.rows, piece.src_row_stride,
               piece.nbytes, piece.src->nbytes);
    check_side("dst", *piece.dst_pages, piece.dst_offset, piece.dst_stride, piece.rows, piece.dst_row_stride,
               piece.nbytes, piece.dst->nbytes);
}

PageCursor::PageCursor(std::span<const PagePiece> pieces, WriteLimits limits) : pieces_(pieces), limits_(limits) {}

bool PageCursor::at_fragment(std::uint64_t& src, std::uint64_t& dst) {
    while (piece_ < pieces_.size()) {
        const auto& p = pieces_[piece_];
        if (page_ < p.num_pages() && p.rows > 0 && p.nbytes > 0) {
            src = p.src_offset + static_cast<std::uint64_t>((*p.src_pages)[page_]) * p.src_stride +
                  row_ * p.src_row_stride;
            dst = p.dst_offset + static_cast<std::uint64_t>((*p.dst_pages)[page_]) * p.dst_stride +
                  row_ * p.dst_row_stride;
            return true;
        }
        ++piece_;
        page_ = 0;
        row_ = 0;
    }
    return false;
}

const PagePiece* PageCursor::next_piece() {
    std::uint64_t src = 0, dst = 0;
    return at_fragment(src, dst) ? &pieces_[piece_] : nullptr;
}

void PageCursor::advance() {
    if (++row_ == pieces_[piece_].rows) {
        row_ = 0;
        ++page_;
    }
}

// Bytes that a run may have from its begin on, on account of the registrations.
std::uint64_t PageCursor::room_at(const PagePiece& piece, const PlannedRun& run) const {
    return std::min(piece.src->segments.room_at(run.src_offset), piece.dst->segments.room_at(run.dst_offset));
}

void PageCursor::next_part(PlannedWrite& out) {
    const auto left = block_end_ - within_;
    const auto nbytes = std::min(left, room_at(*out.piece, out.runs[0]));
    out.runs[0].nbytes = out.nbytes = nbytes;
    const bool last = nbytes == left;
    out.units = last ? block_units_ : 0;
    out.after_plain = last && block_cut_;
    block_cut_ = !last;
    within_ += nbytes;
    if (!last) return;
    block_end_ = 0;
    if (within_ == out.piece->nbytes) {
        within_ = 0;
        advance();
    }
}

bool PageCursor::next(PlannedWrite& out) {
    std::uint64_t src = 0, dst = 0;
    if (!at_fragment(src, dst)) return false;
    const auto& piece = pieces_[piece_];
    out.piece = &piece;
    out.runs[0] = {src + within_, dst + within_, 0};
    out.num_runs = 1;
    out.nbytes = out.units = 0;
    out.after_plain = false;
    out.first_page = page_;
    out.num_pages = 1;
    const auto unit = limits_.unit_bytes;
    auto room = room_at(piece, out.runs[0]);
    // The most that one write may carry, in whole units.
    const auto most_units = std::min(limits_.max_bytes / unit, limits_.max_units);
    const auto units_of = [unit](std::uint64_t nbytes) { return nbytes / unit + (nbytes % unit != 0); };

    if (block_end_ == 0 && (within_ > 0 || units_of(piece.nbytes) > most_units || piece.nbytes > room)) {
        // One fragment that is too large for a write, or cut by a border: the next block of it ends at a multiple of
        // the unit, so that the units still add up.
        const auto left = piece.nbytes - within_;
        block_units_ = std::min(units_of(left), most_units);
        block_end_ = block_units_ == units_of(left) ? piece.nbytes : within_ + block_units_ * unit;
        block_cut_ = false;
    }
    if (block_end_ != 0) {
        next_part(out);
        return true;
    }
    const auto fragment_units = units_of(piece.nbytes);
    std::size_t src_runs = 1, dst_runs = 1;
    for (;;) {
        auto& run = out.runs[out.num_runs - 1];
        run.nbytes += piece.nbytes;
        out.nbytes += piece.nbytes;
        out.units += fragment_units;
        out.num_pages = page_ - out.first_page + 1;
        advance();
        if (!at_fragment(src, dst) || &pieces_[piece_] != &piece) break;
        if (out.nbytes + piece.nbytes > limits_.max_bytes || out.units + fragment_units > limits_.max_units) break;
        const bool src_follows = src == run.src_offset + run.nbytes;
        const bool dst_follows = dst == run.dst_offset + run.nbytes;
        if (src_follows && dst_follows && run.nbytes + piece.nbytes <= room) continue;
        // Another run, if it is whole within its registrations and the operation may have that many places.
        const PlannedRun next{src, dst, 0};
        room = room_at(piece, next);
        src_runs += !src_follows || piece.src->segments.index_of(src) != piece.src->segments.index_of(src - 1);
        dst_runs += !dst_follows || piece.dst->segments.index_of(dst) != piece.dst->segments.index_of(dst - 1);
        if (room < piece.nbytes || out.num_runs == kMaxParts || src_runs > limits_.max_src_runs ||
            dst_runs > limits_.max_dst_runs)
            break;
        out.runs[out.num_runs++] = next;
    }
    return true;
}

}  // namespace fkv
