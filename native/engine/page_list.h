// Page indices of one side of a copy, looked at once and shared by every piece and submission that uses them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace fkv {

class PageList {
  public:
    explicit PageList(std::vector<std::int64_t> pages) : pages_(std::move(pages)) {
        // Values first and places only on demand: this loop is vectorised, one that remembers places is not.
        for (const auto page : pages_) {
            low_ = std::min(low_, page);
            high_ = std::max(high_, page);
        }
    }

    std::size_t size() const { return pages_.size(); }
    bool empty() const { return pages_.empty(); }
    std::int64_t operator[](std::size_t index) const { return pages_[index]; }
    std::int64_t low() const { return low_; }  // of an empty list of no use, as high()
    std::int64_t high() const { return high_; }
    std::size_t index_of(std::int64_t page) const {
        return static_cast<std::size_t>(std::find(pages_.begin(), pages_.end(), page) - pages_.begin());
    }

  private:
    std::vector<std::int64_t> pages_;
    std::int64_t low_ = INT64_MAX, high_ = INT64_MIN;
};

using Pages = std::shared_ptr<const PageList>;

inline Pages make_pages(std::vector<std::int64_t> pages) { return std::make_shared<const PageList>(std::move(pages)); }

}  // namespace fkv
