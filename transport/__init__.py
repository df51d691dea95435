"""The data plane: moves bytes between workers' arenas and rings doorbells, over shared memory, TCP or RDMA."""

if __name__ != "lamina.transport":
    raise ImportError(f"import this package as lamina.transport, not {__name__}: a second copy would not share types")
