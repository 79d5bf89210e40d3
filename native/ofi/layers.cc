#include "ofi/layers.h"

#include <rdma/fi_errno.h>

#include <cstring>

namespace fkv::ofi {
namespace {

constexpr std::size_t kImmBytes = 4;

bool is_layered(const fi_info& info) { return info.ep_attr->protocol == FI_PROTO_RXM; }

// fi_provider(7): names of layered providers are the one beneath, a semicolon, the upper one.
std::string beneath(const fi_info& info) {
    const std::string name = info.fabric_attr->prov_name;
    return name.substr(0, name.find(';'));
}

std::string domain_of(const fi_info& info) { return info.domain_attr->name ? info.domain_attr->name : ""; }

fi_info* connections_of(const std::string& provider) {
    const auto& library = Library::get();
    fi_info* hints = library.dupinfo(nullptr);
    if (!hints) throw Error(ErrorKind::kFabric, "fi_allocinfo failed: out of memory");
    hints->caps = FI_MSG | FI_RMA;
    hints->mode = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA;
    hints->ep_attr->type = FI_EP_MSG;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    hints->fabric_attr->prov_name = strdup(provider.c_str());
    fi_info* list = nullptr;
    const int rc = library.getinfo(kApiVersion, nullptr, nullptr, 0, hints, &list);
    library.freeinfo(hints);
    if (rc && rc != -FI_ENODATA) throw call_failed("fi_getinfo", rc, provider, "any");
    return rc ? nullptr : list;
}

}  // namespace

std::string why_no_immediates(const fi_info& info, const fi_info* connections) {
    if (!is_layered(info)) return {};
    bool found = false;
    for (const auto* connection = connections; connection; connection = connection->next) {
        if (domain_of(*connection) != domain_of(info)) continue;
        if (connection->domain_attr->cq_data_size >= kImmBytes) return {};
        found = true;
    }
    if (!found) return {};  // of another kind than we asked for: nothing is known
    return "NIC " + domain_of(info) + " cannot write with an immediate: provider " + info.fabric_attr->prov_name +
           " offers it, but the connections of " + beneath(info) +
           " that it would use have none (iWARP is so), and a write would never end";
}

bool is_fail_stop(const fi_info& info, const fi_info* connections) {
    if (!is_layered(info)) return false;
    for (const auto* connection = connections; connection; connection = connection->next)
        if (domain_of(*connection) == domain_of(info) && connection->ep_attr->protocol == FI_PROTO_RDMA_CM_IB_RC)
            return true;
    return false;
}

Layers::~Layers() {
    for (const auto& [provider, list] : connections_)
        if (list) Library::get().freeinfo(list);
}

const fi_info* Layers::connections_beneath(const fi_info& info) {
    if (!is_layered(info)) return nullptr;
    const auto provider = beneath(info);
    auto found = connections_.find(provider);
    if (found == connections_.end()) found = connections_.emplace(provider, connections_of(provider)).first;
    return found->second;
}

std::string Layers::why_no_immediates(const fi_info& info) {
    return ofi::why_no_immediates(info, connections_beneath(info));
}

bool Layers::is_fail_stop(const fi_info& info) { return ofi::is_fail_stop(info, connections_beneath(info)); }

}  // namespace fkv::ofi
