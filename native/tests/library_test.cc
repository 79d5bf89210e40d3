// Loading libfabric does nothing to the process that it is loaded into.
#include "ofi/library.h"

#include <gtest/gtest.h>

#include <csignal>
#include <vector>

namespace fkv::ofi {
namespace {

void on_signal(int) {}

std::vector<void (*)(int)> handlers() {
    std::vector<void (*)(int)> list;
    for (int number = 1; number < 32; ++number) {
        struct sigaction now{};
        sigaction(number, nullptr, &now);
        list.push_back(now.sa_handler);
    }
    return list;
}

TEST(Library, signal_handlers_stay_as_they_were) {
    struct sigaction mine{};
    mine.sa_handler = on_signal;
    sigaction(SIGINT, &mine, nullptr);
    const auto before = handlers();
    try {
        Library::get();
    } catch (const Error& error) {
        GTEST_SKIP() << error.what();
    }
    EXPECT_EQ(handlers(), before);
}

}  // namespace
}  // namespace fkv::ofi
