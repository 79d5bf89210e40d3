// Values between C++ and Python, both ways.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "engine/engine.h"
#include "ofi/discover.h"

namespace fkv {

// A forked child leaks the parent's engine: see Engine::in_child().
struct DeleteInParent {
    void operator()(Engine* engine) const {
        if (!engine->in_child()) delete engine;
    }
};
using EnginePtr = std::unique_ptr<Engine, DeleteInParent>;

pybind11::bytes to_bytes(const Epoch& epoch);
pybind11::bytes to_bytes(const std::vector<std::byte>& data);
std::vector<std::byte> from_bytes(std::string_view text);
Epoch to_epoch(std::string_view text);
// Of (src, src_offset, src_stride, dst, ..., layer, page lists) tuples.
Engine::Prepared to_prepared(std::shared_ptr<Peer> peer, const pybind11::list& pieces);
Pages to_pages(const pybind11::array& array);
Engine::PageLists to_page_lists(const pybind11::list& lists);
std::optional<ProcessId> to_process(const pybind11::object& process);
pybind11::object to_object(const std::optional<ProcessId>& process);
pybind11::tuple to_tuple(const RemoteRegion& remote);
CounterToken to_token(const pybind11::tuple& t);
pybind11::tuple to_tuple(const Event& event);

// Raises the exception of fabric_kv.errors that stands for a native error.
void raise_as_python(const Error& error);

pybind11::dict describe_group(Group& group);
pybind11::dict describe_peer(const Peer& peer);
pybind11::dict describe_offer(const ofi::Offer& offer);

}  // namespace fkv
