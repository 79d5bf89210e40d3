// What libfabric opened, closed with its owner.
#pragma once

#include <cstdio>
#include <memory>

#include "ofi/library.h"

namespace fkv::ofi {

template <typename F>
bool close_fid(F* object, const char* what) {
    const int rc = fi_close(&object->fid);
    // A close that fails leaks the object; its name is all that helps to find out why.
    if (rc)
        std::fprintf(stderr, "fabric_kv: closing the %s failed: %s (%d)\n", what, Library::get().strerror(-rc), -rc);
    return rc == 0;
}

struct Closer {
    const char* what;
    template <typename F>
    void operator()(F* object) const {
        close_fid(object, what);
    }
};
template <typename F>
using Fid = std::unique_ptr<F, Closer>;

}  // namespace fkv::ofi
