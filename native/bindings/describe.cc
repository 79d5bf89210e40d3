#include <algorithm>
#include <array>

#include "bindings/convert.h"

namespace py = pybind11;

namespace fkv {
namespace {

py::list to_list(const LatencyHistogram& histogram) {
    py::list buckets;
    for (std::size_t i = 0; i < LatencyHistogram::kNumBuckets; ++i) buckets.append(histogram.bucket(i));
    return buckets;
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
    d["fail_stop"] = info.fail_stop;
    d["imm_uses_recv"] = info.imm_uses_recv;
    d["wait_fd"] = info.wait_fd;
    d["wait_is_hint"] = rail.nic().wait_is_hint();
    d["nic_checks_keys"] = info.nic_checks_keys;
    d["shared_memory"] = info.shared_memory;
    d["device_memory"] = info.device_memory;
    d["dmabuf"] = info.dmabuf;
    d["ops"] = stats.ops.get();
    d["bytes"] = stats.bytes.get();
    d["completions"] = stats.completions.get();
    d["again"] = stats.again.get();
    d["errors"] = stats.errors.get();
    d["imms"] = stats.imms.get();
    d["messages"] = stats.messages.get();
    d["busy_ns"] = stats.busy.get_ns();
    // Read in this order: what has completed was posted before.
    const auto ended = stats.completions.get() + stats.errors.get();
    d["ops_in_flight"] = std::max(stats.ops.get(), ended) - ended;
    d["write_latency_us_log2"] = to_list(stats.write_latency);
    d["post_latency_ns_log2"] = to_list(stats.post_latency);
    return d;
}

}  // namespace

py::dict describe_group(Group& group) {
    py::list rails;
    for (auto& rail : group.rails()) rails.append(describe_rail(*rail));
    const auto& received = group.receiver().stats();
    py::dict d;
    d["rails"] = rails;
    d["cpus"] = group.options().cpus;
    d["progress_threads"] = group.has_nic_threads() ? "nic" : "group";
    d["transfers_in_flight"] = group.sender().in_flight();
    d["max_transfers"] = group.options().max_transfers;
    d["counters_in_use"] = group.counters().num_in_use();
    d["counters_poisoned"] = group.counters().num_poisoned();
    d["max_write_bytes"] = group.sender().max_write_bytes();
    d["stale_imms"] = received.stale_imms.get();
    d["violations"] = received.violations.get();
    d["malformed_frames"] = received.malformed_frames.get();
    d["dropped_imms"] = received.dropped_imms.get();
    d["sleeps"] = group.rest().sleeps();
    return d;
}

py::dict describe_peer(const Peer& peer) {
    std::uint64_t ops = 0, bytes = 0, errors = 0;
    std::array<std::uint64_t, LatencyHistogram::kNumBuckets> latency{};
    for (const auto& side : peer.sides) {
        for (std::size_t i = 0; i < latency.size(); ++i) latency[i] += side->stats.write_latency.bucket(i);
        ops += side->stats.ops.get();
        bytes += side->stats.bytes.get();
        errors += side->stats.errors.get();
    }
    py::dict d;
    d["ops"] = ops;
    d["bytes"] = bytes;
    d["errors"] = errors;
    d["write_latency_us_log2"] = latency;
    return d;
}

py::dict describe_offer(const ofi::Offer& offer) {
    py::dict d;
    d["provider"] = offer.provider;
    d["domain"] = offer.domain;
    d["fabric"] = offer.fabric;
    d["source"] = offer.source;
    d["rdma"] = offer.rdma;
    d["device"] = offer.device;
    d["pci"] = offer.pci;
    d["link_bps"] = offer.link_bps;
    d["port"] = offer.port;
    return d;
}

}  // namespace fkv
