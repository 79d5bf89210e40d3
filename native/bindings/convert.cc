#include "bindings/convert.h"

namespace py = pybind11;

namespace fkv {
namespace {

py::tuple to_tuple(const OpError& e) {
    return py::make_tuple(e.fi_errno, e.prov_errno, e.op, e.provider, e.nic, e.text);
}

py::tuple to_tuple(const PageRange& range) { return py::make_tuple(range.piece, range.first, range.count); }

template <typename Integer>
Pages copy_pages(const py::array& array) {
    const auto num_pages = array.size();
    const auto* data = static_cast<const Integer*>(array.data());
    const bool is_aligned = array.flags() & py::detail::npy_api::NPY_ARRAY_ALIGNED_;
    if (is_aligned && array.strides(0) == sizeof(Integer)) return make_pages({data, data + num_pages});
    std::vector<std::int64_t> pages(static_cast<std::size_t>(num_pages));
    for (py::ssize_t i = 0; i < num_pages; ++i) {
        Integer page;
        std::memcpy(&page, array.data(i), sizeof page);
        pages[static_cast<std::size_t>(i)] = static_cast<std::int64_t>(page);
    }
    return make_pages(std::move(pages));
}

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

// Where the host's id is not 16 bytes long, nobody runs there: the process counts as unknown.
std::optional<ProcessId> to_process(const py::object& process) {
    if (process.is_none()) return {};
    const auto t = process.cast<py::tuple>();
    const auto host = t[0].cast<std::string_view>();
    ProcessId id{.pid = t[1].cast<std::int64_t>(), .start_ticks = t[2].cast<std::uint64_t>()};
    if (host.size() != id.host.size()) return {};
    std::memcpy(id.host.data(), host.data(), host.size());
    return id;
}

py::object to_object(const std::optional<ProcessId>& process) {
    if (!process) return py::none();
    return py::make_tuple(to_bytes(process->host), process->pid, process->start_ticks);
}

py::tuple to_tuple(const RemoteRegion& remote) {
    py::list rails;
    for (const auto& rail : remote.rails) {
        py::list segments;
        for (const auto& segment : rail) segments.append(py::make_tuple(segment.base, segment.rkey));
        rails.append(segments);
    }
    return py::make_tuple(to_bytes(remote.epoch), remote.group, remote.nbytes, remote.segments.ends(), rails);
}

// The one place where native error kinds become exceptions of fabric_kv.errors.
void raise_as_python(const Error& error) {
    static constexpr const char* kNames[] = {"ConfigError",          "FabricError",     "RegistrationError",
                                             "PeerUnreachableError", "WouldBlockError", "ClosedError",
                                             "ProtocolError",        "StuckError",      "InternalError"};
    const auto kind = error.kind();
    auto type = py::module_::import("fabric_kv.errors").attr(kNames[static_cast<int>(kind)]);
    py::dict fields;
    if (kind == ErrorKind::kFabric || kind == ErrorKind::kRegistration || kind == ErrorKind::kUnreachable ||
        kind == ErrorKind::kStuck) {
        const auto& op = error.op();
        if (!op.op.empty()) fields["op"] = op.op;
        if (op.fi_errno) fields["fi_errno"] = op.fi_errno;
        if (!op.provider.empty()) fields["provider"] = op.provider;
        if (!op.nic.empty()) fields["nic"] = op.nic;
    }
    const auto value = type(error.what(), **fields);
    PyErr_SetObject(type.ptr(), value.ptr());
}

namespace {

// Item `index` of a piece, an integer below 2^bits.
template <typename Integer = std::uint64_t>
Integer to_size(const py::tuple& piece, py::ssize_t index, const char* name, int bits = 63) {
    const py::handle item = PyTuple_GET_ITEM(piece.ptr(), index);
    const auto value = py::reinterpret_steal<py::object>(PyNumber_Index(item.ptr()));
    const auto size = value ? PyLong_AsUnsignedLongLong(value.ptr()) : 0;
    if (PyErr_Occurred() || size >> bits) {
        PyErr_Clear();
        throw Error(ErrorKind::kConfig, std::string(name) + "=" + py::str(item).cast<std::string>() +
                                            " has the wrong type or is out of range: it must be an integer in [0, 2^" +
                                            std::to_string(bits) + ")");
    }
    return static_cast<Integer>(size);
}

PagePiece to_piece(const py::tuple& t) {
    PagePiece piece;
    piece.src = t[0].cast<std::shared_ptr<Region>>();
    piece.src_offset = to_size(t, 1, "src_offset");
    piece.src_stride = to_size(t, 2, "src_stride");
    piece.dst = t[3].cast<std::shared_ptr<RemoteRegion>>();
    piece.dst_offset = to_size(t, 4, "dst_offset");
    piece.dst_stride = to_size(t, 5, "dst_stride");
    piece.nbytes = to_size(t, 6, "nbytes");
    piece.rows = to_size(t, 7, "rows", 32);
    piece.src_row_stride = to_size(t, 8, "src_row_stride");
    piece.dst_row_stride = to_size(t, 9, "dst_row_stride");
    piece.layer = to_size<std::uint16_t>(t, 10, "layer", 16);
    return piece;
}

}  // namespace

Engine::Prepared to_prepared(std::shared_ptr<Peer> peer, const py::list& pieces) {
    Engine::Prepared prepared{std::move(peer), {}, {}};
    prepared.pieces.reserve(pieces.size());
    prepared.lists.reserve(pieces.size());
    for (const auto& item : pieces) {
        const auto piece = item.cast<py::tuple>();
        if (piece.size() != 12) throw Error(ErrorKind::kInternal, "a piece has 12 fields");
        prepared.pieces.push_back(to_piece(piece));
        prepared.lists.push_back(to_size<std::uint32_t>(piece, 11, "lists", 16));
    }
    return prepared;
}

Pages to_pages(const py::array& array) {
    const auto dtype = array.dtype();
    if (array.ndim() != 1) throw Error(ErrorKind::kConfig, "page indices must be one-dimensional");
    if (array.size() == 0) return make_pages({});
    if (dtype.byteorder() != '=' && dtype.byteorder() != '|')
        throw Error(ErrorKind::kConfig, "page indices must be in this machine's byte order");
    switch (dtype.kind() << 8 | static_cast<int>(array.itemsize())) {
        case 'i' << 8 | 1:
            return copy_pages<std::int8_t>(array);
        case 'i' << 8 | 2:
            return copy_pages<std::int16_t>(array);
        case 'i' << 8 | 4:
            return copy_pages<std::int32_t>(array);
        case 'i' << 8 | 8:
            return copy_pages<std::int64_t>(array);
        case 'u' << 8 | 1:
            return copy_pages<std::uint8_t>(array);
        case 'u' << 8 | 2:
            return copy_pages<std::uint16_t>(array);
        case 'u' << 8 | 4:
            return copy_pages<std::uint32_t>(array);
        case 'u' << 8 | 8:
            return copy_pages<std::uint64_t>(array);  // what does not fit comes out negative, and is refused
        default:
            throw Error(ErrorKind::kConfig, "page indices must be integers");
    }
}

namespace {

// Of an array, which is copied, or of a PageList, which is shared.
Pages copied_or_shared(py::handle pages) {
    if (py::isinstance<py::array>(pages)) return to_pages(py::reinterpret_borrow<py::array>(pages));
    return pages.cast<Pages>();
}

}  // namespace

Engine::PageLists to_page_lists(const py::list& lists) {
    Engine::PageLists native;
    native.reserve(lists.size());
    for (const auto& item : lists) {
        const auto pair = item.cast<py::tuple>();
        native.emplace_back(copied_or_shared(pair[0]), copied_or_shared(pair[1]));
    }
    return native;
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
            return py::make_tuple(kind, to_bytes(e.peer), e.error.text, e.outcome == Outcome::kClosed);
        case Event::kFault:
            return py::make_tuple(kind, e.group, to_tuple(e.error));
        case Event::kStalled:
            return py::make_tuple(kind, e.group, to_tuple(e.error), static_cast<double>(e.id) / kSecond, e.bytes);
        case Event::kHeldUp:
            return py::make_tuple(kind, to_bytes(e.peer), e.transfers, e.error.text);
    }
    throw Error(ErrorKind::kInternal, "unknown event kind");
}

}  // namespace fkv
