// A message with data added to it, as libfabric's fi_senddata(3) sends it and we never do.
#include <gtest/gtest.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>

#include <array>
#include <vector>

#include "base/clock.h"
#include "fabric/nic.h"
#include "ofi/discover.h"
#include "ofi/library.h"
#include "ofi/ofi_nic.h"

namespace fkv::test {
namespace {

constexpr std::int64_t kPatienceNs = 30 * kSecond;

std::vector<ofi::InfoPtr> nics_of(const std::string& provider) {
    return ofi::find_nics(
        {provider, provider == "shm" ? std::vector<std::string>{} : std::vector<std::string>{"127.0.0.1"}});
}

// A program that is not one of ours: an endpoint that sends such messages.
class Stranger {
  public:
    explicit Stranger(const std::string& provider) : info_(std::move(nics_of(provider).front())) {
        check(ofi::Library::get().fabric(info_->fabric_attr, &fabric_, nullptr));
        check(fi_domain(fabric_, info_.get(), &domain_, nullptr));
        fi_cq_attr cq{};
        cq.format = FI_CQ_FORMAT_DATA;
        check(fi_cq_open(domain_, &cq, &cq_, nullptr));
        fi_av_attr av{};
        check(fi_av_open(domain_, &av, &av_, nullptr));
        check(fi_endpoint(domain_, info_.get(), &endpoint_, nullptr));
        check(fi_ep_bind(endpoint_, &cq_->fid, FI_TRANSMIT | FI_RECV));
        check(fi_ep_bind(endpoint_, &av_->fid, 0));
        check(fi_enable(endpoint_));
    }
    ~Stranger() {
        for (fid* object :
             std::initializer_list<fid*>{&endpoint_->fid, &av_->fid, &cq_->fid, &domain_->fid, &fabric_->fid})
            fi_close(object);
    }
    Stranger(const Stranger&) = delete;
    Stranger& operator=(const Stranger&) = delete;

    void meet(const std::vector<std::byte>& address) {
        ASSERT_EQ(fi_av_insert(av_, address.data(), 1, &peer_, 0, nullptr), 1);
    }
    // False: not now.
    bool send(std::uint32_t data) {
        poll();
        return fi_senddata(endpoint_, word_.data(), word_.size(), nullptr, data, peer_, &context_) == 0;
    }
    void poll() {
        std::array<fi_cq_data_entry, 8> entries;
        fi_cq_read(cq_, entries.data(), entries.size());
    }

  private:
    static void check(int rc) { ASSERT_EQ(rc, 0); }

    ofi::InfoPtr info_;
    fid_fabric* fabric_ = nullptr;
    fid_domain* domain_ = nullptr;
    fid_cq* cq_ = nullptr;
    fid_av* av_ = nullptr;
    fid_ep* endpoint_ = nullptr;
    fi_addr_t peer_ = FI_ADDR_UNSPEC;
    fi_context2 context_{};
    std::array<std::byte, 8> word_{};
};

class ForeignMessage : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Providers, ForeignMessage, ::testing::Values("tcp", "net", "shm"));

// Taken for an immediate, it would keep the receive that it has used up: 64 of them, and nobody is heard any more.
TEST_P(ForeignMessage, uses_up_its_receive_and_counts_nothing) {
    const std::string provider = GetParam();
    const auto victim = ofi::open_nic(std::move(nics_of(provider).front()));
    std::array<std::byte, 4 * 64> buffer{};
    const auto memory = victim->register_memory(buffer.data(), buffer.size());
    std::array<OpContext, 4> receives{};
    for (std::size_t i = 0; i < receives.size(); ++i)
        ASSERT_EQ(victim->post_recv({&buffer[64 * i], memory->local_desc(), 64, {}, &receives[i]}), PostResult::kOk);
    Stranger stranger(provider);
    stranger.meet(victim->address());

    std::size_t sent = 0, received = 0;
    for (const auto end = now_ns() + kPatienceNs; received < receives.size() && now_ns() < end;) {
        if (sent < receives.size())
            sent += stranger.send(0xfffffff0);
        else
            stranger.poll();
        std::array<Completion, 8> completions;
        const int n = victim->poll(completions);
        for (int i = 0; i < n; ++i, ++received) {
            EXPECT_EQ(completions[i].kind, Completion::kReceived);
            EXPECT_FALSE(completions[i].has_imm);
            EXPECT_EQ(completions[i].nbytes, 8u);
            EXPECT_NE(completions[i].context, nullptr);
        }
    }
    EXPECT_EQ(received, receives.size());
    victim->close_endpoint();
}

}  // namespace
}  // namespace fkv::test
