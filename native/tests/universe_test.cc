// The size of libfabric's universe follows the shortest completion queue of the machine's devices.
#include "ofi/universe.h"

#include <gtest/gtest.h>

namespace fkv::ofi {
namespace {

TEST(Universe, the_default_stays_where_it_fits) {
    EXPECT_EQ(universe_size({}), std::nullopt);
    EXPECT_EQ(universe_size({4'194'303}), std::nullopt);  // ConnectX
    EXPECT_EQ(universe_size({1024 * 256}), std::nullopt);
}

TEST(Universe, the_shortest_queue_decides) {
    EXPECT_EQ(universe_size({32'767}), 127u);  // Soft-RoCE: 127 * (128 + 128) entries
    EXPECT_EQ(universe_size({4'194'303, 65'535, 1'048'575}), 255u);
    EXPECT_EQ(universe_size({1024 * 256 - 1}), 1023u);
}

TEST(Universe, is_never_empty) { EXPECT_EQ(universe_size({100}), 1u); }

}  // namespace
}  // namespace fkv::ofi
