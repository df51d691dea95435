"""Weight names such as ``model.layers.3.mlp.up_proj.weight``: the first number is the layer."""

import re

_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


def shift(name: str, layers: int) -> str:
    """The same weight ``layers`` layers further down; names without a layer stay as they are."""
    return _LAYER.sub(lambda match: str(int(match.group()) + layers), name, count=1)


def relative(name: str, layer: int) -> str:
    """The name with its layer given as a distance from ``layer``: equal for the same weight seen from its own layer."""
    return _LAYER.sub(lambda match: f"{int(match.group()) - layer:+d}", name, count=1)
