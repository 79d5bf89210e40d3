// How operations, calls and whole NICs go wrong.
#include <algorithm>
#include <cerrno>

#include "fake/world.h"

namespace fkv::fake {

OpError World::error_of(const NicState& nic, const char* op, int fi_errno, const std::string& why) const {
    return {fi_errno, fi_errno, op, nic.info.provider, nic.info.domain, why + " [" + where() + "]"};
}

void World::misused(const NicState& nic, const std::string& what) {
    violations.push_back(nic.info.domain + ": " + what + " [" + where() + "]");
}

void World::fail(Op& op, int fi_errno, const std::string& why, Action how) {
    auto& src = nics[op.view.src];
    op.target_done = true;
    op.target.held = op.back.held = 0;
    // What was cut off takes nobody else along.
    if (is_ordered(op) && !is_cut_off(op)) broken[{src.id, op.view.dst}] = ~std::uint64_t{0};
    // What was reported as done may still be lost with its target.
    if (src.gone || (op.reported && nics[op.view.dst].gone)) return;
    if (op.reported && src.profile.silent_refusals) return;
    const char* name = op.view.kind == OpKind::kWrite ? "write" : op.view.kind == OpKind::kRead ? "read" : "send";
    auto error = error_of(src, name, fi_errno, why);
    op.failed = true;
    op.error = std::move(error);
    // Where success was reported too early, all that is left is an entry that names nobody.
    op.source_done = false;
    op.with_context = how == Action::kFail && !op.reported;
    op.as_receive = how == Action::kFailAsReceive;
    op.back = {clock + below((fi_errno == EHOSTDOWN ? src.profile.death_delay : src.profile.max_delay) + 1), 0, true};
}

bool World::pass_rules(Op& op, Track& track, Step step) {
    if (track.ruled) return true;
    track.ruled = true;
    for (auto& held : rules) {
        const auto& rule = held.rule;
        if (rule.step != step || held.fired >= rule.times) continue;
        if (rule.match && !rule.match(op.view)) continue;
        if (held.matched++ < rule.skip || below(rule.one_in)) continue;
        ++held.fired;
        rule_fired.notify_all();
        if (!act(op, track, held)) return false;
    }
    return true;
}

bool World::act(Op& op, Track& track, HeldRule& held) {
    const auto& rule = held.rule;
    if (rule.call) rule.call(op.view);
    switch (rule.action) {
        case Action::kPass:
            return true;
        case Action::kHold:
            track.held = held.id;
            return false;
        case Action::kFail:
        case Action::kFailNoContext:
        case Action::kFailAsReceive:
            fail(op, rule.fi_errno, "failed by a rule", rule.action);
            return false;
        case Action::kKillSource:
            kill(op.view.src, rule.death);
            return !op.target_done;
        case Action::kKillTarget:
            kill(op.view.dst, rule.death);
            return !op.target_done;
        case Action::kFreezeSource:
            freeze(op.view.src, true);
            break;
        case Action::kFreezeTarget:
            freeze(op.view.dst, true);
            break;
    }
    // Who is frozen makes no step of its own.
    const bool by_source = rule.step == Step::kLeave || rule.step == Step::kTellSource;
    const auto& runner = nics[by_source ? op.view.src : op.view.dst];
    return runner.profile.offloaded || !runner.frozen;
}

std::vector<NicId> World::process_of(NicId nic) const {
    std::vector<NicId> members;
    const auto process = nics[nic].profile.process;
    for (const auto& other : nics)
        if (other.id == nic || (process && other.profile.process == process)) members.push_back(other.id);
    return members;
}

void World::freeze(NicId nic, bool frozen) {
    for (const NicId id : process_of(nic)) {
        nics[id].frozen = frozen;
        if (nics[id].bell) nics[id].bell->ring();
    }
}

void World::kill(NicId nic, Death death) {
    for (const NicId id : process_of(nic)) {
        auto& dying = nics[id];
        if (dying.gone) continue;
        // To the killed side its device has failed: everything that it posted is reported, so that it can clean up.
        auto report = [&](const char* name, OpContext* context, bool receive) {
            Entry entry{true, receive, !receive};
            entry.failure = {context, error_of(dying, name, ENODEV, "this NIC was killed")};
            dying.cq.push_back(std::move(entry));
        };
        for (const auto& op : ops) {
            if (op.view.src == id && !op.source_done && !op.reported) report("write", op.context, false);
            if (op.view.dst == id && !op.target_done && op.receive.op.context)
                report("recv", op.receive.op.context, true);
        }
        for (const auto& receive : dying.receives) report("recv", receive.op.context, true);
        dying.receives.clear();
        leave(dying, death);
        dying.frozen = false;
        if (dying.bell) dying.bell->ring();
    }
}

// From here on nothing touches the NIC's memory. What it had posted is partly on its way already.
void World::leave(NicState& nic, Death death) {
    nic.gone = true;
    nic.death = death;
    for (auto& op : ops) {
        if (op.view.src == nic.id && !op.target_done && !op.on_wire && op.step <= Step::kLandLast) {
            if (percent(50))
                take_onto_wire(op);
            else
                op.target_done = true;
        }
        if (op.view.src == nic.id) op.source_done = true;
        if (op.view.src == nic.id && op.back.held) op.back.held = 0;
        if (op.view.dst == nic.id && !op.target_done && op.target.held) op.target.held = 0;
    }
}

void World::close_endpoint(NicState& nic) {
    if (!nic.gone) leave(nic, nic.profile.on_close);
    nic.closed = true;
    nic.cq.clear();
    nic.receives.clear();
    nic.contexts.clear();
}

void World::close_mr(NicState& nic, std::uint64_t rkey) {
    const auto found = nic.mrs.find(rkey);
    if (found == nic.mrs.end()) return;
    const std::uint64_t id = found->second.id;
    for (const auto& receive : nic.receives)
        if (receive.local_mr == id) misused(nic, "the registration of a posted receive was closed");
    for (auto& op : ops) {
        const bool unread = !op.source_done && !op.on_wire && op.step <= Step::kLandLast && !op.target_done;
        if (op.view.src == nic.id && op.uses_local_mr(id) && unread) {
            misused(nic, "the registration of the source of operation " + std::to_string(op.view.id) +
                             " was closed before its completion");
            fail(op, EACCES, "the source is not registered any more");
        }
        if (op.view.dst != nic.id || !op.uses_mr(id) || op.target_done) continue;
        if (nic.profile.mr_close == MrClose::kFlush && !nic.gone) {
            if (op.step == Step::kLandFirst) land(op, true);
            if (op.step <= Step::kLandLast) land(op, false);
            op.step = std::max(op.step, Step::kTellTarget);
        }
    }
    nic.mrs.erase(found);
}

int World::call_fails(Call call, NicId nic) {
    for (auto& fault : faults) {
        if (fault.call != call || (fault.nic != kAnyNic && fault.nic != nic) || fault.times == 0) continue;
        if (fault.skip) {
            --fault.skip;
            continue;
        }
        --fault.times;
        return fault.fi_errno;
    }
    return 0;
}

}  // namespace fkv::fake
