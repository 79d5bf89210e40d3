// A write and its counter, there and back, between two processes: through the whole engine, without Python.
//
//   latency PROVIDER spin|adaptive BYTES ROUNDS GAP_US SENDER_CPU RECEIVER_CPU
//
// The floor's ping-pong (benchmarks/floor) with an engine in each process: its progress thread moves the data, and the
// thread that waits for the counter is another one, asleep until the engine has an event for it. Before each round trip
// there is a gap in which nobody has anything to do. Prints one line of JSON: half of the round trip. No wait is
// without a bound.
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "engine/engine.h"
#include "engine/open.h"
#include "ofi/discover.h"
#include "ofi/ofi_nic.h"

namespace {

using namespace fkv;

constexpr int kPatienceMs = 20'000;
constexpr std::size_t kMaxName = 256;

[[noreturn]] void die(const std::string& what) {
    std::fprintf(stderr, "latency: %s\n", what.c_str());
    std::_Exit(1);  // the other process notices that its socket has closed
}

// What one process tells the other, over a socket pair.
struct Told {
    Epoch epoch;
    char name[kMaxName];
    std::size_t name_bytes;
    std::uint64_t base, rkey, nbytes;
};

template <typename T>
void put(int socket, const T* values, std::size_t count = 1) {
    const auto* at = reinterpret_cast<const char*>(values);
    for (std::size_t left = count * sizeof(T); left > 0;) {
        const auto n = ::send(socket, at, left, MSG_NOSIGNAL);
        if (n <= 0) die("the other process is gone");
        at += n;
        left -= static_cast<std::size_t>(n);
    }
}

template <typename T>
void get(int socket, T* values, std::size_t count = 1) {
    pollfd readable{socket, POLLIN, 0};
    if (::poll(&readable, 1, kPatienceMs) != 1) die("the other process says nothing");
    if (::recv(socket, values, count * sizeof(T), MSG_WAITALL) != static_cast<ssize_t>(count * sizeof(T)))
        die("the other process is gone");
}

class Side {
  public:
    Side(const std::string& provider, bool spin, std::size_t nbytes, int cpu, int socket)
        : socket_(socket), memory_(nbytes) {
        GroupOptions options;
        options.spin = spin;
        options.cpus = {cpu};
        std::vector<std::string> names;
        if (provider != "shm") names.push_back("127.0.0.1");  // the loopback
        std::vector<std::vector<std::unique_ptr<Nic>>> nics(1);
        for (auto& info : ofi::find_nics({provider, names})) nics[0].push_back(ofi::open_nic(std::move(info), !spin));
        engine_ = std::make_unique<Engine>(std::move(nics), std::vector{options});
        region_ = engine_->register_region(memory_.data(), memory_.size(), 0);

        const auto ours = engine_->describe_region(*region_);
        const auto& name = engine_->address().groups[0][0];
        Told told{ours.epoch, {}, name.size(), ours.rails[0][0].base, ours.rails[0][0].rkey, ours.nbytes};
        if (name.size() > kMaxName) die("the NIC's address is too long");
        std::memcpy(told.name, name.data(), name.size());
        put(socket_, &told);
        get(socket_, &told);
        const auto* begin = reinterpret_cast<const std::byte*>(told.name);
        EngineAddress theirs;
        theirs.epoch = told.epoch;
        theirs.groups = {{{begin, begin + told.name_bytes}}};
        peer_ = engine_->add_peer(theirs, false);
        remote_ = std::make_shared<RemoteRegion>(
            RemoteRegion{told.epoch, 0, told.nbytes, Segments({told.nbytes}), {{{told.base, told.rkey}}}});
    }

    // Half of each round trip, of which the first tenth is left out.
    std::vector<std::int64_t> ping_pong(bool first, std::size_t rounds, std::chrono::microseconds gap) {
        const auto count = rounds + rounds / 10;
        std::vector<CounterToken> ours, theirs(count);
        for (std::size_t i = 0; i < count; ++i) {
            ours.push_back(engine_->allocate_counter(0, memory_.size()));
            engine_->arm_counter(0, ours.back(), 1);
        }
        put(socket_, ours.data(), count);
        get(socket_, theirs.data(), count);
        std::vector<std::int64_t> times;
        for (std::size_t i = 0; i < count; ++i) {
            if (!first) await_counter();
            if (first && gap.count() > 0) std::this_thread::sleep_for(gap);
            const auto begin = now_ns();
            write(theirs[i]);
            if (first) await_counter();
            if (i >= rounds / 10) times.push_back((now_ns() - begin) / 2);
        }
        await([this] { return num_ended_ == num_written_; });
        return times;
    }
    void close() { engine_->close(kSecond); }

  private:
    void write(const CounterToken& token) {
        PagePiece piece;
        piece.src = region_;
        piece.dst = remote_;
        piece.src_offset = piece.src_stride = piece.dst_offset = piece.dst_stride = 0;
        piece.nbytes = memory_.size();
        piece.src_pages = piece.dst_pages = first_page_;
        std::vector<Engine::Submission> one;
        one.push_back({peer_, {piece}, token});
        engine_->submit_pages(Transfer::Kind::kWrite, std::move(one), 0);
        ++num_written_;
    }
    void await_counter() {
        ++num_awaited_;
        await([this] { return num_fired_ >= num_awaited_; });
    }
    template <typename Done>
    void await(Done&& done) {
        const auto until = now_ns() + kPatienceMs * kMillisecond;
        while (!done()) {
            for (const auto& event : engine_->events().take(1000)) {
                num_fired_ += event.kind == Event::kCounter;
                num_ended_ += event.kind == Event::kTransfer;
                if (event.kind == Event::kTransfer && event.outcome != Outcome::kOk) die("a write failed");
            }
            if (now_ns() > until) die("the ping-pong hangs");
        }
    }

    const int socket_;
    std::vector<std::byte> memory_;
    std::unique_ptr<Engine> engine_;
    std::shared_ptr<Region> region_;
    std::shared_ptr<Peer> peer_;
    std::shared_ptr<RemoteRegion> remote_;
    const Pages first_page_ = make_pages({0});
    std::size_t num_written_ = 0, num_ended_ = 0, num_awaited_ = 0, num_fired_ = 0;
};

double quantile_us(std::vector<std::int64_t>& times, double q) {
    const auto index = static_cast<std::size_t>(q * static_cast<double>(times.size() - 1) + 0.5);
    std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(index), times.end());
    return static_cast<double>(times[index]) / 1e3;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 8) die("usage: latency PROVIDER spin|adaptive BYTES ROUNDS GAP_US SENDER_CPU RECEIVER_CPU");
    const std::string provider = argv[1];
    const bool spin = argv[2] == std::string("spin");
    const auto nbytes = std::strtoull(argv[3], nullptr, 10), rounds = std::strtoull(argv[4], nullptr, 10);
    const std::chrono::microseconds gap(std::atoi(argv[5]));
    if (nbytes == 0 || rounds == 0 || rounds > 50'000) die("BYTES and ROUNDS must be positive, ROUNDS up to 50000");
    if (gap.count() < 0 || gap.count() > 1'000'000) die("GAP_US must lie in [0, 1000000]");
    int sockets[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets)) die("socketpair failed");
    // Before libfabric is touched: neither its threads nor its memory survive a fork.
    const auto child = fork();
    const bool first = child != 0;
    if (!first) prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::close(sockets[first ? 1 : 0]);
    const int cpu = std::atoi(argv[first ? 6 : 7]);
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    if (sched_setaffinity(0, sizeof set, &set)) die("cannot run on cpu " + std::to_string(cpu));
    try {
        Side side(provider, spin, nbytes, cpu, sockets[first ? 0 : 1]);
        auto times = side.ping_pong(first, rounds, gap);
        // Neither closes while the other may still answer.
        const char over = 'o';
        put(sockets[first ? 0 : 1], &over);
        char heard;
        get(sockets[first ? 0 : 1], &heard);
        if (first)
            std::printf(R"({"what": "latency", "provider": "%s", "progress": "%s", "p50_us": %.2f, "p99_us": %.2f})"
                        "\n",
                        provider.c_str(), argv[2], quantile_us(times, 0.5), quantile_us(times, 0.99));
        side.close();
    } catch (const std::exception& error) {
        die(error.what());
    }
    int status = 0;
    if (first) {
        std::fflush(stdout);
        waitpid(child, &status, 0);
    }
    return status;
}
