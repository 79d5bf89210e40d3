// What is said of a refused registration: the limit, its value, what was asked, and the way out.
#include "ofi/limits.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cerrno>

namespace fkv::ofi {
namespace {

std::string said(int fi_errno, MemoryLimits limits = {65536, 4096}, std::size_t most = 0) {
    return explain_refusal({fi_errno, 1 << 20, 17, most, limits});
}

bool has(const std::string& text, const std::string& words) { return text.find(words) != std::string::npos; }

TEST(Limits, locked_memory_names_limit_asked_pinned_and_the_fix) {
    const auto text = said(ENOMEM);
    for (const auto* words : {"65536 bytes", "1048576 bytes", "4096 are pinned", "ulimit -l unlimited", "memlock=-1"})
        EXPECT_TRUE(has(text, words)) << words << ": " << text;
}

TEST(Limits, an_unlimited_process_is_not_told_to_raise_it) {
    const auto text = said(ENOMEM, {});
    EXPECT_TRUE(has(text, "unlimited")) << text;
    EXPECT_FALSE(has(text, "ulimit")) << text;
    EXPECT_TRUE(has(text, "17 registrations")) << text;
}

TEST(Limits, the_number_of_registrations_is_named) {
    EXPECT_TRUE(has(said(ENOSPC), "17 registrations are open"));
    EXPECT_TRUE(has(said(ENOSPC, {}, 16384), "limit is 16384"));
}

TEST(Limits, the_size_is_named_with_its_option) { EXPECT_TRUE(has(said(EINVAL), "max_registration_bytes")); }

TEST(Limits, those_of_this_process) {
    rlimit locked{};
    ASSERT_EQ(getrlimit(RLIMIT_MEMLOCK, &locked), 0);
    const auto limits = memory_limits();
    EXPECT_EQ(limits.locked_limit_bytes.has_value(), locked.rlim_cur != RLIM_INFINITY);
    EXPECT_EQ(limits.locked_limit_bytes.value_or(RLIM_INFINITY), locked.rlim_cur);
}

}  // namespace
}  // namespace fkv::ofi
