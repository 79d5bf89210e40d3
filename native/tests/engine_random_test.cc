// Seeded random traffic between whole engines: every byte, unit, end and message is accounted for.
//
// Whatever a lane's writes cover is compared, canaries included, at the instant at which its counter's event is taken.
#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <random>

#include "engine_cluster.h"

namespace fkv::test {
namespace {

using fake::FakeProfile;

constexpr std::uint64_t kLaneBytes = 6144;
constexpr std::size_t kLanesPerPair = 3;

struct Case {
    const char* name;
    std::vector<std::vector<std::size_t>> rails;  // [engine][group]
    FakeProfile profile = FakeProfile::strict();
    std::uint64_t max_registration_bytes = ~std::uint64_t{0};
    unsigned jobs = 240;
};

FakeProfile narrow(FakeProfile profile) {
    profile.max_msg_bytes = 256;
    profile.tx_depth = profile.rx_depth = 4;
    profile.eagain_percent = 40;
    profile.eagain_polls = 12;
    profile.max_delay = 3;
    return profile;
}
// With a descriptor to sleep on, so that a target which has to move the data itself wakes up for it.
FakeProfile ringing(FakeProfile profile) {
    profile.wait_fd = true;
    profile.max_delay = 2;
    return profile;
}
FakeProfile taking_receives() {
    auto profile = FakeProfile::strict();
    profile.imm_uses_recv = true;
    return profile;
}

// One way from an engine's source memory to another's; carries one job at a time.
struct Lane {
    Node* from;
    Node* to;
    std::uint64_t src_offset, dst_offset;
    std::uint32_t src_group = 0, dst_group = 0;
    CounterToken token{};
    std::set<std::uint64_t> open;  // transfers that have not ended
    std::vector<std::byte> expected;
    bool busy = false, fired = false;
};

class Traffic {
  public:
    Traffic(Cluster& cluster, const Case& c, std::uint64_t seed) : cluster_(cluster), random_(seed) {
        const auto others = c.rails.size() - 1;
        const auto half = others * kLanesPerPair * kLaneBytes;  // of each memory: what it sends, what it gets
        NodeShape shape{.profile = c.profile, .memory_bytes = 2 * half};
        shape.profile.iov_limit = 1 + below(4);
        shape.profile.rma_iov_limit = 1 + below(4);
        shape.options.max_registration_bytes = c.max_registration_bytes;
        // Where the target's thread moves the data, each of its naps would hold up every operation.
        shape.options.spin = !c.profile.offloaded;
        for (const auto& rails : c.rails) {
            shape.rails = rails;
            auto& node = cluster.add(shape);
            node.on_counter = [this, &node](const Event& event) { on_counter(node, event); };
            node.on_transfer = [this, &node](const Event& event) { on_transfer(node, event); };
        }
        std::map<Node*, std::uint64_t> out, in;
        for (auto& from : cluster.nodes)
            for (auto& to : cluster.nodes)
                for (std::size_t i = 0; &from != &to && i < kLanesPerPair; ++i)
                    lanes_.push_back({&from, &to, out[&from]++ * kLaneBytes, half + in[&to]++ * kLaneBytes});
    }

    void run(unsigned jobs) {
        for (unsigned started = 0; started < jobs;) {
            for (auto& lane : lanes_)
                if (!lane.busy && started < jobs && below(3)) {
                    start(lane);
                    ++started;
                }
            const auto idle = [&] {
                return std::any_of(lanes_.begin(), lanes_.end(), [](const Lane& lane) { return !lane.busy; });
            };
            ASSERT_TRUE(cluster_.wait(idle)) << cluster_.where();
        }
        const auto calm = [&] {
            if (std::any_of(lanes_.begin(), lanes_.end(), [](const Lane& lane) { return lane.busy; })) return false;
            std::size_t users = 0;
            for (const auto& node : cluster_.nodes) users += node.users.size();
            return users >= num_users && std::all_of(sent_.begin(), sent_.end(), [](const auto& entry) {
                       return entry.first.second->num_received(*entry.first.first) == entry.second;
                   });
        };
        ASSERT_TRUE(cluster_.wait(calm)) << cluster_.where();
        // Whatever might still come, would come now.
        cluster_.steps(300);
    }

    std::uint64_t num_users = 0;

  private:
    std::uint64_t below(std::uint64_t bound) { return random_() % bound; }

    void start(Lane& lane) {
        lane.src_group = static_cast<std::uint32_t>(below(lane.from->regions.size()));
        lane.dst_group = static_cast<std::uint32_t>(below(lane.to->regions.size()));
        auto source = std::span(lane.from->memory).subspan(lane.src_offset, kLaneBytes);
        for (auto& byte : source) byte = static_cast<std::byte>(random_());
        std::fill_n(lane.to->memory.begin() + static_cast<std::ptrdiff_t>(lane.dst_offset), kLaneBytes, kCanary);
        lane.expected.assign(kLaneBytes, kCanary);
        constexpr std::uint64_t kUnits[] = {1, 7, 64, 100, 256};
        lane.token = lane.to->counter(kUnits[below(std::size(kUnits))], {}, lane.dst_group);
        lane.busy = true;
        lane.fired = false;

        const auto peer = lane.from->peer(*lane.to);
        std::uint64_t units = 0;
        std::vector<Engine::Submission> submissions(1 + below(2));
        for (auto& submission : submissions) submission = {peer, {}, lane.token};
        const auto sections = 1 + below(3);
        for (std::uint64_t i = 0; i < sections; ++i)
            submissions[below(submissions.size())].pieces.push_back(
                random_piece(lane, i * (kLaneBytes / sections), kLaneBytes / sections, units));
        const std::uint64_t signal_units = below(3) ? 0 : 1 + below(3000);
        units += signal_units;

        const bool arm_late = below(2);
        if (!arm_late) lane.to->engine->arm_counter(lane.dst_group, lane.token, units);
        for (const auto& transfer : lane.from->engine->submit_pages(Transfer::Kind::kWrite, std::move(submissions), 0))
            lane.open.insert(transfer->id);
        if (signal_units)
            lane.open.insert(
                lane.from->engine
                    ->submit_signals({{peer, lane.to->remotes[lane.dst_group], lane.token, signal_units, 0}},
                                     lane.src_group)[0]
                    ->id);
        if (below(4) == 0) {
            lane.open.insert(
                lane.from->engine
                    ->submit_signals(
                        {{peer, lane.to->remotes[lane.dst_group], {}, 0, static_cast<std::uint32_t>(num_users)}}, 0)[0]
                    ->id);
            ++num_users;
        }
        if (below(3) == 0) {
            lane.open.insert(lane.from->send(*lane.to, below(3000)));
            ++sent_[{lane.from, lane.to}];
        }
        if (arm_late) lane.to->engine->arm_counter(lane.dst_group, lane.token, units);
    }

    // A random copy within one section of the lane, also made in `expected`.
    PagePiece random_piece(Lane& lane, std::uint64_t begin, std::uint64_t nbytes, std::uint64_t& units) {
        PagePiece piece = lane.from->piece(*lane.to, lane.src_offset + begin, lane.dst_offset + begin, 0);
        piece.src = lane.from->regions[lane.src_group];
        piece.dst = lane.to->remotes[lane.dst_group];
        piece.rows = below(2) ? 1 : 1 + below(4);
        const bool large = below(5) == 0;
        piece.nbytes = 1 + below(large ? nbytes / piece.rows : 300);
        const auto gap = [&] { return below(2) ? 0 : below(20); };
        piece.src_row_stride = std::min(piece.nbytes + gap(), nbytes / piece.rows);
        piece.dst_row_stride = std::min(piece.nbytes + gap(), nbytes / piece.rows);
        piece.src_stride = piece.src_row_stride * piece.rows + gap();
        piece.dst_stride = piece.dst_row_stride * piece.rows + gap();
        const auto fit = [&](std::uint64_t stride, std::uint64_t row) {
            return stride <= nbytes ? nbytes / stride : row * piece.rows <= nbytes;
        };
        const auto pages =
            std::min(fit(piece.src_stride, piece.src_row_stride), fit(piece.dst_stride, piece.dst_row_stride));
        std::vector<std::int64_t> dst_pages(pages);
        std::iota(dst_pages.begin(), dst_pages.end(), 0);
        auto src_pages = dst_pages;
        if (below(2)) std::shuffle(dst_pages.begin(), dst_pages.end(), random_);
        if (below(2)) std::shuffle(src_pages.begin(), src_pages.end(), random_);
        const auto count = below(8) ? 1 + below(pages) : 0;  // nothing at all is fine, too
        src_pages.resize(count);
        dst_pages.resize(count);
        piece.src_pages = make_pages(src_pages);
        piece.dst_pages = make_pages(dst_pages);
        for (std::uint64_t i = 0; i < count; ++i)
            for (std::uint64_t row = 0; row < piece.rows; ++row) {
                const auto src =
                    static_cast<std::uint64_t>(src_pages[i]) * piece.src_stride + row * piece.src_row_stride;
                const auto dst =
                    static_cast<std::uint64_t>(dst_pages[i]) * piece.dst_stride + row * piece.dst_row_stride;
                std::copy_n(&lane.from->memory[piece.src_offset + src], piece.nbytes, &lane.expected[begin + dst]);
            }
        units += count * piece.rows * ((piece.nbytes + lane.token.unit_bytes - 1) / lane.token.unit_bytes);
        return piece;
    }

    void on_counter(Node& node, const Event& event) {
        for (auto& lane : lanes_) {
            if (lane.to != &node || !lane.busy || lane.dst_group != event.group || lane.token.slot != event.slot ||
                lane.token.generation != event.generation)
                continue;
            EXPECT_EQ(event.verdict, CounterVerdict::kFired) << cluster_.where();
            EXPECT_TRUE(std::equal(lane.expected.begin(), lane.expected.end(), &node.memory[lane.dst_offset]))
                << "the counter fired before its data was there: " << cluster_.where();
            EXPECT_TRUE(node.engine->group(event.group).counters().release(lane.token, false));
            lane.fired = true;
            return end_of(lane);
        }
        ADD_FAILURE() << "nobody waits for counter " << event.slot << ", " << cluster_.where();
    }

    void on_transfer(Node& node, const Event& event) {
        for (auto& lane : lanes_) {
            if (lane.from != &node || !lane.open.erase(event.id)) continue;
            EXPECT_EQ(event.outcome, Outcome::kOk) << event.error.text;
            return end_of(lane);
        }
        ADD_FAILURE() << "nobody waits for transfer " << event.id << ", " << cluster_.where();
    }

    static void end_of(Lane& lane) { lane.busy = !lane.fired || !lane.open.empty(); }

    Cluster& cluster_;
    std::mt19937_64 random_;
    std::vector<Lane> lanes_;
    std::map<std::pair<Node*, Node*>, std::size_t> sent_;
};

class EngineTraffic : public ::testing::TestWithParam<Case> {};

TEST_P(EngineTraffic, everything_arrives_once_and_whole) {
    const char* given = std::getenv("FABRIC_KV_SEED");
    const auto first = given ? std::strtoull(given, nullptr, 0) : std::random_device{}();
    for (std::uint64_t seed = first; seed < first + 2; ++seed) {
        SCOPED_TRACE("FABRIC_KV_SEED=" + std::to_string(seed));
        Cluster cluster(seed);
        Traffic traffic(cluster, GetParam(), seed);
        // More threads that spin than cores take their time.
        traffic.run(GetParam().jobs / (nic_threads() && !GetParam().profile.offloaded ? 8 : 2));
        if (HasFatalFailure()) return;
        std::size_t users = 0;
        for (auto& node : cluster.nodes) {
            users += node.users.size();
            EXPECT_TRUE(node.faults.empty() && node.stalls.empty());
            for (std::uint32_t group = 0; group < node.regions.size(); ++group) {
                auto& g = node.engine->group(group);
                EXPECT_EQ(g.counters().num_in_use() + g.counters().num_poisoned(), 0u);
                EXPECT_EQ(g.receiver().stats().violations.get() + g.receiver().stats().stale_imms.get(), 0u);
                EXPECT_EQ(g.sender().in_flight(), 0u);
                for (auto& rail : g.rails()) {
                    EXPECT_GT(rail->stats.ops.get(), 0u) << "a rail of group " << group << " was never used";
                    EXPECT_EQ(rail->stats.errors.get(), 0u);
                    EXPECT_EQ(rail->outstanding_ops, 0u);
                    EXPECT_EQ(rail->outstanding_bytes, 0u);
                }
            }
            EXPECT_NO_THROW(node.engine->deregister(node.regions[0])) << "a region is still in use";
        }
        EXPECT_EQ(users, traffic.num_users);
    }
}

INSTANTIATE_TEST_SUITE_P(
    Over, EngineTraffic,
    ::testing::Values(Case{"one_to_one", {{1}, {1}}}, Case{"one_to_two", {{1}, {2}}}, Case{"two_to_one", {{2}, {1}}},
                      Case{"three_to_two", {{3}, {2}}}, Case{"four_to_one", {{4}, {1}}},
                      Case{"groups", {{1, 2}, {2, 1}}}, Case{"three_engines", {{2}, {1}, {2, 1}}},
                      Case{"ordered", {{2}, {2}}, ringing(FakeProfile::fail_stop()), ~std::uint64_t{0}, 160},
                      Case{"connected", {{2}, {1}}, FakeProfile::connected()},
                      Case{"narrow_connected", {{1}, {2}}, narrow(FakeProfile::connected()), ~std::uint64_t{0}, 60},
                      Case{"connected_segments", {{2}, {2}}, FakeProfile::connected(), 777},
                      Case{"tcp", {{1}, {2}}, ringing(FakeProfile::tcp()), ~std::uint64_t{0}, 80},
                      Case{"receives_for_immediates", {{2}, {1}}, taking_receives()},
                      Case{"segments", {{2}, {2}}, FakeProfile::strict(), 1000},
                      Case{"narrow", {{1}, {2}}, narrow(FakeProfile::strict()), ~std::uint64_t{0}, 60},
                      Case{"narrow_segments", {{2}, {1}}, narrow(FakeProfile::strict()), 777, 40},
                      Case{"narrow_ordered", {{1}, {1}}, ringing(narrow(FakeProfile::fail_stop())), 777, 40}),
    [](const auto& param) { return std::string(param.param.name); });

}  // namespace
}  // namespace fkv::test
