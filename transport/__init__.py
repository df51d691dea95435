"""Data plane: arenas, doorbells and channels between workers."""

if __name__ != "lamina.transport":
    raise ImportError(f"import this package as lamina.transport, not {__name__}: a second copy would not share types")
