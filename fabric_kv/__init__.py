"""RDMA transfer of KV caches between the prefill and the decode side of LLM serving."""
