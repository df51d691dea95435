"""RDMA verbs through pyverbs. The only place that imports it."""
