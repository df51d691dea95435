"""Moves weight names between layers: in ``model.layers.3.mlp.up_proj.weight``, the first number is the layer."""

import re

_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


def shift(name: str, layers: int) -> str:
    """The name of the same weight ``layers`` layers later; names without a layer do not change."""
    return _LAYER.sub(lambda match: str(int(match.group()) + layers), name, count=1)


def relative(name: str, layer: int) -> str:
    """The name with its layer relative to ``layer``: equal for corresponding weights of different layers."""
    return _LAYER.sub(lambda match: f"{int(match.group()) - layer:+d}", name, count=1)
