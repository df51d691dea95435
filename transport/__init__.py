"""Transports: write bytes into arenas of other workers and ring doorbells, over shared memory, TCP or RDMA."""

if __name__ != "lamina.transport":
    raise ImportError(f"import this package as lamina.transport, not {__name__}: a second copy would not share types")
