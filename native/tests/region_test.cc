// Regions: in use or dropped, never both.
#include "engine/region.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

namespace fkv {
namespace {

struct CountedHandle final : MemoryHandle {
    explicit CountedHandle(int& count) : num_closed(count) {}
    ~CountedHandle() override { ++num_closed; }
    bool close() override { return true; }
    std::uint64_t remote_base() const override { return 0; }
    std::uint64_t rkey() const override { return 0; }
    void* local_desc() const override { return nullptr; }
    int& num_closed;
};

TEST(Region, one_in_use_is_not_dropped) {
    Region region;
    EXPECT_TRUE(region.begin_use());
    EXPECT_TRUE(region.begin_use());
    EXPECT_EQ(region.drop(), 2u);
    region.end_use();
    region.end_use();
    EXPECT_EQ(region.drop(), 0u);
    EXPECT_FALSE(region.begin_use());
    EXPECT_EQ(region.drop(), 0u) << "twice is fine";
}

// A submission looks at the registrations after begin_use(), a deregistration clears them after drop().
TEST(Region, use_and_drop_exclude_each_other_between_threads) {
    for (int round = 0; round < 300; ++round) {
        int num_closed = 0;
        Region region;
        region.rails.emplace_back().push_back(std::make_unique<CountedHandle>(num_closed));
        std::thread dropping([&] {
            while (region.drop() != 0) std::this_thread::yield();
            region.rails.clear();
        });
        while (region.begin_use()) {
            ASSERT_EQ(region.rails.size(), 1u);
            region.end_use();
            std::this_thread::yield();
        }
        dropping.join();
        ASSERT_EQ(num_closed, 1);
    }
}

// The kernel's side of a registration belongs to the parent too.
TEST(Region, a_forked_child_leaves_registrations_alone) {
    int num_closed = 0;
    auto region = std::make_unique<Region>();
    region->rails.emplace_back().push_back(std::make_unique<CountedHandle>(num_closed));
    const auto child = fork();
    if (child == 0) {
        region.reset();
        _exit(num_closed);
    }
    int status = -1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    region.reset();
    EXPECT_EQ(num_closed, 1);
}

}  // namespace
}  // namespace fkv
