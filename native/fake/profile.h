// How one NIC of the fake fabric behaves: what it grants, its limits, and its habits.
//
// Delays are in steps of the fabric's own clock: each poll of any NIC is one step, so nothing depends on wall time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace fkv::fake {

// What peers notice of a NIC that died or was closed.
enum class Death : std::uint8_t {
    kErrors,  // their operations fail after a while
    kSilent,  // their operations never end: only closing their own endpoint gets rid of them
};

// What closing a registration does to a write that was accepted but has not landed completely.
enum class MrClose : std::uint8_t {
    kFlush,     // it lands before the close returns, as behind a real NIC
    kOutlived,  // the rest may land later, as where software was already receiving the payload
};

struct FakeProfile {
    // Granted: NicInfo says the same.
    std::string provider = "fake";
    std::uint64_t max_msg_bytes = 16384;
    std::size_t tx_depth = 16;
    std::size_t rx_depth = 16;
    std::size_t iov_limit = 1;      // places of one write on our side ...
    std::size_t rma_iov_limit = 1;  // ... and at the target
    std::uint64_t link_bps = 0;     // only told, of no effect here
    bool virtual_addresses = true;
    bool provider_keys = true;
    bool local_mr = true;
    bool endpoint_mr = false;
    bool ordered = false;  // in order and fail-stop from NIC to NIC, where both ends say so
    bool imm_uses_recv = false;
    bool wait_fd = false;

    // Limits that a provider does not announce.
    std::uint64_t max_mr_bytes = 4 << 20;
    std::size_t max_mrs = 4096;

    // Habits.
    unsigned max_delay = 12;        // steps between two stages of an operation: 0 to this
    unsigned death_delay = 40;      // steps until a peer's death is reported
    std::uint64_t split_bytes = 8;  // payloads from here on land in two parts, in either order unless `ordered`
    // Of a hundred operations so many may be reported to the sender before the target has accepted them. Should such
    // an operation fail later, the error has no context. Writes are reported early only where `ordered`, as on TCP.
    unsigned early_percent = 25;
    bool reconnects = false;       // where `ordered`: a failure loses what is in flight, and later posts pass again
    bool silent_refusals = false;  // there is no such error: tcp and shm of libfabric do that
    unsigned eagain_percent = 10;  // of a hundred posts so many start a storm of kAgain ...
    unsigned eagain_polls = 4;     // ... that ends after at most so many polls of the NIC, and never by posting
    bool offloaded = true;         // data moves without polling here; else only while this NIC is polled
    bool checks_keys = true;       // false: remote addresses are taken as they come, registered or not
    MrClose mr_close = MrClose::kFlush;
    bool shared_memory = false;  // NicInfo says the same
    Death on_close = Death::kErrors;

    // NICs with the same number other than 0 belong to one process: they die and stop together.
    std::uint32_t process = 0;

    // The least that a provider may grant: unordered, provider keys, virtual addresses, local descriptors (EFA).
    static FakeProfile strict() { return {}; }

    // A pair that stays broken is fail-stop whatever it reports; else no write may be said to be done before it is.
    bool is_fail_stop() const { return ordered && (!reconnects || (early_percent == 0 && !silent_refusals)); }

    // In order, fail-stop, moved by software on both sides, reported to the sender early.
    static FakeProfile fail_stop() {
        FakeProfile profile;
        profile.ordered = true;
        profile.local_mr = false;
        profile.provider_keys = false;
        profile.virtual_addresses = false;
        profile.offloaded = false;
        profile.mr_close = MrClose::kOutlived;
        return profile;
    }

    // Connections of a real NIC beneath datagrams (verbs;ofi_rxm): a write that fails is told, it takes along what was
    // posted behind it, and later posts may go over a new connection.
    static FakeProfile connected() {
        FakeProfile profile;
        profile.ordered = true;
        profile.reconnects = true;
        profile.early_percent = 0;
        profile.imm_uses_recv = true;
        return profile;
    }

    // What TCP really is: in order, but not fail-stop. A refused write takes the connection and all writes behind it
    // down, most of them reported as done already, and the next post connects again.
    static FakeProfile tcp() {
        FakeProfile profile = fail_stop();
        profile.reconnects = true;
        profile.silent_refusals = true;
        profile.early_percent = 90;
        return profile;
    }
};

}  // namespace fkv::fake
