"""The RDMA transport. Only this package imports pyverbs."""
