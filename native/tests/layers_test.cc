// A layered provider's word on immediates counts only if what is beneath carries them.
#include "ofi/layers.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>

#include "ofi/discover.h"

namespace fkv::ofi {
namespace {

InfoPtr offer(const std::string& provider, const std::string& domain, std::uint32_t protocol, std::size_t imm_bytes) {
    InfoPtr info(Library::get().dupinfo(nullptr));
    info->fabric_attr->prov_name = strdup(provider.c_str());
    info->domain_attr->name = strdup(domain.c_str());
    info->domain_attr->cq_data_size = imm_bytes;
    info->ep_attr->protocol = protocol;
    return info;
}

class Layered : public ::testing::Test {
  protected:
    void SetUp() override {
        try {
            Library::get();
        } catch (const Error& error) {
            GTEST_SKIP() << error.what();
        }
    }
};

TEST_F(Layered, iwarp_beneath_rxm_is_refused) {
    const auto siw = offer("verbs;ofi_rxm", "siw0", FI_PROTO_RXM, 4);
    const auto none = offer("verbs", "siw0", FI_PROTO_IWARP, 0);
    EXPECT_NE(why_no_immediates(*siw, none.get()).find("siw0"), std::string::npos);
    EXPECT_NE(why_no_immediates(*siw, none.get()).find("iWARP"), std::string::npos);
}

TEST_F(Layered, the_connection_has_to_be_the_same_device) {
    auto list = offer("verbs", "siw0", FI_PROTO_IWARP, 0);
    list->next = offer("verbs", "mlx5_1", FI_PROTO_RDMA_CM_IB_RC, 4).release();
    EXPECT_EQ(why_no_immediates(*offer("verbs;ofi_rxm", "mlx5_1", FI_PROTO_RXM, 4), list.get()), "");
    EXPECT_NE(why_no_immediates(*offer("verbs;ofi_rxm", "siw0", FI_PROTO_RXM, 4), list.get()), "");
    EXPECT_EQ(why_no_immediates(*offer("verbs;ofi_rxm", "mlx5_2", FI_PROTO_RXM, 4), list.get()), "");
}

TEST_F(Layered, queue_pairs_beneath_are_fail_stop) {
    auto list = offer("verbs", "siw0", FI_PROTO_IWARP, 0);
    list->next = offer("verbs", "mlx5_1", FI_PROTO_RDMA_CM_IB_RC, 4).release();
    EXPECT_TRUE(is_fail_stop(*offer("verbs;ofi_rxm", "mlx5_1", FI_PROTO_RXM, 4), list.get()));
    EXPECT_FALSE(is_fail_stop(*offer("verbs;ofi_rxm", "siw0", FI_PROTO_RXM, 4), list.get()));
    EXPECT_FALSE(is_fail_stop(*offer("verbs;ofi_rxm", "mlx5_2", FI_PROTO_RXM, 4), list.get()));
    EXPECT_FALSE(is_fail_stop(*offer("efa", "rdmap0s6-rdm", FI_PROTO_EFA, 4), nullptr));
    Layers layers;
    EXPECT_FALSE(layers.is_fail_stop(*find_nics({"tcp;ofi_rxm", {"127.0.0.1"}}).front())) << "it connects anew";
}

TEST_F(Layered, a_provider_with_nothing_beneath_speaks_for_itself) {
    EXPECT_EQ(why_no_immediates(*offer("efa", "rdmap0s6-rdm", FI_PROTO_EFA, 4), nullptr), "");
    EXPECT_EQ(why_no_immediates(*offer("shm", "shm", FI_PROTO_SHM, 8), nullptr), "");
}

TEST_F(Layered, tcp_beneath_rxm_carries_them) {
    Layers layers;
    const auto nics = find_nics({"tcp;ofi_rxm", {"127.0.0.1"}});
    EXPECT_EQ(layers.why_no_immediates(*nics.front()), "");
}

}  // namespace
}  // namespace fkv::ofi
