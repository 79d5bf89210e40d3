#include "bindings/convert.h"

namespace py = pybind11;

namespace fkv {
namespace {

py::tuple to_tuple(const OpError& e) {
    return py::make_tuple(e.fi_errno, e.prov_errno, e.op, e.provider, e.nic, e.text);
}

py::tuple to_tuple(const PageRange& range) { return py::make_tuple(range.piece, range.first, range.count); }

using Pages = py::array_t<std::int64_t, py::array::c_style>;

std::vector<std::int64_t> to_pages(const Pages& pages) { return {pages.data(), pages.data() + pages.size()}; }

}  // namespace

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
        case Event::kTransfer: {
            py::list failed;
            for (const auto& range : e.failed_pages) failed.append(to_tuple(range));
            return py::make_tuple(kind, e.id, static_cast<int>(e.outcome), e.bytes, to_bytes(e.peer), to_tuple(e.error),
                                  failed, to_tuple(e.unposted));
        }
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
        case Event::kStalled:
            return py::make_tuple(kind, e.group, to_tuple(e.error), static_cast<double>(e.id) / kSecond, e.bytes);
    }
    throw Error(ErrorKind::kInternal, "unknown event kind");
}

}  // namespace fkv
