// Sixteen threads that do everything at once to two engines, for ThreadSanitizer above all.
//
// FABRIC_KV_STRESS_S sets how long; 8 seconds under ThreadSanitizer, 2 otherwise.
#include <cstdlib>
#include <mutex>
#include <random>
#include <thread>

#include "engine_cluster.h"

namespace fkv::test {
namespace {

using namespace fkv::fake;

#if defined(__SANITIZE_THREAD__)
constexpr double kDefaultSeconds = 8;
#else
constexpr double kDefaultSeconds = 2;
#endif

// Where writes land: away from what the target writes from.
constexpr std::uint64_t kLanding = 32768;

double stress_seconds() {
    const char* given = std::getenv("FABRIC_KV_STRESS_S");
    return given ? std::strtod(given, nullptr) : kDefaultSeconds;
}

// One life of a pair of engines. Threads submit until one of them closes an engine in the middle of everything.
class Life {
  public:
    explicit Life(std::uint64_t seed) : cluster_(seed), random_(seed) {
        GroupOptions options;
        options.max_transfers = 200;
        options.num_counters = 64;
        options.stall_ns = 50 * kMillisecond;
        options.heartbeat = {20 * kMillisecond, 5, kSecond};
        for (auto* node : {&a_, &b_}) *node = &cluster_.add({.rails = {2, 1}, .options = options});
        if (random_() % 2)
            cluster_.fabric.add_rule(
                {.step = Step::kArrive, .times = Rule::kAlways, .one_in = 200, .action = Action::kFail});
    }

    void run(std::int64_t time_ns) {
        const auto until = now_ns() + time_ns;
        std::vector<std::thread> threads;
        for (unsigned t = 0; t < 15; ++t)
            threads.emplace_back([this, t, until, seed = random_()] {
                std::mt19937_64 random(seed);
                while (now_ns() < until) try {
                        step(t, random);
                    } catch (const Error& error) {
                        const auto kind = error.kind();
                        EXPECT_TRUE(kind == ErrorKind::kWouldBlock || kind == ErrorKind::kClosed ||
                                    kind == ErrorKind::kConfig)
                            << error.what();
                        std::this_thread::yield();
                    }
            });
        threads.emplace_back([this, until] {
            cluster_.wait([&] { return now_ns() > until - 20 * kMillisecond; }, std::chrono::minutes(10));
            a_->engine->close(kMillisecond);
        });
        for (auto& thread : threads) thread.join();
        a_->engine->close(0);
        b_->engine->close(0);
        a_->take();
        b_->take();
        EXPECT_EQ(a_->transfers.size() + b_->transfers.size(), accepted_.load()) << cluster_.where();
    }
    std::uint64_t accepted() const { return accepted_; }

  private:
    void step(unsigned thread, std::mt19937_64& random) {
        auto& from = random() % 4 ? *a_ : *b_;
        auto& to = &from == a_ ? *b_ : *a_;
        auto& engine = *from.engine;
        const auto group = static_cast<std::uint32_t>(random() % 2);
        switch (thread % 8) {
            case 0: {  // its own memory, registered, written from, cancelled, deregistered
                std::vector<std::byte> memory(4096);
                const auto region = engine.register_region(memory.data(), memory.size(), group);
                auto piece = from.piece(to, 0, kLanding + random() % 1000, 1 + random() % 4096);
                piece.src = region;
                std::shared_ptr<Transfer> transfer;
                try {
                    transfer = engine.submit_pages(Transfer::Kind::kWrite, {{from.peer(to), {piece}, {}}}, 0)[0];
                    ++accepted_;
                    engine.cancel(*transfer);
                } catch (const Error&) {  // closed, or full
                }
                // The memory must outlive the region's use.
                for (;;) try {
                        engine.deregister(region);
                        break;
                    } catch (const Error&) {
                        std::this_thread::yield();
                        if (engine_closed(engine)) engine.close(0);
                    }
                break;
            }
            case 1:
                engine.add_peer(to.engine->address(), random() % 2);
                if (random() % 8 == 0) engine.remove_peer(from.peer(to));
                break;
            case 2:
                from.send(to, random() % 20'000);
                ++accepted_;
                break;
            case 3: {  // a counter's life
                const auto token = to.engine->allocate_counter(group, 64);
                if (random() % 2) to.engine->arm_counter(group, token, 1 + random() % 4);
                try {
                    engine.submit_signals({{from.peer(to), to.remotes[group], token, 1 + random() % 4, 0}}, 0);
                    ++accepted_;
                } catch (const Error&) {  // closed, or full
                }
                to.engine->group(group).counters().received(token);
                to.engine->group(group).counters().release(token, true);
                break;
            }
            case 4: {  // figures
                for (auto& rail : engine.group(group).rails()) rail->stats.ops.get();
                engine.describe_region(*from.regions[group]);
                engine.group(group).counters().num_in_use();
                std::this_thread::yield();
                break;
            }
            default: {
                const auto transfer = from.write_pages(to, random() % 100, kLanding + random() % 100, 1 + random() % 60,
                                                       100, {}, random() % 2 ? now_ns() + kMillisecond : 0);
                ++accepted_;
                if (random() % 2) engine.cancel(*transfer);
            }
        }
    }
    static bool engine_closed(Engine& engine) {
        try {
            engine.add_peer({}, false);
        } catch (const Error& error) {
            return error.kind() == ErrorKind::kClosed;
        }
        return false;
    }

    Cluster cluster_;
    std::mt19937_64 random_;
    Node *a_ = nullptr, *b_ = nullptr;
    std::atomic<std::uint64_t> accepted_{0};
};

TEST(EngineStress, threads_that_mix_everything) {
    const auto seed = std::random_device{}();
    SCOPED_TRACE("seed " + std::to_string(seed));
    const auto end = now_ns() + static_cast<std::int64_t>(stress_seconds() * 1e9);
    std::uint64_t accepted = 0, lives = 0;
    for (; now_ns() < end && !HasFailure(); ++lives) {
        Life life(seed + lives);
        life.run(300 * kMillisecond);
        accepted += life.accepted();
    }
    RecordProperty("lives", static_cast<int>(lives));
    std::cout << lives << " lives, " << accepted << " transfers\n";
}

}  // namespace
}  // namespace fkv::test
