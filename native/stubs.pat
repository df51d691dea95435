# Patterns of nanobind's stubgen for lamina/_native.pyi: what it cannot see, or shows only on some Python versions.

# Python 3.12 shows the buffer protocol as a method, 3.11 does not; type checkers need it on both.
lamina\._native\.Arena\.__buffer__:

lamina\._native\.Arena\.__suffix__:
    def __buffer__(self, flags: int, /) -> memoryview: ...
