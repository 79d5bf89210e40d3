// What the contract suites share: the fabrics under test, and the record of what each was seen to do.
//
// FABRIC_KV_CONTRACT_PROVIDER=verbs (and FABRIC_KV_CONTRACT_NICS=rxe0,rxe1) tests that provider instead of the
// standard list; FABRIC_KV_CONTRACT_PATIENCE=20 multiplies every bound, for emulated machines; FABRIC_KV_SEED=7 sets
// the seed of the fake fabric. FABRIC_KV_LIBFABRIC_HOME chooses the libfabric, as everywhere.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "fake/fake_fabric.h"
#include "nic_pair.h"

namespace fkv::test {

struct Subject {
    std::string name;                    // of the test
    std::string provider;                // libfabric's name for it; empty: the fake
    std::vector<std::string> nics = {};  // one for both ends, or one for each
    fake::FakeProfile profile = {};
    bool two_processes = false;  // each end has a process of its own, and this one only looks on
};

// What a provider is known to do where fabrics differ. Measured by these very tests; an entry that is not true any more
// fails its test, so the list cannot go stale unnoticed. The reasons are in docs/providers.md.
struct Habits {
    bool checks_keys = true;  // a wrong key, or a range beyond the registration, is refused
    // Writes of at least so many bytes without an immediate are not checked.
    std::uint64_t unchecked_from_bytes = ~std::uint64_t{0};
    bool fail_stop = false;          // after a failed write no later immediate arrives
    bool tells_of_refusal = true;    // a delivered write that was refused is not reported as done
    bool recovers = true;            // from a refused write, by itself or with a new entry in the address table
    bool survives_close = true;      // closing an endpoint with writes into it under way
    bool survives_departure = true;  // a sender that leaves in the middle of a write
    bool survives_removal = true;    // removing a peer with operations of either side under way
    bool close_stops_reads = true;   // a closed endpoint's memory is not read any more

    bool checks(std::uint64_t nbytes, bool with_imm) const {
        return checks_keys && (with_imm || nbytes < unchecked_from_bytes);
    }
};
Habits habits_of(const Subject& subject, const NicInfo& info);

class Contract : public ::testing::TestWithParam<Subject> {
  protected:
    void SetUp() override;  // skips, naming what is missing, where the provider is not there
    void TearDown() override;

    // `arena` where the end may have a process of its own.
    std::unique_ptr<Nic> open(std::size_t which = 0, const Arena* arena = nullptr);
    std::unique_ptr<NicPair> make_pair(std::size_t memory_bytes = 1 << 20);
    std::unique_ptr<NicPair> make_pair_here();  // both ends in this process
    std::unique_ptr<End> make_end(std::size_t which, std::size_t memory_bytes);
    bool is_fake() const { return GetParam().provider.empty(); }

    // Long enough for whatever is under way to land. Bounded by polls on the fake, by time elsewhere.
    void settle(NicPair& pair);
    milliseconds patience(int ms) const;

    // The process of an end, on the fake and in two processes.
    void kill(End& end);
    void stop(End& end);
    void go_on(End& end);
    bool alive(const End& end) const;

    // Large enough that a software provider is often in the middle of one.
    std::size_t large() const { return std::min<std::uint64_t>(info_.max_msg_bytes, 512 << 10); }
    // Posts so many large writes, page by page, and polls until `seen` immediates came.
    std::vector<Posted*> start_writes(NicPair& pair, End& from, End& to, std::size_t count, std::size_t seen,
                                      std::optional<RemoteMemory> where = {});
    static bool all_ended(const std::vector<Posted*>& ops) {
        return std::all_of(ops.begin(), ops.end(), [](const auto* op) { return op->num_ends > 0; });
    }

    // Into the table that is printed at the end.
    void record(const std::string& what, const std::string& value);
    void record_if(const std::string& what, bool value) { record(what, value ? "yes" : "no"); }

    NicInfo info_{};
    std::unique_ptr<fake::FakeFabric> fabric_;

  private:
    int crashes_before_ = 0;
};

// gtest looks for a function of this name: NOLINTNEXTLINE(readability-identifier-naming)
inline void PrintTo(const Subject& subject, std::ostream* out) { *out << subject.name; }

std::vector<Subject> subjects();
// The same, libfabric's providers with a process for each end.
std::vector<Subject> subjects_in_two_processes();
inline std::string subject_name(const ::testing::TestParamInfo<Subject>& subject) { return subject.param.name; }

// How operations of `end` ended: "success", "silence", "errno13", "errno5_without_context" or several of them.
std::string ends_of(const std::vector<Posted*>& ops, const End& end);

// main() of a contract suite: serves a NIC to another such process, or runs the tests.
int contract_main(int argc, char** argv);

}  // namespace fkv::test
