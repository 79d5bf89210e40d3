// What the engine itself costs: the C++ core over a NIC that completes everything at once and moves nothing.
//
//     engine_cost post PAGES [RAILS PEERS TRANSFERS]
//                                   posts and completes scattered pages of 4 KiB, one thread; for callgrind
//     engine_cost imm COUNT         counts COUNT immediates; for callgrind
//     engine_cost register COUNT    registers COUNT regions; for callgrind
//     engine_cost times             the same and more by the clock, one JSON line each
//
// Under callgrind the difference between two sizes is the cost per page, and it repeats exactly.
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <string>
#include <thread>

#include "engine/engine.h"

namespace {

using namespace fkv;

class NullMemory final : public MemoryHandle {
  public:
    bool close() override { return true; }
    std::uint64_t remote_base() const override { return 0; }
    std::uint64_t rkey() const override { return 1; }
    void* local_desc() const override { return nullptr; }
};

// As wide as libfabric's tcp: four places per operation, 256 operations in flight.
class NullNic final : public Nic {
  public:
    explicit NullNic(std::size_t places) {
        info_.provider = "null";
        info_.max_msg_bytes = ~std::uint64_t{0};
        info_.tx_depth = 256;
        info_.rx_depth = 64;
        info_.cq_data_bytes = 8;
        info_.iov_limit = info_.rma_iov_limit = places;
    }
    void close_endpoint() override {}
    const NicInfo& info() const override { return info_; }
    std::vector<std::byte> address() const override { return std::vector<std::byte>(16); }
    std::unique_ptr<MemoryHandle> register_memory(void*, std::uint64_t) override {
        return std::make_unique<NullMemory>();
    }
    PeerAddress insert_peer(std::span<const std::byte>) override { return 0; }
    void remove_peer(PeerAddress) override {}
    PostResult post_write(const WriteOp& op) override {
        if (first_post_ns.load(std::memory_order_relaxed) == 0) first_post_ns.store(now_ns());
        return post(op.context);
    }
    PostResult post_read(const ReadOp& op) override { return post(op.context); }
    PostResult post_send(const MessageOp& op) override { return post(op.context); }
    PostResult post_recv(const MessageOp&) override { return PostResult::kOk; }
    OpError last_post_error() const override { return {}; }
    int poll(std::span<Completion> out) override {
        const auto count = std::min(out.size(), num_done_);
        for (std::size_t i = 0; i < count; ++i) out[i] = {done_[--num_done_], Completion::kSent, false, 0, 0};
        return static_cast<int>(count);
    }
    bool read_error(FailedCompletion&) override { return false; }
    int wait_fd() const override { return -1; }
    bool may_sleep() override { return num_done_ == 0; }

    std::atomic<std::int64_t> first_post_ns{0};

  private:
    PostResult post(OpContext* context) {
        if (num_done_ == done_.size()) return PostResult::kAgain;
        done_[num_done_++] = context;
        return PostResult::kOk;
    }

    NicInfo info_{};
    std::array<OpContext*, 256> done_{};
    std::size_t num_done_ = 0;
};

constexpr std::uint64_t kPageBytes = 4096;

// The parts that a group's thread drives, driven here: no thread, no waiting.
class Core {
  public:
    explicit Core(std::size_t num_rails, std::size_t num_peers = 1, std::size_t places = 4) {
        for (std::size_t i = 0; i < num_rails; ++i)
            rails_.push_back(std::make_unique<Rail>(std::make_unique<NullNic>(places), 8));
        sender_ = std::make_unique<Sender>(0, Epoch{}, rails_, std::size_t{1} << 20, events_);
        src_ = std::make_shared<Region>();
        src_->nbytes = std::uint64_t{1} << 40;
        src_->segments = Segments::of(src_->nbytes, src_->nbytes);
        dst_ = std::make_shared<RemoteRegion>(RemoteRegion{{}, 0, src_->nbytes, src_->segments, {}});
        for (std::size_t i = 0; i < num_rails; ++i) {
            src_->rails.emplace_back().push_back(rails_[i]->nic().register_memory(nullptr, 0));
            dst_->rails.push_back({{0, 1}});
        }
        for (std::size_t i = 0; i < num_peers; ++i) {
            auto peer = std::make_shared<Peer>();
            peer->groups = {std::vector<std::vector<std::byte>>(num_rails, std::vector<std::byte>(16))};
            peer->sides.push_back(std::make_unique<Peer::Side>());
            peer->sides.back()->links.resize(1);
            peers_.push_back(std::move(peer));
        }
    }

    void add(const Pages& pages) {
        auto transfer = std::make_shared<Transfer>();
        transfer->peer = peers_[next_++ % peers_.size()];
        PagePiece piece;
        piece.src = src_;
        piece.dst = dst_;
        piece.src_offset = piece.dst_offset = 0;
        piece.src_stride = piece.dst_stride = 2 * kPageBytes;  // no two pages are neighbours
        piece.nbytes = kPageBytes;
        piece.src_pages = piece.dst_pages = pages;
        transfer->pieces.push_back(std::move(piece));
        transfer->token = {1, 1, kPageBytes};
        src_->begin_use();
        sender_->reserve(1);
        sender_->add(std::move(transfer));
    }
    void run() {
        while (!sender_->empty()) {
            sender_->post(1);
            complete();
        }
        events_.take(0);
    }

  private:
    void complete() {
        std::array<Completion, 64> done;
        for (auto& rail : rails_)
            for (int n; (n = rail->nic().poll(done)) > 0;)
                for (int i = 0; i < n; ++i) sender_->on_sent(*rail, reinterpret_cast<Op*>(done[i].context), 2);
    }

    EventQueue events_;
    std::vector<std::unique_ptr<Rail>> rails_;
    std::unique_ptr<Sender> sender_;
    std::shared_ptr<Region> src_;
    std::shared_ptr<RemoteRegion> dst_;
    std::vector<std::shared_ptr<Peer>> peers_;
    std::size_t next_ = 0;
};

Pages random_pages(std::size_t count) {
    std::vector<std::int64_t> pages(count);
    std::mt19937 random(1);
    for (auto& page : pages) page = random() % (1 << 20);
    return make_pages(std::move(pages));
}

void count_immediates(std::uint64_t count) {
    EventQueue events;
    Heartbeat heartbeat({kSecond, 5, kSecond});
    Receiver receiver(0, 1024, 1 << 20, heartbeat, events);
    Rail rail(std::make_unique<NullNic>(1), 1);
    std::vector<std::uint32_t> words;
    for (int i = 0; i < 64; ++i) {
        const auto token = receiver.counters().allocate(kPageBytes);
        receiver.counters().arm(token, ~std::uint64_t{0} >> 8);
        words.push_back(pack({token.slot, token.generation, 1}));
    }
    for (std::uint64_t i = 0; i < count; ++i) receiver.on_imm(rail, words[i % words.size()], nullptr);
}

void register_regions(std::uint64_t count) {
    std::vector<std::vector<std::unique_ptr<Nic>>> nics(1);
    nics[0].push_back(std::make_unique<NullNic>(4));
    Engine engine(std::move(nics), std::vector<GroupOptions>(1));
    std::vector<std::byte> memory(64 * count);
    std::vector<std::shared_ptr<Region>> regions;
    for (std::uint64_t i = 0; i < count; ++i) regions.push_back(engine.register_region(&memory[64 * i], 64, 0));
}

double seconds_of(const std::function<void()>& fn) {
    std::vector<double> times;
    for (int round = 0; round < 5; ++round) {
        const auto begin = std::chrono::steady_clock::now();
        fn();
        times.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

void print(const std::string& what, double value) {
    std::printf("{\"what\": \"%s\", \"value\": %.2f}\n", what.c_str(), value);
    std::fflush(stdout);
}

// Two threads that spin often share a core for milliseconds unless they are told where to run.
constexpr int kOthersCpu = 0, kEngineCpu = 1;

void run_on(std::initializer_list<int> cpus) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int cpu : cpus) CPU_SET(cpu, &set);
    if (sched_setaffinity(0, sizeof set, &set)) {
        std::perror("engine_cost: it needs two cpus: sched_setaffinity");
        std::exit(1);
    }
}

// A group whose own thread spins, over a NIC that says when it was first posted to.
class Triggered {
  public:
    Triggered() {
        auto owned = std::make_unique<NullNic>(4);
        nic_ = owned.get();
        std::vector<std::vector<std::unique_ptr<Nic>>> nics(1);
        nics[0].push_back(std::move(owned));
        GroupOptions options;
        options.spin = true;
        options.cpus = {kEngineCpu};
        engine_ = std::make_unique<Engine>(std::move(nics), std::vector{options});
        peer_ = engine_->add_peer(engine_->address(), false);
        region_ = engine_->register_region(memory_, sizeof memory_, 0);
        remote_ = std::make_shared<RemoteRegion>(engine_->describe_region(*region_));
    }

    // Nanoseconds from the watch's word to the first post.
    std::int64_t fire() {
        PagePiece piece;
        piece.src = region_;
        piece.dst = remote_;
        piece.src_offset = piece.src_stride = piece.dst_offset = piece.dst_stride = 0;
        piece.nbytes = sizeof memory_;
        piece.src_pages = piece.dst_pages = make_pages({0});
        piece.layer = 1;
        std::vector<Engine::Submission> one;
        one.push_back({peer_, {piece}, {}, watch_, ++step_});
        engine_->submit_pages(Transfer::Kind::kWrite, std::move(one), 0);
        const auto armed = now_ns() + 100 * kMicrosecond;
        while (now_ns() < armed) {
        }
        nic_->first_post_ns.store(0);
        const auto begin = now_ns();
        watch_->set(step_, 1);
        while (nic_->first_post_ns.load() == 0) {
        }
        engine_->events().take(100);
        return nic_->first_post_ns.load() - begin;
    }

  private:
    NullNic* nic_;  // the engine's
    std::byte memory_[64];
    std::uint64_t word_ = 0, step_ = 0;
    std::shared_ptr<Watch> watch_ = std::make_shared<Watch>(&word_);
    std::shared_ptr<Peer> peer_;
    std::shared_ptr<Region> region_;
    std::shared_ptr<RemoteRegion> remote_;
    std::unique_ptr<Engine> engine_;  // last: it ends first
};

// Beside a hog, a thread that computes all the time and never lets go: that is what a holder of the GIL is to the
// engine, which has no use for the GIL. It shares a core with whoever bumps the word.
void print_trigger_latency(bool beside_hog) {
    run_on({kOthersCpu, kEngineCpu});
    Triggered triggered;
    run_on({kOthersCpu});
    std::atomic<bool> over{false};
    std::thread hog;
    if (beside_hog)
        hog = std::thread([&over] {
            while (!over.load(std::memory_order_relaxed)) {
            }
        });
    std::vector<double> us;
    for (int round = 0; round < 2000; ++round) us.push_back(static_cast<double>(triggered.fire()) / 1000);
    over.store(true);
    if (hog.joinable()) hog.join();
    std::sort(us.begin(), us.end());
    const std::string what = std::string("trigger to first post") + (beside_hog ? ", beside a hog" : "");
    print(what + ", us, p50", us[us.size() / 2]);
    print(what + ", us, p99.9", us[us.size() - us.size() / 1000 - 1]);
}

void print_times() {
    constexpr std::size_t kCount = 1 << 20;
    for (const std::size_t places : {1, 4})
        print("ns a page, " + std::to_string(places) + " places an operation",
              1e9 / kCount * seconds_of([places, pages = random_pages(kCount)] {
                  Core core(1, 1, places);
                  core.add(pages);
                  core.run();
              }));
    for (const std::size_t transfers : {1, 100, 10'000})
        print("ns a page, " + std::to_string(transfers) + " transfers in flight",
              1e9 / kCount * seconds_of([transfers, pages = random_pages(kCount / transfers)] {
                  Core core(1);
                  for (std::size_t i = 0; i < transfers; ++i) core.add(pages);
                  core.run();
              }));
    for (const std::size_t rails : {1, 2, 4})
        print("ns a page, " + std::to_string(rails) + " rails",
              1e9 / kCount * seconds_of([rails, pages = random_pages(kCount)] {
                  Core core(rails);
                  core.add(pages);
                  core.run();
              }));
    for (const std::size_t peers : {1, 8, 64})
        print("ns a page, " + std::to_string(peers) + " peers",
              1e9 / kCount * seconds_of([peers, pages = random_pages(kCount / 64)] {
                  Core core(1, peers);
                  for (int i = 0; i < 64; ++i) core.add(pages);
                  core.run();
              }));
    print("ns an immediate", 1e9 / kCount * seconds_of([] { count_immediates(kCount); }));
    print_trigger_latency(false);
    print_trigger_latency(true);
}

}  // namespace

int main(int argc, char** argv) {
    const std::string mode = argc > 1 ? argv[1] : "";
    const auto number = [&](int at, std::uint64_t otherwise) {
        return argc > at ? std::strtoull(argv[at], nullptr, 10) : otherwise;
    };
    const auto count = number(2, 0), rails = number(3, 1), peers = number(4, 1), transfers = number(5, 1);
    if (mode == "times") {
        print_times();
    } else if (mode == "post" && transfers > 0 && count >= transfers && rails > 0 && peers > 0) {
        Core core(rails, peers);
        const auto pages = random_pages(count / transfers);
        for (std::uint64_t i = 0; i < transfers; ++i) core.add(pages);
        core.run();
    } else if (mode == "imm" && count > 0) {
        count_immediates(count);
    } else if (mode == "register" && count > 0) {
        register_regions(count);
    } else {
        std::fprintf(stderr,
                     "usage: engine_cost post PAGES [RAILS PEERS TRANSFERS] | imm COUNT | register COUNT | times\n");
        return 2;
    }
}
