// Loading libfabric does nothing to the process that it is loaded into.
#include "ofi/library.h"

#include <gtest/gtest.h>

#include <csignal>
#include <memory>
#include <vector>

#include "ofi/discover.h"
#include "ofi/ofi_nic.h"

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

std::vector<std::unique_ptr<Nic>> open_shm(std::size_t count) {
    std::vector<std::unique_ptr<Nic>> nics;
    for (std::size_t i = 0; i < count; ++i) nics.push_back(open_nic(std::move(find_nics({"shm", {}}).front())));
    return nics;
}

TEST(Endpoints, leave_the_handlers_of_the_process_alone) {
    std::signal(SIGTERM, on_signal);
    std::signal(SIGINT, SIG_IGN);
    const auto before = handlers();
    const auto nics = open_shm(2);
    EXPECT_EQ(handlers(), before);
    raise(SIGINT);
    for (const auto& nic : nics) nic->close_endpoint();
}

// shm's handler takes the queues out of /dev/shm, and after a second endpoint called itself for ever.
TEST(Endpoints, without_a_handler_a_signal_ends_the_process) {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    EXPECT_EXIT(
        {
            std::signal(SIGTERM, SIG_DFL);
            const auto nics = open_shm(3);
            raise(SIGTERM);
        },
        ::testing::KilledBySignal(SIGTERM), "");
}

}  // namespace
}  // namespace fkv::ofi
