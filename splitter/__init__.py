"""Cuts a model at its attention operators."""

if __name__ != "lamina.splitter":
    raise ImportError(f"import this package as lamina.splitter, not {__name__}: a second copy would not share types")
