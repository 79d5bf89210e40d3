// Which NICs a group starts with when some of them cannot be opened.
//
// Failure: `strict` passes on the first NIC's error; otherwise such NICs are left out and listed, and only a group
//          without any NIC is refused.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "fabric/nic.h"

namespace fkv {

// `open(item)` opens one NIC; what it says of those that fail is added to `left_out`.
template <typename Items, typename Open>
std::vector<std::unique_ptr<Nic>> open_rails(Items&& items, bool strict, std::vector<std::string>& left_out,
                                             Open&& open) {
    std::vector<std::unique_ptr<Nic>> rails;
    std::string last;
    for (auto& item : items) {
        try {
            rails.push_back(open(std::move(item)));
        } catch (const Error& error) {
            if (strict) throw;
            last = error.what();
            left_out.push_back(last);
        }
    }
    if (rails.empty())
        throw Error(ErrorKind::kFabric,
                    last.empty() ? "no NIC" : "no NIC of the group could be opened; the last: " + last);
    return rails;
}

}  // namespace fkv
