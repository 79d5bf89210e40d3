#include "ofi/discover.h"

#include <arpa/inet.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <random>
#include <string_view>

#include "ofi/layers.h"

namespace fkv::ofi {
namespace {

// The bytes of an IP address; none: it is something else.
std::vector<unsigned char> ip_address(const std::string& text) {
    std::vector<unsigned char> bytes(sizeof(in6_addr));
    // A scoped address (fe80::1%eth0) is an address too; inet_pton does not take the scope, nor brackets.
    const auto begin = text.starts_with('[') ? 1 : 0;
    const auto bare = text.substr(begin, text.find_first_of("%]") - begin);
    if (inet_pton(AF_INET6, bare.c_str(), bytes.data()) == 1) return bytes;
    bytes.resize(sizeof(in_addr));
    if (inet_pton(AF_INET, bare.c_str(), bytes.data()) != 1) bytes.clear();
    return bytes;
}

bool is_ip_address(const std::string& text) { return !text.starts_with('[') && !ip_address(text).empty(); }

struct HostPort {
    std::string host;
    std::string port;  // empty: any free one
};

// "10.0.0.5", "10.0.0.5:7000", "::1", "[::1]", "[::1]:7000"; nothing if it is no address.
std::optional<HostPort> parse_address(const std::string& text) {
    if (is_ip_address(text)) return HostPort{text, {}};
    const bool bracketed = text.starts_with('[');
    const auto end = bracketed ? text.find(']') : text.rfind(':');
    if (end == std::string::npos) return {};
    HostPort found{bracketed ? text.substr(1, end - 1) : text.substr(0, end), {}};
    auto rest = text.substr(bracketed ? end + 1 : end);
    if (rest.starts_with(':')) found.port = rest.substr(1);
    const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
    const bool is_port = std::all_of(found.port.begin(), found.port.end(), is_digit) && found.port.size() <= 5 &&
                         (found.port.empty() || std::stoul(found.port) <= 65535);
    if (!is_ip_address(found.host) || !is_port || rest.size() != found.port.size() + !found.port.empty()) return {};
    return found;
}

InfoPtr make_hints(const std::string& provider, bool device_memory) {
    InfoPtr hints(Library::get().dupinfo(nullptr));
    if (!hints) throw Error(ErrorKind::kFabric, "fi_allocinfo failed: out of memory");
    hints->caps = FI_MSG | FI_RMA;
    // Modes that we comply with: a context of fi_context2 in every operation, and immediates that use up a receive.
    hints->mode = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA;
    hints->ep_attr->type = FI_EP_RDM;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
    hints->domain_attr->threading = FI_THREAD_SAFE;  // registration runs beside the progress thread
    hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
    hints->domain_attr->cq_data_size = 4;  // immediates are 32 bits
    if (device_memory) {
        // Only where it is asked for: it leaves out providers without, and may cost those with it their inline sends.
        hints->caps |= FI_HMEM;
        hints->domain_attr->mr_mode |= FI_MR_HMEM;
    }
    if (!provider.empty()) hints->fabric_attr->prov_name = strdup(provider.c_str());
    return hints;
}

InfoPtr query(const std::string& provider, const HostPort& address, bool device_memory = false) {
    auto hints = make_hints(provider, device_memory);
    // FI_MR_DMABUF is of a later version of the API, and providers go by the version that was asked for.
    const auto api =
        device_memory ? std::max(kApiVersion, std::min(Library::get().version, kDmabufVersion)) : kApiVersion;
    fi_info* list = nullptr;
    const char* node = address.host.empty() ? nullptr : address.host.c_str();
    const char* service = address.port.empty() ? nullptr : address.port.c_str();
    const int rc = Library::get().getinfo(api, node, service, node ? FI_SOURCE : 0, hints.get(), &list);
    if (rc == -FI_ENODATA) return nullptr;
    if (rc)
        throw call_failed("fi_getinfo", rc, provider.empty() ? "any" : provider,
                          address.host.empty() ? "any" : address.host);
    return InfoPtr(list);
}

std::string pci_text(const fi_bus_attr* bus) {
    if (!bus || bus->bus_type != FI_BUS_PCI) return {};
    const auto& pci = bus->attr.pci;
    char text[sizeof "0000:00:00.0"] = {};
    std::snprintf(text, sizeof text, "%04x:%02x:%02x.%x", pci.domain_id, pci.bus_id, pci.device_id,
                  pci.function_id & 0xfu);
    return text;
}

Offer to_offer(const fi_info* info) {
    Offer offer{.provider = info->fabric_attr->prov_name,
                .domain = info->domain_attr->name ? info->domain_attr->name : "",
                .fabric = info->fabric_attr->name ? info->fabric_attr->name : "",
                .source = source_text(info),
                .rdma = is_rdma(info)};
    if (!info->nic) return offer;
    if (const auto* device = info->nic->device_attr; device && device->name) offer.device = device->name;
    offer.pci = pci_text(info->nic->bus_attr);
    if (const auto* link = info->nic->link_attr) {
        offer.link_bps = link->speed;
        if (link->state != FI_LINK_UNKNOWN) offer.port = link->state == FI_LINK_UP ? "up" : "down";
    }
    return offer;
}

std::string list_text(const fi_info* list) {
    std::vector<std::string> lines;
    for (auto* info = list; info; info = info->next) {
        const auto offer = to_offer(info);
        auto line = "\n  provider=" + offer.provider + " nic=" + offer.domain + " fabric=" + offer.fabric;
        if (std::find(lines.begin(), lines.end(), line) == lines.end()) lines.push_back(std::move(line));
    }
    std::string text;
    for (const auto& line : lines) text += line;
    return text.empty() ? "\n  nothing" : text;
}

// shm names its endpoints after the process id. What a killed process left behind under that name keeps the next one
// with the same id, the same container started again for example, from opening its own: EBUSY.
void use_unique_name(fi_info* info) {
    constexpr char kScheme[] = "fi_shm://";
    if (!std::string_view(static_cast<const char*>(info->src_addr)).starts_with(kScheme)) return;
    std::random_device random;
    char name[64];
    std::snprintf(name, sizeof name, "%s%d-%08x%08x", kScheme, getpid(), random(), random());
    std::free(info->src_addr);  // fi_freeinfo(3) frees ours in its stead
    info->src_addr = strdup(name);
    info->src_addrlen = std::strlen(name) + 1;
}

// fi_getinfo(3) has put it in where it found the address itself.
void use_port(fi_info* info, const std::string& port) {
    const auto number = htons(static_cast<std::uint16_t>(std::stoul(port)));
    if (info->addr_format == FI_SOCKADDR_IN) static_cast<sockaddr_in*>(info->src_addr)->sin_port = number;
    if (info->addr_format == FI_SOCKADDR_IN6) static_cast<sockaddr_in6*>(info->src_addr)->sin6_port = number;
}

InfoPtr copy_of(const fi_info* info) {
    InfoPtr copy(Library::get().dupinfo(info));
    if (!copy) throw Error(ErrorKind::kFabric, "fi_dupinfo failed: out of memory");
    copy->next = nullptr;
    if (copy->addr_format == FI_ADDR_STR && copy->src_addr) use_unique_name(copy.get());
    return copy;
}

// rxd makes writes out of datagrams, which the other side's processor puts in place: no RDMA, whatever is beneath.
bool is_asked_for(const fi_info* info, const std::string& provider) {
    return info->ep_attr->protocol != FI_PROTO_RXD || provider.find("ofi_rxd") != std::string::npos;
}

bool is_loopback(const fi_info* info) {
    const std::string name = info->domain_attr->name ? info->domain_attr->name : "";
    return name == "lo";
}

}  // namespace

bool is_rdma(const fi_info* info) {
    std::vector<std::string> names;
    if (info->nic && info->nic->device_attr && info->nic->device_attr->name)
        names.push_back(info->nic->device_attr->name);
    if (info->domain_attr->name) {
        const std::string name = info->domain_attr->name;
        names.push_back(name);
        names.push_back(name.substr(0, name.rfind('-')));  // EFA calls its domains "rdmap0s6-rdm"
    }
    return std::any_of(names.begin(), names.end(), [](const std::string& name) {
        return !name.empty() && access(("/sys/class/infiniband/" + name).c_str(), F_OK) == 0;
    });
}

std::string source_text(const fi_info* info) {
    if (!info->src_addr) return {};
    char text[INET6_ADDRSTRLEN] = {};
    if (info->addr_format == FI_SOCKADDR_IN) {
        const auto* in = static_cast<const sockaddr_in*>(info->src_addr);
        return inet_ntop(AF_INET, &in->sin_addr, text, sizeof text) ? text : "";
    }
    if (info->addr_format == FI_SOCKADDR_IN6) {
        const auto* in6 = static_cast<const sockaddr_in6*>(info->src_addr);
        return inet_ntop(AF_INET6, &in6->sin6_addr, text, sizeof text) ? std::string("[") + text + "]" : "";
    }
    if (info->addr_format == FI_ADDR_STR)
        return std::string(static_cast<const char*>(info->src_addr),
                           strnlen(static_cast<const char*>(info->src_addr), info->src_addrlen));
    return {};
}

std::vector<Offer> list_offers(const std::string& provider) {
    std::vector<Offer> offers;
    const auto list = query(provider, {});
    Layers layers;
    for (auto* info = list.get(); info; info = info->next)
        if (is_asked_for(info, provider) && layers.why_no_immediates(*info).empty()) offers.push_back(to_offer(info));
    return offers;
}

std::vector<InfoPtr> find_nics(const NicRequest& request) {
    const bool device = request.device_memory;
    const auto list = query(request.provider, {}, device);
    if (device && !list)
        throw Error(ErrorKind::kFabric,
                    "provider '" + (request.provider.empty() ? "any" : request.provider) +
                        "' offers no endpoint that reaches device memory (FI_HMEM) in libfabric " +
                        version_text(Library::get().version) + " (" + Library::get().path +
                        "); without device memory it offers:" + list_text(query(request.provider, {}).get()) +
                        "\nHint: EngineOptions(device_memory=True) needs a libfabric that was built with CUDA, and its "
                        "driver");
    Layers layers;
    std::string refused;  // why, of what the request means
    auto usable = [&](const fi_info* info) {
        if (!is_asked_for(info, request.provider) || (request.provider.empty() && !is_rdma(info))) return false;
        const auto why = layers.why_no_immediates(*info);
        if (!why.empty()) refused = why;
        return why.empty();
    };
    std::vector<InfoPtr> found;
    if (request.nics.empty()) {
        const fi_info* choice = nullptr;
        for (auto* info = list.get(); info; info = info->next) {
            if (!usable(info)) continue;
            if (!choice) choice = info;
            // A peer on another host cannot reach a loopback address, so it is the last resort.
            if (!is_loopback(info)) {
                choice = info;
                break;
            }
        }
        if (!choice && !refused.empty()) throw Error(ErrorKind::kFabric, refused);
        if (!choice && request.provider.empty())
            throw Error(ErrorKind::kFabric,
                        "no RDMA NIC is usable through libfabric " + version_text(Library::get().version) + " (" +
                            Library::get().path + "); it offers:" + list_text(list.get()) +
                            "\nHint: software providers are used only when named: Engine(provider=\"tcp\") or \"shm\"");
        if (!choice)
            throw Error(ErrorKind::kFabric,
                        "provider '" + request.provider +
                            "' offers no reliable-datagram endpoint with RMA and 4-byte immediates in libfabric " +
                            version_text(Library::get().version) + " (" + Library::get().path +
                            "); without a provider's name it offers:" + list_text(query("", {}).get()));
        found.push_back(copy_of(choice));
        return found;
    }
    for (const auto& nic : request.nics) {
        refused.clear();
        const auto address = parse_address(nic);
        const auto bytes = address ? ip_address(address->host) : std::vector<unsigned char>();
        const auto means = [&](const fi_info* info) {
            return address ? bytes == ip_address(source_text(info))
                           : info->domain_attr->name && nic == info->domain_attr->name;
        };
        // verbs does not find a NIC by its IPv6 address, but lists it (1.17); tcp lists only one of 127.0.0.1, .2, ...
        const auto answer = address ? query(request.provider, *address, device) : nullptr;
        const fi_info* choice = nullptr;
        for (const auto* begin : {answer.get(), list.get()})
            for (auto* info = begin; info && !choice; info = info->next)
                if (means(info) && usable(info)) choice = info;
        if (!choice && !refused.empty()) throw Error(ErrorKind::kFabric, refused);
        if (!choice)
            throw Error(ErrorKind::kConfig, "NIC '" + nic + "' matches nothing that provider '" +
                                                (request.provider.empty() ? "any RDMA" : request.provider) +
                                                "' offers:" + list_text(list.get()));
        found.push_back(copy_of(choice));
        if (address && !address->port.empty()) use_port(found.back().get(), address->port);
    }
    return found;
}

}  // namespace fkv::ofi
