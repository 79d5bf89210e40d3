#include "engine_cluster.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <thread>

namespace fkv::test {
namespace {

std::byte message_byte(std::uint64_t id, std::uint64_t offset) { return static_cast<std::byte>(id * 37 + offset * 11); }

// Half of the nodes have little room for what it brings.
GroupOptions with_nic_threads(GroupOptions options, bool little_room) {
    if (!nic_threads()) return options;
    options.nic_threads_from = 1;
    if (little_room) options.max_brought = 2;
    return options;
}

}  // namespace

bool nic_threads() { return std::getenv("FABRIC_KV_NIC_THREADS") != nullptr; }

Node::Node(fake::FakeFabric& fabric, std::uint32_t process, const NodeShape& shape)
    : memory(shape.memory_bytes, kCanary) {
    auto profile = shape.profile;
    profile.process = process;
    std::vector<std::vector<std::unique_ptr<Nic>>> opened;
    for (const auto count : shape.rails) {
        nics.emplace_back();
        opened.emplace_back();
        for (std::size_t i = 0; i < count; ++i) {
            if (!shape.link_bps.empty()) profile.link_bps = shape.link_bps[i];
            opened.back().push_back(fabric.open_nic(profile));
            nics.back().push_back(fake::FakeFabric::id_of(*opened.back().back()));
        }
    }
    const std::vector<GroupOptions> options(shape.rails.size(),
                                            with_nic_threads(shape.options, (fabric.seed() + process) % 2 == 0));
    engine = std::make_unique<Engine>(std::move(opened), options, shape.max_peer_registrations);
    for (std::uint32_t group = 0; group < shape.rails.size(); ++group) {
        regions.push_back(engine->register_region(memory.data(), memory.size(), group));
        remotes.push_back(std::make_shared<RemoteRegion>(engine->describe_region(*regions.back())));
    }
}

Node::~Node() {
    if (engine) engine->close(0);
}

CounterToken Node::counter(std::uint64_t unit_bytes, std::optional<std::uint64_t> expected, std::uint32_t group) {
    const auto token = engine->allocate_counter(group, unit_bytes);
    if (expected) engine->arm_counter(group, token, *expected);
    return token;
}

PagePiece Node::piece(Node& to, std::uint64_t src_offset, std::uint64_t dst_offset, std::uint64_t nbytes) {
    return {regions[0], src_offset, 0, to.remotes[0], dst_offset, 0, nbytes, make_pages({0}), make_pages({0})};
}

std::uint64_t Node::write(Node& to, std::uint64_t src_offset, std::uint64_t dst_offset, std::uint64_t nbytes,
                          const CounterToken& token, std::int64_t deadline_ns) {
    return engine
        ->submit_pages(Transfer::Kind::kWrite, {{peer(to), {piece(to, src_offset, dst_offset, nbytes)}, token}},
                       deadline_ns)[0]
        ->id;
}

std::shared_ptr<Transfer> Node::write_pages(Node& to, std::uint64_t src_offset, std::uint64_t dst_offset,
                                            std::uint64_t count, std::uint64_t nbytes, const CounterToken& token,
                                            std::int64_t deadline_ns) {
    auto pages = piece(to, src_offset, dst_offset, nbytes);
    std::vector<std::int64_t> list(count);
    std::iota(list.begin(), list.end(), 0);
    pages.src_pages = pages.dst_pages = make_pages(std::move(list));
    pages.src_stride = nbytes;
    pages.dst_stride = 2 * nbytes;
    return engine->submit_pages(Transfer::Kind::kWrite, {{peer(to), {pages}, token}}, deadline_ns)[0];
}

std::uint64_t Node::read(Node& from, std::uint64_t dst_offset, std::uint64_t src_offset, std::uint64_t nbytes) {
    return engine
        ->submit_pages(Transfer::Kind::kRead, {{peer(from), {piece(from, dst_offset, src_offset, nbytes)}, {}}}, 0)[0]
        ->id;
}

std::uint64_t Node::send(Node& to, std::size_t nbytes) {
    // The id is not known before: the bytes follow from the length and the offset.
    std::vector<std::byte> payload(nbytes);
    for (std::size_t i = 0; i < nbytes; ++i) payload[i] = message_byte(nbytes, i);
    return engine->submit_message(peer(to), payload)->id;
}

void Node::take() {
    for (auto& event : engine->events().take(0)) {
        switch (event.kind) {
            case Event::kTransfer: {
                const auto id = event.id;
                const auto [it, first] = transfers.emplace(id, std::move(event));
                EXPECT_TRUE(first) << "transfer " << id << " ended twice";
                order.emplace(id, order.size());
                if (on_transfer) on_transfer(it->second);
                break;
            }
            case Event::kCounter:
                EXPECT_TRUE(
                    counters_.emplace(std::tuple(event.group, event.slot, event.generation), event.verdict).second)
                    << "counter " << event.slot << " fired twice";
                if (on_counter) on_counter(event);
                break;
            case Event::kMessage:
                take_frame(event);
                break;
            case Event::kUser:
                users.push_back(std::move(event));
                break;
            case Event::kPeerLost:
                lost.push_back(std::move(event));
                break;
            case Event::kFault:
                faults.push_back(std::move(event));
                break;
            case Event::kStalled:
                stalls.push_back(std::move(event));
                break;
            case Event::kHeldUp:
                held_up.push_back(std::move(event));
                break;
        }
    }
}

void Node::take_frame(const Event& event) {
    auto& message = messages_[{event.peer, event.id}];
    EXPECT_TRUE(message.offsets.insert(event.offset).second) << "a frame of message " << event.id << " came twice";
    EXPECT_FALSE(message.whole) << "more came of message " << event.id << " than it has";
    for (std::size_t i = 0; i < event.payload.size(); ++i)
        if (event.payload[i] != message_byte(event.bytes, event.offset + i)) {
            ADD_FAILURE() << "byte " << event.offset + i << " of message " << event.id << " is wrong";
            break;
        }
    message.arrived += event.payload.size();
    message.whole = message.arrived == event.bytes;
}

std::size_t Node::num_received(const Node& from) const {
    return static_cast<std::size_t>(std::count_if(messages_.begin(), messages_.end(), [&](const auto& entry) {
        return entry.first.first == from.engine->address().epoch && entry.second.whole;
    }));
}

const Event* Node::ended(std::uint64_t id) const {
    const auto it = transfers.find(id);
    return it == transfers.end() ? nullptr : &it->second;
}

const CounterVerdict* Node::fired(const CounterToken& token, std::uint32_t group) const {
    const auto it = counters_.find({group, token.slot, token.generation});
    return it == counters_.end() ? nullptr : &it->second;
}

Node& Cluster::add(const NodeShape& shape) {
    return nodes.emplace_back(fabric, static_cast<std::uint32_t>(nodes.size() + 1), shape);
}

bool Cluster::wait(const std::function<bool()>& done, std::chrono::milliseconds bound) {
    const auto end = std::chrono::steady_clock::now() + bound;
    std::vector<pollfd> fds;
    for (auto& node : nodes)
        if (node.engine) fds.push_back({node.engine->events().fd(), POLLIN, 0});
    for (;;) {
        for (auto& node : nodes)
            if (node.engine) node.take();
        if (done()) return true;
        if (std::chrono::steady_clock::now() > end) return false;
        // Conditions may be about figures, too, which ring no bell.
        ::poll(fds.data(), fds.size(), 2);
    }
}

void Cluster::steps(std::uint64_t count) {
    const auto until = fabric.stats().steps + count;
    EXPECT_TRUE(wait([&] { return fabric.stats().steps >= until; })) << "the engines do not poll: " << where();
}

void Cluster::check() const { EXPECT_TRUE(fabric.violations().empty()) << fabric.describe(); }

}  // namespace fkv::test
