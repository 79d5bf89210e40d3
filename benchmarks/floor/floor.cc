// The floor under a paged write: one bare libfabric loop that does what an engine has to do, and nothing else.
//
// N pages move from places of the sender's arena to places of the receiver's. Every operation carries its own immediate
// with the number of pages that it brings (no software provider is fail-stop, docs/providers.md: an immediate may vouch
// for its own operation only); the receiver adds them up, and the clock stops when all pages are there. An operation
// may have several places on both sides, as many as fi_info grants. Two processes, one thread each, both polling.
//
//   floor PROVIDER [--cpus SENDER,RECEIVER|none] [--source ADDRESS] [--order any|writes] [COMMAND...]
//   pages BYTES COUNT random|contiguous ROUNDS [PLACES WINDOW INJECT]
//   latency BYTES ROUNDS
//
// With --order writes the provider is asked to keep writes in order, which costs shm its short path
// (docs/providers.md). Without a COMMAND they come from stdin, one a line. Without a form, pages tries which is the
// best. Each command answers with one line of JSON. Whatever goes wrong ends both processes with a message; no wait is
// without a bound.
#include <poll.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <vector>

namespace {

constexpr std::size_t kArenaBytes = 128 << 20;  // above the caches of most machines
constexpr std::size_t kMaxWriteBytes = 1 << 20;
constexpr std::uint32_t kMaxWeight = 1023;            // an immediate has 10 bits for it (native/engine/imm.h)
constexpr std::size_t kMaxPlaces = 4;                 // of one operation
constexpr std::int64_t kPatienceNs = 20'000'000'000;  // for one round
constexpr std::size_t kMaxName = 256;

[[noreturn]] void die(const std::string& what) {
    std::fprintf(stderr, "floor: %s\n", what.c_str());
    std::_Exit(1);  // the other process notices that its socket has closed
}

void check(const char* what, long rc) {
    if (rc < 0) die(std::string(what) + ": " + fi_strerror(static_cast<int>(-rc)));
}

// The same clock in both processes.
std::int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

void pin(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    if (sched_setaffinity(0, sizeof set, &set)) die("cannot run on cpu " + std::to_string(cpu));
}

// -- what is agreed outside of the fabric ----------------------------------------------------------------------------

// How operations are made of pages, and how many are under way.
struct Form {
    std::uint32_t places, window;
    bool inject;  // the provider copies the data: fi_endpoint(3), FI_INJECT
};

struct Order {
    enum Kind : std::uint32_t { kPages, kLatency, kEnd } kind = kEnd;
    std::uint64_t page_bytes = 0, num_pages = 0, rounds = 0, seed = 0;
    bool contiguous = false;
    bool checked = true;  // whether the data is stamped before and looked at afterwards
    Form form{};
};

struct Address {
    std::array<char, kMaxName> name{};
    std::size_t name_bytes = 0;
    std::uint64_t base = 0, key = 0;
};

// Between the two processes; set up before they part.
struct Link {
    int socket = -1;
    std::atomic<std::int64_t>* started_ns = nullptr;  // written by the sender before its first post

    template <typename T>
    void put(const T& value) const {
        if (::send(socket, &value, sizeof value, MSG_NOSIGNAL) != sizeof value) die("the other process is gone");
    }
    template <typename T>
    T get(int patience_ms) const {
        pollfd readable{socket, POLLIN, 0};
        if (poll(&readable, 1, patience_ms) != 1) die("the other process says nothing");
        T value;
        if (recv(socket, &value, sizeof value, MSG_WAITALL) != sizeof value) die("the other process is gone");
        return value;
    }
};

// -- the fabric ------------------------------------------------------------------------------------------------------

fi_info* find(const std::string& provider, const char* source, bool in_order) {
    auto* hints = fi_allocinfo();
    hints->caps = FI_MSG | FI_RMA;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->ep_attr->type = FI_EP_RDM;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
    hints->domain_attr->threading = FI_THREAD_DOMAIN;  // there is one thread
    hints->domain_attr->cq_data_size = 4;
    if (in_order) hints->tx_attr->msg_order = hints->rx_attr->msg_order = FI_ORDER_RMA_WAW | FI_ORDER_WAW;
    hints->fabric_attr->prov_name = strdup(provider.c_str());
    fi_info* found = nullptr;
    check("fi_getinfo", fi_getinfo(FI_VERSION(1, 17), source, nullptr, source ? FI_SOURCE : 0, hints, &found));
    fi_freeinfo(hints);
    return found;
}

struct Fabric {
    Fabric(const std::string& provider, const char* source, bool in_order, Link link);
    void close();

    // Takes what has come in; returns how many of our own operations have been retired.
    std::size_t poll(std::uint64_t& arrived);

    fi_info* info = nullptr;
    fid_fabric* fabric = nullptr;
    fid_domain* domain = nullptr;
    fid_cq* cq = nullptr;
    fid_av* av = nullptr;
    fid_ep* ep = nullptr;
    fid_mr* mr = nullptr;
    std::byte* arena = nullptr;
    fi_addr_t peer = FI_ADDR_UNSPEC;
    Address theirs;
    std::size_t max_places = 1;
};

Fabric::Fabric(const std::string& provider, const char* source, bool in_order, Link link) {
    info = find(provider, nullptr, in_order);
    // Providers that go through sockets take the first interface unless told otherwise.
    if (info->addr_format == FI_SOCKADDR_IN || info->addr_format == FI_SOCKADDR_IN6 || info->addr_format == FI_SOCKADDR)
        info = find(provider, source, in_order);
    max_places = std::min({info->tx_attr->iov_limit, info->tx_attr->rma_iov_limit, kMaxPlaces});
    check("fi_fabric", fi_fabric(info->fabric_attr, &fabric, nullptr));
    check("fi_domain", fi_domain(fabric, info, &domain, nullptr));
    fi_cq_attr cq_attr{};
    cq_attr.format = FI_CQ_FORMAT_DATA;
    cq_attr.wait_obj = FI_WAIT_NONE;
    cq_attr.size = info->tx_attr->size + info->rx_attr->size;
    check("fi_cq_open", fi_cq_open(domain, &cq_attr, &cq, nullptr));
    fi_av_attr av_attr{};
    av_attr.type = info->domain_attr->av_type == FI_AV_UNSPEC ? FI_AV_TABLE : info->domain_attr->av_type;
    check("fi_av_open", fi_av_open(domain, &av_attr, &av, nullptr));
    check("fi_endpoint", fi_endpoint(domain, info, &ep, nullptr));
    check("fi_ep_bind", fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV));
    check("fi_ep_bind", fi_ep_bind(ep, &av->fid, 0));
    check("fi_enable", fi_enable(ep));

    void* memory = mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) die("no memory");
    madvise(memory, kArenaBytes, MADV_HUGEPAGE);  // as NumPy does for large arrays
    arena = static_cast<std::byte*>(memory);
    std::memset(arena, 0, kArenaBytes);
    check("fi_mr_reg", fi_mr_reg(domain, arena, kArenaBytes, FI_WRITE | FI_REMOTE_WRITE, 0, 1, 0, &mr, nullptr));
    if (info->domain_attr->mr_mode & FI_MR_ENDPOINT) {
        check("fi_mr_bind", fi_mr_bind(mr, &ep->fid, 0));
        check("fi_mr_enable", fi_mr_enable(mr));
    }
    Address ours;
    ours.name_bytes = kMaxName;
    check("fi_getname", fi_getname(&ep->fid, ours.name.data(), &ours.name_bytes));
    ours.base = info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? reinterpret_cast<std::uint64_t>(arena) : 0;
    ours.key = fi_mr_key(mr);
    link.put(ours);
    theirs = link.get<Address>(10'000);
    if (fi_av_insert(av, theirs.name.data(), 1, &peer, 0, nullptr) != 1) die("fi_av_insert failed");
}

void Fabric::close() {
    for (auto* object : {&ep->fid, &mr->fid, &av->fid, &cq->fid, &domain->fid, &fabric->fid}) fi_close(object);
}

std::size_t Fabric::poll(std::uint64_t& arrived) {
    std::array<fi_cq_data_entry, 64> entries;
    const auto n = fi_cq_read(cq, entries.data(), entries.size());
    if (n == -FI_EAGAIN) return 0;
    if (n < 0) {
        fi_cq_err_entry error{};
        fi_cq_readerr(cq, &error, 0);
        die(std::string("an operation failed: ") + fi_strerror(std::abs(error.err)));
    }
    std::size_t retired = 0;
    for (ssize_t i = 0; i < n; ++i) {
        if (entries[i].flags & FI_REMOTE_CQ_DATA)
            arrived += static_cast<std::uint32_t>(entries[i].data) & kMaxWeight;
        else
            ++retired;
    }
    return retired;
}

// -- operations ------------------------------------------------------------------------------------------------------

struct Op {
    fi_context2 context;  // the provider's until the operation is retired
    std::array<iovec, kMaxPlaces> local;
    std::array<fi_rma_iov, kMaxPlaces> remote;
    std::array<void*, kMaxPlaces> descs;
    std::uint32_t num_places, weight;
};

struct Pages {
    std::vector<std::uint64_t> src, dst;
};

Pages choose_pages(const Order& order) {
    Pages pages;
    std::mt19937_64 random(order.seed);
    for (auto* list : {&pages.src, &pages.dst}) {
        list->resize(order.contiguous ? order.num_pages : kArenaBytes / order.page_bytes);
        std::iota(list->begin(), list->end(), 0);
        if (!order.contiguous) std::shuffle(list->begin(), list->end(), random);
        list->resize(order.num_pages);
    }
    return pages;
}

std::vector<Op> make_ops(const Fabric& fabric, const Order& order) {
    std::vector<Op> ops;
    const auto pages = choose_pages(order);
    const auto bytes = order.page_bytes;
    // Neighbours on both sides become one place with several pages.
    const auto pages_per_place = order.contiguous ? std::min<std::uint64_t>(kMaxWriteBytes / bytes, kMaxWeight) : 1;
    for (std::size_t i = 0; i < order.num_pages;) {
        auto& op = ops.emplace_back();
        op.num_places = op.weight = 0;
        while (op.num_places < (order.contiguous ? 1 : order.form.places) && i < order.num_pages) {
            const auto count = std::min<std::uint64_t>(pages_per_place, order.num_pages - i);
            const auto k = op.num_places++;
            op.local[k] = {fabric.arena + pages.src[i] * bytes, count * bytes};
            op.remote[k] = {fabric.theirs.base + pages.dst[i] * bytes, count * bytes, fabric.theirs.key};
            op.descs[k] = fi_mr_desc(fabric.mr);
            op.weight += count;
            i += count;
        }
    }
    return ops;
}

ssize_t post(const Fabric& fabric, Op& op, bool inject) {
    const fi_msg_rma message{op.local.data(),  op.descs.data(), op.num_places, fabric.peer,
                             op.remote.data(), op.num_places,   &op.context,   op.weight};
    return fi_writemsg(fabric.ep, &message, FI_REMOTE_CQ_DATA | FI_COMPLETION | (inject ? FI_INJECT : 0));
}

std::uint64_t word_of(std::uint64_t seed, std::uint64_t page, std::uint64_t word) {
    return (seed << 48) + (page << 20) + word + 1;
}

// -- the two sides ---------------------------------------------------------------------------------------------------

void send_pages(Fabric& fabric, Link link, const Order& order) {
    const auto words = order.page_bytes / 8;
    auto* arena = reinterpret_cast<std::uint64_t*>(fabric.arena);
    for (const auto page : order.checked ? choose_pages(order).src : std::vector<std::uint64_t>())
        for (std::uint64_t w = 0; w < words; ++w) arena[page * words + w] = word_of(order.seed, page, w);
    auto ops = make_ops(fabric, order);
    std::uint64_t arrived = 0;
    for (std::uint64_t round = 0; round <= order.rounds; ++round) {
        link.get<char>(60'000);
        const auto start = now_ns();
        link.started_ns->store(start);
        for (std::size_t posted = 0, retired = 0; retired < ops.size();) {
            while (posted < ops.size() && posted - retired < order.form.window) {
                const auto rc = post(fabric, ops[posted], order.form.inject);
                if (rc == -FI_EAGAIN) break;
                check("fi_writemsg", rc);
                ++posted;
            }
            const auto n = fabric.poll(arrived);
            retired += n;
            if (n > 0) continue;
            if (now_ns() - start > kPatienceNs) die("operations do not complete");
        }
        link.put('r');
    }
}

// Round times in nanoseconds; the first round is left out.
std::vector<std::int64_t> receive_pages(Fabric& fabric, Link link, const Order& order) {
    std::vector<std::int64_t> times;
    if (order.checked) std::memset(fabric.arena, 0, kArenaBytes);
    for (std::uint64_t round = 0; round <= order.rounds; ++round) {
        std::uint64_t arrived = 0;
        link.put('g');
        for (const auto start = now_ns(); arrived < order.num_pages;) {
            const auto before = arrived;
            fabric.poll(arrived);
            if (arrived != before) continue;
            if (now_ns() - start > kPatienceNs) die("pages do not arrive");
        }
        const auto end = now_ns();
        if (arrived != order.num_pages) die("more pages were counted than sent");
        if (round > 0) times.push_back(end - link.started_ns->load());
        link.get<char>(20'000);  // all its operations are retired
    }
    if (!order.checked) return times;
    const auto pages = choose_pages(order);
    const auto words = order.page_bytes / 8;
    const auto* arena = reinterpret_cast<const std::uint64_t*>(fabric.arena);
    for (std::size_t i = 0; i < pages.dst.size(); ++i)
        for (std::uint64_t w = 0; w < words; ++w)
            if (arena[pages.dst[i] * words + w] != word_of(order.seed, pages.src[i], w)) die("wrong data arrived");
    return times;
}

// A write and its immediate, there and back; half of each round trip.
std::vector<std::int64_t> ping_pong(Fabric& fabric, const Order& order, bool first) {
    auto one = order;
    one.num_pages = 1;
    one.form = {1, 1, false};
    auto op = std::move(make_ops(fabric, one)[0]);
    std::vector<std::int64_t> times;
    const auto warm_up = order.rounds / 10;
    std::uint64_t arrived = 0, in_flight = 0;
    for (std::uint64_t round = 0; round < order.rounds + warm_up; ++round) {
        const auto start = now_ns();
        const auto wait_until = [&](auto&& done) {
            while (!done()) {
                in_flight -= fabric.poll(arrived);
                if (now_ns() - start > kPatienceNs) die("the ping-pong hangs");
            }
        };
        const auto await_imm = [&] { wait_until([&] { return arrived > round; }); };
        if (!first) await_imm();
        wait_until([&] { return in_flight == 0; });  // its context is free again
        wait_until([&] {
            const auto rc = post(fabric, op, false);
            if (rc != -FI_EAGAIN) check("fi_writemsg", rc);
            return rc == 0;
        });
        ++in_flight;
        if (first) await_imm();
        if (round >= warm_up) times.push_back((now_ns() - start) / 2);
    }
    while (in_flight > 0) in_flight -= fabric.poll(arrived);
    return times;
}

double quantile(std::vector<std::int64_t> times, double q) {
    std::sort(times.begin(), times.end());
    return static_cast<double>(times[static_cast<std::size_t>(q * static_cast<double>(times.size() - 1) + 0.5)]);
}

// -- commands, at the receiver ---------------------------------------------------------------------------------------

double measure(Fabric& fabric, Link link, const Order& order, double q) {
    link.put(order);
    return quantile(receive_pages(fabric, link, order), q);
}

// All forms are tried, the best few of them again and for longer: what else the machine does hits single rounds.
Form best_form(Fabric& fabric, Link link, Order order) {
    const auto& attr = *fabric.info->tx_attr;
    std::vector<std::pair<double, Form>> tried;
    for (std::uint32_t places = 1; places <= (order.contiguous ? 1 : fabric.max_places); places *= 2)
        for (const std::uint32_t most : {4, 16, 64, 256, 1024}) {
            const auto window = std::min<std::uint32_t>(most, attr.size);
            tried.push_back({0, {places, window, false}});
            // Beyond its limit shm takes the operation and delivers something else.
            if (!order.contiguous && places * order.page_bytes <= attr.inject_size)
                tried.push_back({0, {places, window, true}});
        }
    order.checked = false;
    for (order.rounds = 2; tried.size() > 1; order.rounds = 8) {
        for (auto& [ns, form] : tried) {
            order.form = form;
            ns = measure(fabric, link, order, 0.25);
        }
        std::sort(tried.begin(), tried.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
        tried.resize(tried.size() > 4 ? 4 : 1);
    }
    return tried.front().second;
}

void obey(Fabric& fabric, Link link, const std::string& line) {
    std::istringstream words(line);
    std::string what, pattern;
    Order order;
    static std::uint64_t seed = 0;
    order.seed = ++seed;
    words >> what >> order.page_bytes;
    const auto* provider = fabric.info->fabric_attr->prov_name;
    if (what == "pages" && words >> order.num_pages >> pattern >> order.rounds) {
        order.kind = Order::kPages;
        order.contiguous = pattern == "contiguous";
        if (order.page_bytes % 8 || order.page_bytes > kMaxWriteBytes || order.rounds == 0 || order.num_pages == 0 ||
            order.num_pages > kArenaBytes / order.page_bytes)
            die("out of range: " + line);
        if (!(words >> order.form.places >> order.form.window >> order.form.inject))
            order.form = best_form(fabric, link, order);
        if (order.form.places == 0 || order.form.places > fabric.max_places || order.form.window == 0)
            die("no such form: " + line);
        const auto ns = measure(fabric, link, order, 0.5);
        const auto pages = static_cast<double>(order.num_pages);
        std::printf(R"({"what": "pages", "provider": "%s", "page_bytes": %lu, "num_pages": %lu, "pattern": "%s", )"
                    R"("places": %u, "window": %u, "inject": %d, "pages_per_s": %.0f, "gb_per_s": %.4f})"
                    "\n",
                    provider, order.page_bytes, order.num_pages, pattern.c_str(), order.form.places, order.form.window,
                    order.form.inject, pages * 1e9 / ns, pages * static_cast<double>(order.page_bytes) / ns);
    } else if (what == "latency" && words >> order.rounds && order.rounds > 0) {
        order.kind = Order::kLatency;
        link.put(order);
        const auto times = ping_pong(fabric, order, true);
        std::printf(R"({"what": "latency", "provider": "%s", "page_bytes": %lu, "p50_us": %.2f, "p99_us": %.2f})"
                    "\n",
                    provider, order.page_bytes, quantile(times, 0.5) / 1e3, quantile(times, 0.99) / 1e3);
    } else {
        die("not a command: " + line);
    }
    std::fflush(stdout);
}

void run_sender(Fabric& fabric, Link link) {
    for (;;) {
        // The receiver may be waiting for its next command; its end closes the socket, which ends us.
        const auto order = link.get<Order>(-1);
        if (order.kind == Order::kEnd) return;
        if (order.kind == Order::kPages) send_pages(fabric, link, order);
        if (order.kind == Order::kLatency) ping_pong(fabric, order, false);
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 2)
        die("usage: floor PROVIDER [--cpus SENDER,RECEIVER|none] [--source ADDRESS] [--order any|writes] [COMMAND...]");
    std::string cpus = "0,1", source = "127.0.0.1", order = "any";
    int arg = 2;
    for (; arg + 1 < argc && std::string(argv[arg]).starts_with("--"); arg += 2) {
        const std::string option = argv[arg];
        (option == "--cpus" ? cpus : option == "--order" ? order : source) = argv[arg + 1];
    }

    int sockets[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets)) die("socketpair failed");
    void* shared = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    auto* started_ns = new (shared) std::atomic<std::int64_t>(0);
    // Before libfabric is touched: neither its threads nor its memory survive a fork.
    const auto child = fork();
    const bool is_sender = child == 0;
    if (is_sender) prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::close(sockets[is_sender ? 1 : 0]);
    const Link link{sockets[is_sender ? 0 : 1], started_ns};
    int sender_cpu = 0, receiver_cpu = 0;
    if (std::sscanf(cpus.c_str(), "%d,%d", &sender_cpu, &receiver_cpu) == 2) pin(is_sender ? sender_cpu : receiver_cpu);

    Fabric fabric(argv[1], source.c_str(), order == "writes", link);
    if (is_sender) {
        run_sender(fabric, link);
        fabric.close();
        return 0;
    }
    std::string line;
    if (arg < argc)
        for (; arg < argc; ++arg) obey(fabric, link, argv[arg]);
    else
        while (std::getline(std::cin, line)) obey(fabric, link, line);
    link.put(Order{});
    waitpid(child, nullptr, 0);
    fabric.close();
}
