// fabric_kv._native: the engine for Python. Converts between the two worlds and decides nothing.
//
// Blocking calls (poll, close, opening, registration) release the GIL; no Python code runs on a progress thread.
#include "bindings/convert.h"
#include "engine/open.h"
#include "ofi/ofi_nic.h"

namespace py = pybind11;
using namespace fkv;

namespace {

constexpr const char* kFenceMeans[] = {"none", "registrations", "exit"};  // as Fence::Means

// An engine and the NICs that it had to do without.
struct OpenedEngine {
    EnginePtr engine;
    std::vector<std::string> left_out;
};

struct GroupConfig {
    std::vector<std::string> nics;
    std::vector<int> cpus;
};

// Opens every group's NICs through libfabric. With strict off, NICs that fail to open are left out and listed.
OpenedEngine open_engine(const std::string& provider, const std::vector<GroupConfig>& configs, GroupOptions options,
                         bool strict, std::size_t max_peer_registrations, bool device_memory) {
    std::vector<std::string> left_out;
    std::vector<std::vector<std::unique_ptr<Nic>>> nics;
    std::vector<GroupOptions> group_options;
    for (const auto& config : configs) {
        nics.push_back(open_rails(ofi::find_nics({provider, config.nics, device_memory}), strict, left_out,
                                  [&](auto info) { return ofi::open_nic(std::move(info), !options.spin); }));
        options.cpus = config.cpus;
        group_options.push_back(options);
    }
    return {EnginePtr(new Engine(std::move(nics), group_options, max_peer_registrations)), left_out};
}

// (nbytes, dmabuf_fd, dmabuf_offset) each, side by side in memory.
using DeviceParts = std::vector<std::tuple<std::uint64_t, int, std::uint64_t>>;

std::vector<DeviceMemory> to_memory(std::uintptr_t base, int device, const DeviceParts& parts) {
    std::vector<DeviceMemory> memory;
    for (const auto& [nbytes, dmabuf_fd, dmabuf_offset] : parts) {
        memory.push_back({reinterpret_cast<void*>(base), nbytes, device, dmabuf_fd, dmabuf_offset});
        base += nbytes;
    }
    return memory;
}

std::int64_t deadline_after(double seconds) {
    return seconds > 0 ? now_ns() + static_cast<std::int64_t>(seconds * kSecond) : 0;
}

// Whether checking these takes long enough to let go of the GIL, which may take long to get back.
bool is_long(const std::vector<Engine::Submission>& submissions) {
    constexpr std::size_t kFewPages = 4096;
    std::size_t num_pages = 0;
    for (const auto& submission : submissions)
        for (const auto& piece : submission.pieces) num_pages += piece.num_pages();
    return num_pages > kFewPages;
}

// One write. The GIL is kept where it takes less than what waiting for it may.
std::shared_ptr<Transfer> submit_one(Engine& engine, Engine::Prepared prepared, const py::list& lists,
                                     const py::tuple& token, double deadline_s, std::shared_ptr<Watch> watch,
                                     std::uint64_t step) {
    std::vector<Engine::Submission> one;
    auto& submission = one.emplace_back(Engine::with_pages(std::move(prepared), to_page_lists(lists)));
    submission.token = to_token(token);
    submission.watch = std::move(watch);
    submission.step = step;
    std::optional<py::gil_scoped_release> release;
    if (is_long(one)) release.emplace();
    return engine.submit_pages(Transfer::Kind::kWrite, std::move(one), deadline_after(deadline_s))[0];
}

}  // namespace

PYBIND11_MODULE(_native, m) {
    py::register_exception_translator([](std::exception_ptr p) {
        try {
            if (p) std::rethrow_exception(p);
        } catch (const Error& error) {
            raise_as_python(error);
        } catch (const py::cast_error& error) {  // a number out of range, inside a tuple
            raise_as_python(Error(ErrorKind::kConfig,
                                  std::string("an argument has the wrong type or is out of range: ") + error.what()));
        }
    });
    m.attr("NUM_USER_BITS") = kGenerationBits + kWeightBits;
    m.attr("MAX_SLOT") = kUserSlot - 1;

    py::class_<Region, std::shared_ptr<Region>>(m, "Region").def_property_readonly("nbytes", [](const Region& r) {
        return r.nbytes;
    });
    py::class_<RemoteRegion, std::shared_ptr<RemoteRegion>>(m, "RemoteRegion")
        .def(py::init([](std::string_view epoch, std::uint32_t group, std::uint64_t nbytes,
                         std::vector<std::uint64_t> segment_ends,
                         const std::vector<std::vector<std::pair<std::uint64_t, std::uint64_t>>>& rails) {
            auto region = std::make_shared<RemoteRegion>(
                RemoteRegion{to_epoch(epoch), group, nbytes, Segments(std::move(segment_ends)), {}});
            if (region->segments.size() == 0 || region->segments.ends().back() != nbytes)
                throw Error(ErrorKind::kConfig, "the segments of a remote region must end where it ends");
            for (const auto& rail : rails) {
                if (rail.size() != region->segments.size())
                    throw Error(ErrorKind::kConfig, "a rail of a remote region must have a key for each segment");
                auto& segments = region->rails.emplace_back();
                for (const auto& [base, rkey] : rail) segments.push_back({base, rkey});
            }
            return region;
        }));
    py::class_<Peer, std::shared_ptr<Peer>>(m, "Peer")
        .def_property_readonly("epoch", [](const Peer& p) { return to_bytes(p.epoch); })
        .def("describe", &describe_peer);
    py::class_<PageList, std::shared_ptr<PageList>>(m, "PageList")
        .def(py::init([](const py::array& array) { return std::const_pointer_cast<PageList>(to_pages(array)); }))
        .def("__len__", &PageList::size);
    // The word is the caller's, who keeps it alive.
    py::class_<Watch, std::shared_ptr<Watch>>(m, "Watch")
        .def(py::init([](std::uintptr_t address, bool is_polled) {
            if (address == 0 || address % alignof(std::uint64_t) != 0)
                throw Error(ErrorKind::kConfig, "a watch's word must be aligned to 8 bytes");
            return std::make_shared<Watch>(reinterpret_cast<std::uint64_t*>(address), is_polled);
        }))
        .def_property_readonly("word", &Watch::word)
        .def("set", &Watch::set);  // without an engine: its caller may be a process that has none
    py::class_<Engine::Prepared, std::shared_ptr<Engine::Prepared>>(m, "Prepared")
        .def(py::init([](const std::shared_ptr<Peer>& peer, const py::list& pieces) {
            return std::make_shared<Engine::Prepared>(to_prepared(peer, pieces));
        }));
    py::class_<Transfer, std::shared_ptr<Transfer>>(m, "Transfer")
        .def_property_readonly("id", [](const Transfer& t) { return t.id; })
        .def_property_readonly("nbytes", [](const Transfer& t) { return t.nbytes; });

    m.def(
        "open_engine",
        [](const std::string& provider,
           const std::vector<std::pair<std::vector<std::string>, std::vector<int>>>& groups, bool spin,
           bool nic_threads, bool strict, std::size_t max_transfers, std::size_t max_inbox_bytes,
           std::uint32_t num_counters, double heartbeat_interval_s, std::uint32_t heartbeat_misses, double connect_s,
           double stall_s, double close_s, std::uint64_t max_registration_bytes, std::size_t max_peer_registrations,
           bool device_memory) {
            GroupOptions options;
            options.spin = spin;
            options.nic_threads_from = nic_threads ? 2 : 0;  // one NIC gains nothing by it
            options.max_transfers = max_transfers;
            options.max_inbox_bytes = max_inbox_bytes;
            options.num_counters = num_counters;
            options.heartbeat = {static_cast<std::int64_t>(heartbeat_interval_s * kSecond), heartbeat_misses,
                                 static_cast<std::int64_t>(connect_s * kSecond)};
            options.stall_ns = static_cast<std::int64_t>(stall_s * kSecond);
            options.end_ns = static_cast<std::int64_t>(close_s * kSecond);
            options.max_registration_bytes = max_registration_bytes;
            std::vector<GroupConfig> configs;
            for (const auto& [nics, cpus] : groups) configs.push_back({nics, cpus});
            OpenedEngine opened;
            {
                py::gil_scoped_release release;
                opened = open_engine(provider, configs, options, strict, max_peer_registrations, device_memory);
            }
            return py::make_tuple(std::move(opened.engine), opened.left_out);
        },
        py::kw_only(), py::arg("provider"), py::arg("groups"), py::arg("spin"), py::arg("nic_threads"),
        py::arg("strict"), py::arg("max_transfers"), py::arg("max_inbox_bytes"), py::arg("num_counters"),
        py::arg("heartbeat_interval_s"), py::arg("heartbeat_misses"), py::arg("connect_s"), py::arg("stall_s"),
        py::arg("close_s"), py::arg("max_registration_bytes"), py::arg("max_peer_registrations"),
        py::arg("device_memory"));

    py::class_<Engine, EnginePtr>(m, "Engine")
        .def("address",
             [](const Engine& e) {
                 py::list groups;
                 for (const auto& rails : e.address().groups) {
                     py::list list;
                     for (const auto& rail : rails) list.append(to_bytes(rail));
                     groups.append(list);
                 }
                 return py::make_tuple(to_bytes(e.address().epoch), groups, to_object(e.address().process));
             })
        .def(
            "register_region",
            [](Engine& e, std::uintptr_t base, std::uint64_t nbytes, std::uint32_t group) {
                return e.register_region(reinterpret_cast<void*>(base), nbytes, group);
            },
            py::call_guard<py::gil_scoped_release>())
        .def(
            "register_device",
            [](Engine& e, std::uintptr_t base, int device, const DeviceParts& parts, std::uint32_t group) {
                return e.register_device(to_memory(base, device, parts), group);
            },
            py::call_guard<py::gil_scoped_release>())
        .def("register_again", &Engine::register_again, py::call_guard<py::gil_scoped_release>())
        .def("deregister", &Engine::deregister, py::call_guard<py::gil_scoped_release>())
        .def("describe_region",
             [](const Engine& e, const Region& region) { return to_tuple(e.describe_region(region)); })
        .def("share_region",
             [](Engine& e, const std::shared_ptr<Region>& region, const std::shared_ptr<Peer>& peer, int device,
                const DeviceParts& parts) {
                 RemoteRegion remote;
                 {
                     py::gil_scoped_release release;
                     const auto base = reinterpret_cast<std::uintptr_t>(region->base);
                     remote = e.share_region(region, peer, to_memory(base, device, parts));
                 }
                 return to_tuple(remote);
             })
        .def("add_peer",
             [](Engine& e, std::string_view epoch, const std::vector<std::vector<py::bytes>>& groups,
                const py::object& process, bool monitor) {
                 EngineAddress address{to_epoch(epoch), {}, to_process(process)};
                 for (const auto& rails : groups) {
                     std::vector<std::vector<std::byte>> list;
                     for (const auto& rail : rails) list.push_back(from_bytes(rail));
                     address.groups.push_back(std::move(list));
                 }
                 return e.add_peer(address, monitor);
             })
        .def("remove_peer", &Engine::remove_peer)
        .def("fence",
             [](Engine& e, const std::shared_ptr<Peer>& peer, double timeout_s) {
                 Fence fence;
                 {
                     py::gil_scoped_release release;
                     fence = e.fence(peer, static_cast<std::int64_t>(timeout_s * kSecond));
                 }
                 return py::make_tuple(fence.proven, kFenceMeans[fence.means], fence.why);
             })
        .def("fence_means", [](Engine& e) { return kFenceMeans[e.fence_means()]; })
        .def("submit_pages",
             [](Engine& e, bool read, const std::vector<py::tuple>& submissions, double deadline_s) {
                 std::vector<Engine::Submission> native;
                 native.reserve(submissions.size());
                 for (const auto& t : submissions) {
                     auto prepared = to_prepared(t[0].cast<std::shared_ptr<Peer>>(), t[1].cast<py::list>());
                     auto& submission = native.emplace_back(
                         Engine::with_pages(std::move(prepared), to_page_lists(t[2].cast<py::list>())));
                     submission.token = to_token(t[3].cast<py::tuple>());
                     submission.watch = t[4].cast<std::shared_ptr<Watch>>();
                     submission.step = t[5].cast<std::uint64_t>();
                 }
                 const auto kind = read ? Transfer::Kind::kRead : Transfer::Kind::kWrite;
                 std::optional<py::gil_scoped_release> release;
                 if (is_long(native)) release.emplace();
                 return e.submit_pages(kind, std::move(native), deadline_after(deadline_s));
             })
        .def("submit_write",
             [](Engine& e, std::shared_ptr<Peer> peer, const py::list& pieces, const py::list& lists,
                const py::tuple& token, double deadline_s, std::shared_ptr<Watch> watch, std::uint64_t step) {
                 return submit_one(e, to_prepared(std::move(peer), pieces), lists, token, deadline_s, std::move(watch),
                                   step);
             })
        .def("submit_prepared", &submit_one)
        .def("set_watch", &Engine::set_watch)
        .def("submit_signals",
             [](Engine& e, const std::vector<py::tuple>& signals, std::uint32_t group) {
                 std::vector<Engine::Signal> native;
                 for (const auto& t : signals)
                     native.push_back({t[0].cast<std::shared_ptr<Peer>>(), t[1].cast<std::shared_ptr<RemoteRegion>>(),
                                       to_token(t[2].cast<py::tuple>()), t[3].cast<std::uint64_t>(),
                                       t[4].cast<std::uint32_t>()});
                 return e.submit_signals(std::move(native), group);
             })
        .def("submit_message",
             [](Engine& e, const std::shared_ptr<Peer>& peer, std::string_view payload) {
                 return e.submit_message(peer, {reinterpret_cast<const std::byte*>(payload.data()), payload.size()});
             })
        .def("submit_flush",
             [](Engine& e, const std::shared_ptr<Peer>& peer, const std::shared_ptr<RemoteRegion>& dst,
                std::uint32_t group) { return e.submit_on_all_rails(Transfer::Kind::kFlush, peer, dst, group); })
        .def("submit_connect",
             [](Engine& e, const std::shared_ptr<Peer>& peer, const std::shared_ptr<RemoteRegion>& dst,
                std::uint32_t group) { return e.submit_on_all_rails(Transfer::Kind::kConnect, peer, dst, group); })
        .def("cancel", [](Engine& e, Transfer& transfer) { e.cancel(transfer); })
        .def("allocate_counter",
             [](Engine& e, std::uint32_t group, std::uint64_t unit_bytes) {
                 const auto token = e.allocate_counter(group, unit_bytes);
                 return py::make_tuple(token.slot, token.generation);
             })
        .def("arm_counter", [](Engine& e, std::uint32_t group, const py::tuple& token,
                               std::uint64_t units) { e.arm_counter(group, to_token(token), units); })
        .def("counter_received",
             [](Engine& e, std::uint32_t group, const py::tuple& token) {
                 return e.group(group).counters().received(to_token(token));
             })
        .def("release_counter", [](Engine& e, std::uint32_t group, const py::tuple& token,
                                   bool quiescent) { e.group(group).counters().release(to_token(token), quiescent); })
        .def("poll",
             [](Engine& e, double timeout_s) {
                 std::vector<Event> events;
                 {
                     py::gil_scoped_release release;
                     // Negative and NaN: no wait. Also keeps the cast below defined.
                     timeout_s = timeout_s > 0 ? std::min(timeout_s, 1e6) : 0;
                     events = e.events().take(static_cast<int>(timeout_s * 1000));
                     e.check_stuck();
                 }
                 py::list out;
                 for (const auto& event : events) out.append(to_tuple(event));
                 return out;
             })
        .def("ring", [](Engine& e) { e.events().ring(); })
        .def("fileno", [](Engine& e) { return e.events().fd(); })
        .def("describe",
             [](Engine& e) {
                 py::list groups;
                 for (std::uint32_t i = 0; i < e.num_groups(); ++i) {
                     auto group = describe_group(e.group(i));
                     group["peer_registrations"] = e.num_shares(i);
                     const auto figures = e.region_figures(i);
                     group["regions"] = figures.regions;
                     group["registrations"] = figures.registrations;
                     group["registered_bytes"] = figures.bytes;
                     groups.append(group);
                 }
                 return groups;
             })
        .def(
            "close", [](Engine& e, double drain_s) { e.close(static_cast<std::int64_t>(drain_s * kSecond)); },
            py::call_guard<py::gil_scoped_release>());

    m.def("library", [] {
        const auto& library = ofi::Library::get();
        return py::make_tuple(library.path, ofi::version_text(library.version));
    });
    m.def("list_offers", [](const std::string& provider) {
        py::list out;
        for (const auto& offer : ofi::list_offers(provider)) out.append(describe_offer(offer));
        return out;
    });
}
