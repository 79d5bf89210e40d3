#include "fake/fake_fabric.h"

#include <algorithm>
#include <cstring>

#include "fake/world.h"

namespace fkv::fake {

FakeFabric::FakeFabric(std::uint64_t seed) : world_(std::make_shared<World>()) {
    world_->seed = seed;
    world_->random.seed(seed);
    world_->magic = world_->random();
}

std::unique_ptr<Nic> FakeFabric::open_nic(const FakeProfile& profile) {
    std::lock_guard lock(world_->mutex);
    const auto id = static_cast<NicId>(world_->nics.size());
    NicState nic;
    nic.id = id;
    nic.profile = profile;
    nic.info = {.provider = profile.provider,
                .fabric = "fake",
                .domain = "fake" + std::to_string(id),
                .source = "fake" + std::to_string(id),
                .max_msg_bytes = profile.max_msg_bytes,
                .tx_depth = profile.tx_depth,
                .rx_depth = profile.rx_depth,
                .cq_data_bytes = 4,
                .iov_limit = profile.iov_limit,
                .rma_iov_limit = profile.rma_iov_limit,
                .link_bps = profile.link_bps,
                .virtual_addresses = profile.virtual_addresses,
                .provider_keys = profile.provider_keys,
                .local_mr = profile.local_mr,
                .endpoint_mr = profile.endpoint_mr,
                .ordered_writes = profile.ordered,
                .fail_stop = profile.is_fail_stop(),
                .imm_uses_recv = profile.imm_uses_recv,
                .wait_fd = profile.wait_fd,
                .nic_checks_keys = profile.checks_keys && profile.mr_close == MrClose::kFlush,
                .shared_memory = profile.shared_memory};
    if (const int fi_errno = world_->call_fails(Call::kOpen, id)) {
        auto error = world_->error_of(nic, "fi_domain", fi_errno, "opening failed by a fault");
        throw Error(ErrorKind::kFabric, "fi_domain failed on " + nic.info.domain + ": " + error.text, error);
    }
    if (profile.wait_fd) nic.bell = std::make_unique<EventFd>();
    world_->nics.push_back(std::move(nic));
    return make_nic(world_, id);
}

RuleId FakeFabric::add_rule(Rule rule) {
    std::lock_guard lock(world_->mutex);
    const RuleId id = world_->next_id++;
    world_->rules.push_back({id, std::move(rule)});
    return id;
}

void FakeFabric::release(RuleId rule, Action then) {
    std::lock_guard lock(world_->mutex);
    const auto found =
        std::find_if(world_->rules.begin(), world_->rules.end(), [&](auto& held) { return held.id == rule; });
    if (found == world_->rules.end()) return;
    found->rule.times = 0;
    for (auto& op : world_->ops) {
        if (op.target.held != rule && op.back.held != rule) continue;
        if (op.target.held == rule) op.target.held = 0;
        if (op.back.held == rule) op.back.held = 0;
        if (then != Action::kPass) world_->fail(op, found->rule.fi_errno, "failed on release", then);
    }
    for (auto& nic : world_->nics)
        if (nic.bell && !nic.closed) nic.bell->ring();
}

unsigned FakeFabric::num_fired(RuleId rule) const {
    std::lock_guard lock(world_->mutex);
    for (const auto& held : world_->rules)
        if (held.id == rule) return held.fired;
    return 0;
}

bool FakeFabric::wait_fired(RuleId rule, unsigned count, std::chrono::milliseconds bound) const {
    std::unique_lock lock(world_->mutex);
    return world_->rule_fired.wait_for(lock, bound, [&] {
        for (const auto& held : world_->rules)
            if (held.id == rule) return held.fired >= count;
        return false;
    });
}

void FakeFabric::fail_call(const CallFault& fault) {
    std::lock_guard lock(world_->mutex);
    world_->faults.push_back(fault);
}

void FakeFabric::refuse(NicId src, NicId dst, bool refused) {
    std::lock_guard lock(world_->mutex);
    if (refused)
        world_->refused.insert({src, dst});
    else
        world_->refused.erase({src, dst});
}

void FakeFabric::kill(NicId nic, Death death) {
    std::lock_guard lock(world_->mutex);
    world_->kill(nic, death);
}

void FakeFabric::freeze(NicId nic) {
    std::lock_guard lock(world_->mutex);
    world_->freeze(nic, true);
}

void FakeFabric::thaw(NicId nic) {
    std::lock_guard lock(world_->mutex);
    world_->freeze(nic, false);
}

Stats FakeFabric::stats() const {
    std::lock_guard lock(world_->mutex);
    Stats stats = world_->stats;
    stats.steps = world_->clock;
    stats.in_flight = world_->ops.size();
    for (const auto& nic : world_->nics) {
        stats.open_nics += !nic.closed;
        stats.open_mrs += nic.mrs.size();
        stats.posted_receives += nic.receives.size();
    }
    return stats;
}

std::vector<std::string> FakeFabric::violations() const {
    std::lock_guard lock(world_->mutex);
    return world_->violations;
}

std::uint64_t FakeFabric::seed() const { return world_->seed; }

std::string FakeFabric::describe() const {
    std::lock_guard lock(world_->mutex);
    std::string text = world_->where() + ", " + std::to_string(world_->ops.size()) + " in flight";
    for (const auto& op : world_->ops)
        text += "\n  #" + std::to_string(op.view.id) + " " + std::to_string(op.view.src) + "->" +
                std::to_string(op.view.dst) +
                (op.view.kind == OpKind::kWrite  ? " write "
                 : op.view.kind == OpKind::kRead ? " read "
                                                 : " send ") +
                std::to_string(op.view.nbytes) + " bytes, coming step " + std::to_string(static_cast<int>(op.step)) +
                (op.target.held || op.back.held ? ", held" : "") + (op.target_done ? ", target done" : "") +
                (op.source_done ? ", source done" : "");
    for (const auto& what : world_->violations) text += "\n  violation: " + what;
    return text;
}

}  // namespace fkv::fake
