// fabric_kv._native: the engine for Python. Converts between the two worlds and decides nothing.
//
// Blocking calls (poll, close, opening, registration) release the GIL; no Python code runs on a progress thread.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "engine/engine.h"
#include "ofi/ofi_nic.h"

namespace py = pybind11;
using namespace fkv;

namespace {

py::bytes to_bytes(const Epoch& epoch) { return {reinterpret_cast<const char*>(epoch.data()), epoch.size()}; }

py::bytes to_bytes(const std::vector<std::byte>& data) {
    return {reinterpret_cast<const char*>(data.data()), data.size()};
}

std::vector<std::byte> from_bytes(std::string_view text) {
    const auto* data = reinterpret_cast<const std::byte*>(text.data());
    return {data, data + text.size()};
}

Epoch to_epoch(std::string_view text) {
    Epoch epoch;
    if (text.size() != epoch.size())
        throw Error(ErrorKind::kProtocol, "an epoch has 16 bytes, not " + std::to_string(text.size()));
    std::memcpy(epoch.data(), text.data(), epoch.size());
    return epoch;
}

py::tuple to_tuple(const OpError& e) {
    return py::make_tuple(e.fi_errno, e.prov_errno, e.op, e.provider, e.nic, e.text);
}

// The one place where native error kinds become exceptions of fabric_kv.errors.
void raise_as_python(const Error& error) {
    static constexpr const char* kNames[] = {"ConfigError",          "FabricError",     "RegistrationError",
                                             "PeerUnreachableError", "WouldBlockError", "ClosedError",
                                             "ProtocolError",        "InternalError"};
    const auto kind = error.kind();
    auto type = py::module_::import("fabric_kv.errors").attr(kNames[static_cast<int>(kind)]);
    py::dict fields;
    if (kind == ErrorKind::kFabric || kind == ErrorKind::kRegistration || kind == ErrorKind::kUnreachable) {
        const auto& op = error.op();
        if (!op.op.empty()) fields["op"] = op.op;
        if (op.fi_errno) fields["fi_errno"] = op.fi_errno;
        if (!op.provider.empty()) fields["provider"] = op.provider;
        if (!op.nic.empty()) fields["nic"] = op.nic;
    }
    const auto value = type(error.what(), **fields);
    PyErr_SetObject(type.ptr(), value.ptr());
}

using Pages = py::array_t<std::int64_t, py::array::c_style>;

std::vector<std::int64_t> to_pages(const Pages& pages) { return {pages.data(), pages.data() + pages.size()}; }

PagePiece to_piece(const py::tuple& t) {
    PagePiece piece;
    piece.src = t[0].cast<std::shared_ptr<Region>>();
    piece.src_offset = t[1].cast<std::uint64_t>();
    piece.src_stride = t[2].cast<std::uint64_t>();
    piece.dst = t[3].cast<std::shared_ptr<RemoteRegion>>();
    piece.dst_offset = t[4].cast<std::uint64_t>();
    piece.dst_stride = t[5].cast<std::uint64_t>();
    piece.nbytes = t[6].cast<std::uint64_t>();
    piece.src_pages = to_pages(t[7].cast<Pages>());
    piece.dst_pages = to_pages(t[8].cast<Pages>());
    piece.rows = t[9].cast<std::uint32_t>();
    piece.src_row_stride = t[10].cast<std::uint64_t>();
    piece.dst_row_stride = t[11].cast<std::uint64_t>();
    return piece;
}

CounterToken to_token(const py::tuple& t) {
    return {t[0].cast<std::uint32_t>(), t[1].cast<std::uint32_t>(), t[2].cast<std::uint64_t>()};
}

py::tuple to_tuple(const Event& e) {
    const auto kind = static_cast<int>(e.kind);
    switch (e.kind) {
        case Event::kTransfer:
            return py::make_tuple(kind, e.id, static_cast<int>(e.outcome), e.bytes, to_bytes(e.peer),
                                  to_tuple(e.error));
        case Event::kCounter:
            return py::make_tuple(kind, e.group, e.slot, e.generation, e.verdict == CounterVerdict::kFired);
        case Event::kMessage:
            return py::make_tuple(kind, to_bytes(e.peer), e.id, e.bytes, e.offset, to_bytes(e.payload));
        case Event::kUser:
            return py::make_tuple(kind, e.group, e.id);
        case Event::kPeerLost:
            return py::make_tuple(kind, to_bytes(e.peer), e.error.text);
        case Event::kFault:
            return py::make_tuple(kind, e.group, to_tuple(e.error));
    }
    throw Error(ErrorKind::kInternal, "unknown event kind");
}

py::dict describe_rail(Rail& rail) {
    const auto& info = rail.info();
    const auto& stats = rail.stats;
    py::dict d;
    d["provider"] = info.provider;
    d["fabric"] = info.fabric;
    d["domain"] = info.domain;
    d["source"] = info.source;
    d["max_msg_bytes"] = info.max_msg_bytes;
    d["tx_depth"] = info.tx_depth;
    d["rx_depth"] = info.rx_depth;
    d["cq_data_bytes"] = info.cq_data_bytes;
    d["iov_limit"] = info.iov_limit;
    d["rma_iov_limit"] = info.rma_iov_limit;
    d["link_bps"] = info.link_bps;
    d["virtual_addresses"] = info.virtual_addresses;
    d["provider_keys"] = info.provider_keys;
    d["local_mr"] = info.local_mr;
    d["ordered_writes"] = info.ordered_writes;
    d["imm_uses_recv"] = info.imm_uses_recv;
    d["wait_fd"] = info.wait_fd;
    d["ops"] = stats.ops.load();
    d["bytes"] = stats.bytes.load();
    d["completions"] = stats.completions.load();
    d["again"] = stats.again.load();
    d["errors"] = stats.errors.load();
    d["imms"] = stats.imms.load();
    d["messages"] = stats.messages.load();
    d["busy_ns"] = stats.busy_ns.load();
    return d;
}

py::dict describe_group(Group& group) {
    py::list rails;
    for (auto& rail : group.rails()) rails.append(describe_rail(*rail));
    py::dict d;
    d["rails"] = rails;
    d["transfers_in_flight"] = group.in_flight();
    d["counters_in_use"] = group.counters().num_in_use();
    d["counters_poisoned"] = group.counters().num_poisoned();
    d["max_write_bytes"] = group.max_write_bytes();
    d["stale_imms"] = group.stats().stale_imms.load();
    d["violations"] = group.stats().violations.load();
    d["dropped_imms"] = group.stats().dropped_imms.load();
    d["malformed_frames"] = group.stats().malformed_frames.load();
    d["sleeps"] = group.stats().sleeps.load();
    return d;
}

// A forked child leaks the parent's engine: see Engine::in_child().
struct DeleteInParent {
    void operator()(Engine* engine) const {
        if (!engine->in_child()) delete engine;
    }
};
using EnginePtr = std::unique_ptr<Engine, DeleteInParent>;

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
                         bool strict) {
    std::vector<std::string> left_out;
    std::vector<std::vector<std::unique_ptr<Nic>>> nics;
    std::vector<GroupOptions> group_options;
    for (const auto& config : configs) {
        std::vector<std::unique_ptr<Nic>> rails;
        for (auto& info : ofi::find_nics({provider, config.nics})) {
            try {
                rails.push_back(ofi::open_nic(std::move(info)));
            } catch (const Error& error) {
                if (strict) throw;
                left_out.push_back(error.what());
            }
        }
        if (rails.empty())
            throw Error(ErrorKind::kFabric, left_out.empty()
                                                ? "no NIC"
                                                : "no NIC of the group could be opened; the last: " + left_out.back());
        nics.push_back(std::move(rails));
        options.cpus = config.cpus;
        group_options.push_back(options);
    }
    return {EnginePtr(new Engine(std::move(nics), group_options)), left_out};
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
                         const std::vector<std::pair<std::uint64_t, std::uint64_t>>& rails) {
            auto region = std::make_shared<RemoteRegion>(RemoteRegion{to_epoch(epoch), group, nbytes, {}});
            for (const auto& [base, rkey] : rails) region->rails.push_back({base, rkey});
            return region;
        }));
    py::class_<Peer, std::shared_ptr<Peer>>(m, "Peer").def_property_readonly(
        "epoch", [](const Peer& p) { return to_bytes(p.epoch); });
    py::class_<Transfer, std::shared_ptr<Transfer>>(m, "Transfer").def_property_readonly("id", [](const Transfer& t) {
        return t.id;
    });

    m.def(
        "open_engine",
        [](const std::string& provider,
           const std::vector<std::pair<std::vector<std::string>, std::vector<int>>>& groups, bool spin, bool strict,
           std::size_t max_transfers, std::size_t max_inbox_bytes, std::uint32_t num_counters,
           double heartbeat_interval_s, std::uint32_t heartbeat_misses, double connect_s) {
            GroupOptions options;
            options.spin = spin;
            options.max_transfers = max_transfers;
            options.max_inbox_bytes = max_inbox_bytes;
            options.num_counters = num_counters;
            options.heartbeat = {static_cast<std::int64_t>(heartbeat_interval_s * kSecond), heartbeat_misses,
                                 static_cast<std::int64_t>(connect_s * kSecond)};
            std::vector<GroupConfig> configs;
            for (const auto& [nics, cpus] : groups) configs.push_back({nics, cpus});
            OpenedEngine opened;
            {
                py::gil_scoped_release release;
                opened = open_engine(provider, configs, options, strict);
            }
            return py::make_tuple(std::move(opened.engine), opened.left_out);
        },
        py::kw_only(), py::arg("provider"), py::arg("groups"), py::arg("spin"), py::arg("strict"),
        py::arg("max_transfers"), py::arg("max_inbox_bytes"), py::arg("num_counters"), py::arg("heartbeat_interval_s"),
        py::arg("heartbeat_misses"), py::arg("connect_s"));

    py::class_<Engine, EnginePtr>(m, "Engine")
        .def("address",
             [](const Engine& e) {
                 py::list groups;
                 for (const auto& rails : e.address().groups) {
                     py::list list;
                     for (const auto& rail : rails) list.append(to_bytes(rail));
                     groups.append(list);
                 }
                 return py::make_tuple(to_bytes(e.address().epoch), groups);
             })
        .def(
            "register_region",
            [](Engine& e, std::uintptr_t base, std::uint64_t nbytes, std::uint32_t group) {
                return e.register_region(reinterpret_cast<void*>(base), nbytes, group);
            },
            py::call_guard<py::gil_scoped_release>())
        .def("deregister", &Engine::deregister, py::call_guard<py::gil_scoped_release>())
        .def("describe_region",
             [](const Engine& e, const Region& region) {
                 const auto remote = e.describe_region(region);
                 py::list rails;
                 for (const auto& rail : remote.rails) rails.append(py::make_tuple(rail.base, rail.rkey));
                 return py::make_tuple(to_bytes(remote.epoch), remote.group, remote.nbytes, rails);
             })
        .def("add_peer",
             [](Engine& e, std::string_view epoch, const std::vector<std::vector<py::bytes>>& groups, bool monitor) {
                 EngineAddress address{to_epoch(epoch), {}};
                 for (const auto& rails : groups) {
                     std::vector<std::vector<std::byte>> list;
                     for (const auto& rail : rails) list.push_back(from_bytes(rail));
                     address.groups.push_back(std::move(list));
                 }
                 return e.add_peer(address, monitor);
             })
        .def("remove_peer", &Engine::remove_peer)
        .def("submit_write",
             [](Engine& e, const std::shared_ptr<Peer>& peer, const std::vector<py::tuple>& pieces,
                const py::tuple& token) {
                 std::vector<PagePiece> native;
                 native.reserve(pieces.size());
                 for (const auto& piece : pieces) native.push_back(to_piece(piece));
                 const auto native_token = to_token(token);
                 py::gil_scoped_release release;
                 return e.submit_write(peer, std::move(native), native_token);
             })
        .def("submit_message",
             [](Engine& e, const std::shared_ptr<Peer>& peer, std::string_view payload) {
                 return e.submit_message(peer, {reinterpret_cast<const std::byte*>(payload.data()), payload.size()});
             })
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
                 for (std::uint32_t i = 0; i < e.num_groups(); ++i) groups.append(describe_group(e.group(i)));
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
        for (const auto& o : ofi::list_offers(provider))
            out.append(py::make_tuple(o.provider, o.domain, o.fabric, o.source, o.rdma));
        return out;
    });
}
