#include "contract.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <sstream>

#include "ofi/discover.h"
#include "ofi/ofi_nic.h"
#include "remote_nic.h"

namespace fkv::test {
namespace {

std::vector<std::string> split(const std::string& text) {
    std::vector<std::string> parts;
    std::istringstream stream(text);
    for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
    return parts;
}

std::string variable(const char* name) {
    const char* value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): tests never set it
    return value ? value : "";
}

std::uint64_t seed() {
    const auto text = variable("FABRIC_KV_SEED");
    return text.empty() ? 1 : std::stoull(text);
}

bool version_2() {
    try {
        return FI_VERSION_GE(ofi::Library::get().version, FI_VERSION(2, 0));
    } catch (const Error&) {
        return false;  // no libfabric: the tests say so when they skip
    }
}

// What was seen, by provider and libfabric version, in the order of seeing.
class Table : public ::testing::Environment {
  public:
    void add(const std::string& row, const std::string& what, const std::string& value) {
        auto& cells = rows_[row];
        const auto found = std::find_if(cells.begin(), cells.end(), [&](auto& cell) { return cell.first == what; });
        if (found == cells.end())
            cells.emplace_back(what, value);
        else if (found->second.find(value) == std::string::npos)
            found->second += "|" + value;  // both were seen
    }
    void TearDown() override {
        for (const auto& [row, cells] : rows_) {
            std::printf("contract: %s", row.c_str());
            for (const auto& [what, value] : cells) std::printf(" %s=%s", what.c_str(), value.c_str());
            std::printf("\n");
        }
    }

  private:
    std::map<std::string, std::vector<std::pair<std::string, std::string>>> rows_;
};

Table* table() {
    static auto* table = static_cast<Table*>(::testing::AddGlobalTestEnvironment(new Table));  // gtest owns it
    return table;
}

}  // namespace

std::vector<Subject> subjects() {
    auto list = subjects_in_two_processes();
    // shm is another thing between endpoints of one process, and nobody transfers there. What is named by hand is new
    // to us: it may crash.
    for (auto& subject : list) subject.two_processes = subject.provider == "shm" || subject.name == "named";
    return list;
}

std::vector<Subject> subjects_in_two_processes() {
    table();  // before the tests start
    std::vector<Subject> list;
    auto add = [&](const std::string& name, const std::string& provider, const std::vector<std::string>& nics) {
        list.push_back({.name = name, .provider = provider, .nics = nics, .profile = {}, .two_processes = true});
    };
    if (const auto provider = variable("FABRIC_KV_CONTRACT_PROVIDER"); !provider.empty()) {
        add("named", provider, split(variable("FABRIC_KV_CONTRACT_NICS")));
        return list;
    }
    auto receives = fake::FakeProfile::strict();
    receives.imm_uses_recv = true;
    auto sleepy = fake::FakeProfile::fail_stop();
    sleepy.wait_fd = true;
    list.push_back({.name = "fake_strict", .provider = "", .profile = fake::FakeProfile::strict()});
    list.push_back({.name = "fake_receives", .provider = "", .profile = receives});
    list.push_back({.name = "fake_fail_stop", .provider = "", .profile = sleepy});
    list.push_back({.name = "fake_connected", .provider = "", .profile = fake::FakeProfile::connected()});
    list.push_back({.name = "fake_tcp", .provider = "", .profile = fake::FakeProfile::tcp()});
    const std::vector<std::string> loopback = {"127.0.0.1"};
    add("tcp", "tcp", loopback);
    // On libfabric 1.x the name tcp opens tcp;ofi_rxm, and the native one is called net.
    version_2() ? add("tcp_rxm", "tcp;ofi_rxm", loopback) : add("net", "net", loopback);
    add("shm", "shm", {});
    return list;
}

void Contract::SetUp() {
    crashes_before_ = num_crashes_in_close();
    if (is_fake()) {
        fabric_ = std::make_unique<fake::FakeFabric>(seed());
        info_ = open()->info();
        return;
    }
    try {
        info_ = open()->info();
    } catch (const Error& error) {
        const std::string words = error.what();
        GTEST_SKIP() << GetParam().provider << " is not there: " << words.substr(0, words.find('\n'));
    }
}

void Contract::TearDown() {
    if (const int crashes = num_crashes_in_close(); crashes > crashes_before_) record("crashes_in_close", "yes");
    if (!fabric_) return;
    EXPECT_TRUE(fabric_->violations().empty()) << fabric_->describe();
    if (HasFailure()) std::printf("%s\n", fabric_->describe().c_str());
}

std::unique_ptr<Nic> Contract::open(std::size_t which, const Arena* arena) {
    if (is_fake()) return fabric_->open_nic(GetParam().profile);
    if (GetParam().two_processes && arena) {
        const auto& nics = GetParam().nics;
        return open_remote_nic(GetParam().provider, nics.empty() ? "" : nics[which % nics.size()], *arena);
    }
    ofi::NicRequest request{GetParam().provider, {}};
    if (const auto& nics = GetParam().nics; !nics.empty()) request.nics = {nics[which % nics.size()]};
    return ofi::open_nic(std::move(ofi::find_nics(request).front()));
}

std::unique_ptr<NicPair> Contract::make_pair(std::size_t memory_bytes) {
    std::size_t which = 0;
    return std::make_unique<NicPair>([&](const Arena& arena) { return open(which++, &arena); }, memory_bytes);
}

std::unique_ptr<NicPair> Contract::make_pair_here() {
    std::size_t which = 0;
    return std::make_unique<NicPair>([&](const Arena&) { return open(which++); });
}

std::unique_ptr<End> Contract::make_end(std::size_t which, std::size_t memory_bytes) {
    return std::make_unique<End>([&](const Arena& arena) { return open(which, &arena); }, memory_bytes);
}

milliseconds Contract::patience(int ms) const {
    static const int factor = [] {
        const auto text = variable("FABRIC_KV_CONTRACT_PATIENCE");
        return text.empty() ? 1 : std::stoi(text);
    }();
    return milliseconds(ms * factor);
}

void Contract::settle(NicPair& pair) {
    if (!is_fake()) return pair.drive_for(patience(100));
    int polls = 500;
    pair.drive([&] { return --polls == 0; }, patience(60'000));
}

void Contract::kill(End& end) {
    if (is_fake()) return fabric_->kill(fake::FakeFabric::id_of(*end.nic));
    dynamic_cast<RemoteNic&>(*end.nic).kill_now();
}

void Contract::stop(End& end) {
    if (is_fake()) return fabric_->freeze(fake::FakeFabric::id_of(*end.nic));
    dynamic_cast<RemoteNic&>(*end.nic).stop();
}

void Contract::go_on(End& end) {
    if (is_fake()) return fabric_->thaw(fake::FakeFabric::id_of(*end.nic));
    dynamic_cast<RemoteNic&>(*end.nic).go_on();
}

bool Contract::alive(const End& end) const {
    const auto* remote = dynamic_cast<const RemoteNic*>(end.nic.get());
    return !remote || remote->alive();
}

std::vector<Posted*> Contract::start_writes(NicPair& pair, End& from, End& to, std::size_t count, std::size_t seen,
                                            std::optional<RemoteMemory> where) {
    std::vector<Posted*> ops;
    for (std::uint32_t i = 0; i < count; ++i)
        ops.push_back(pair.write(from, to, i * large(), large(), i * large(), i, where));
    std::erase(ops, nullptr);
    pair.drive([&] { return to.imms.size() >= seen; }, patience(5000));
    return ops;
}

void Contract::record(const std::string& what, const std::string& value) {
    std::string row =
        is_fake() ? GetParam().name : info_.provider + " " + ofi::version_text(ofi::Library::get().version);
    if (GetParam().two_processes) row += " (two processes)";
    table()->add(row, what, value);
}

Habits habits_of(const Subject& subject, const NicInfo& info) {
    Habits habits;
    if (subject.provider.empty()) {
        habits.fail_stop = subject.profile.ordered && !subject.profile.reconnects;
    } else if (info.provider == "shm") {
        // The sender copies straight into the target's memory and asks nobody: all plain writes, on 2.x the larger
        // ones.
        habits.unchecked_from_bytes = version_2() ? 8192 : 0;
        habits.tells_of_refusal = !version_2();
        habits.survives_removal = false;
        habits.close_stops_reads = false;
    } else if (info.provider == "verbs;ofi_rxm") {
        habits.fail_stop = true;
        habits.recovers = false;
    } else if (info.provider == "tcp;ofi_rxm") {
        habits.survives_close = !version_2();
        habits.survives_departure = !version_2();
    }
    return habits;
}

std::string ends_of(const std::vector<Posted*>& ops, const End& end) {
    std::set<std::string> kinds;
    for (const auto* op : ops) {
        if (op->error)
            kinds.insert("errno" + std::to_string(op->error->fi_errno));
        else
            kinds.insert(op->num_ends ? "success" : "silence");
    }
    for (const auto& stray : end.stray_errors)
        kinds.insert("errno" + std::to_string(stray.error.fi_errno) + "_without_context" +
                     (stray.inbound ? "_inbound" : "") + (stray.error.op == "recv" ? "_as_recv" : ""));
    std::string text;
    for (const auto& kind : kinds) text += (text.empty() ? "" : "+") + kind;
    return text;
}

int contract_main(int argc, char** argv) {
    if (const auto status = serve_if_asked(argc, argv)) return *status;
    ::testing::InitGoogleTest(&argc, argv);
    return RUN_ALL_TESTS();
}

}  // namespace fkv::test
