"""Digests of checkpoints: the same for the same tensors, however they are stored, and another for any other."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lamina.models import directory
from lamina.models.directory import checkpoint_digest

TENSORS = {"a": torch.arange(5000.0), "b": torch.ones(3, 7), "c": torch.zeros(0)}


def write(place: Path, tensors: dict[str, torch.Tensor], config: str = "{}", shards: bool = False) -> str:
    place.mkdir()
    (place / "config.json").write_text(config)
    if shards:
        for name, tensor in tensors.items():
            save_file({name: tensor}, place / f"{name}.safetensors")
        index = ", ".join(f'"{name}": "{name}.safetensors"' for name in tensors)
        (place / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{index}}}}}')
    else:
        save_file(tensors, place / "model.safetensors")
    return checkpoint_digest(directory.find(place, tokenizer=False))


def test_files_and_the_order_of_keys_do_not_matter(tmp_path: Path) -> None:
    first = write(tmp_path / "first", TENSORS, '{"x": 1, "y": 2}')
    assert first == write(tmp_path / "second", TENSORS, '{"y": 2, "x": 1}', shards=True)
    assert len(first) == 16


@pytest.mark.parametrize("where", [0, 2500, 4999])
def test_other_weights_have_another_digest(tmp_path: Path, where: int) -> None:
    changed = TENSORS["a"].clone()
    changed[where] += 1
    assert write(tmp_path / "one", TENSORS) != write(tmp_path / "two", {**TENSORS, "a": changed})


@pytest.mark.parametrize(
    "other", [{"A": TENSORS["a"]}, {"a": TENSORS["a"].half()}, {"a": TENSORS["a"].reshape(50, 100)}, {}]
)
def test_another_name_type_or_shape_has_another_digest(tmp_path: Path, other: dict[str, torch.Tensor]) -> None:
    rest = {name: tensor for name, tensor in TENSORS.items() if name != "a"}
    assert write(tmp_path / "one", TENSORS) != write(tmp_path / "two", {**rest, **other})
