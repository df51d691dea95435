"""A second start recalls what the first has made, without transformers, unless something has changed or is damaged."""

import dataclasses
import errno
import importlib.metadata
import logging
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import lamina
from lamina import _native as native
from lamina.compute import split_cache
from lamina.compute.device.base import Rows
from lamina.compute.device.cpu import SliceRunner
from lamina.compute.split_cache import Prepared, cache_key, ingredients, prepare
from lamina.core.types import DType
from lamina.lowering import Target
from lamina.models import directory, tensors
from lamina.models.directory import BUNDLED, ModelDirectory
from lamina.models.quantisation.codes import plain
from lamina.splitter.parts import ONLY
from tests.support.random_models import variant, write_checkpoint
from tests.support.sweep import sweep

PREPARE = f"""
import sys
from lamina.compute.split_cache import prepare
from lamina.compute.device.cpu import SliceRunner
from lamina.models import directory, tensors
place = directory.find({str(BUNDLED)!r})
prepared = prepare(place, None, lambda: print("split"))
SliceRunner(prepared.lowered, tensors.load(place, prepared.lowered.weights, prepared.weights))
print(*sorted({{"transformers", "networkx", "sympy"}} & set(sys.modules)))
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAMINA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def bundled() -> ModelDirectory:
    return directory.find(None)


@pytest.fixture(scope="module")
def fresh() -> Prepared:
    """The bundled model, split."""
    return split_cache._split(directory.find(None), None, Target.CPU, ONLY)


@pytest.fixture
def split_before(fresh: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    """Splitting, where only its times matter, takes none."""
    monkeypatch.setattr(split_cache, "_split", lambda *_: fresh)


def must_not_split() -> None:
    raise AssertionError("the model was split again")


def loaded(place: ModelDirectory, prepared: Prepared) -> dict[str, torch.Tensor]:
    found = tensors.load(place, prepared.lowered.weights, prepared.weights)
    return {name: plain(weight) for name, weight in found.items()}


def query(place: ModelDirectory, prepared: Prepared) -> torch.Tensor:
    rows = Rows(torch.arange(5), torch.arange(5))
    out = SliceRunner(prepared.lowered, loaded(place, prepared)).run(0, rows, None, ())
    return out.q


def times_split(place: ModelDirectory, dtype: DType | None = None) -> int:
    calls: list[None] = []
    prepare(place, dtype, lambda: calls.append(None))
    return len(calls)


def test_the_second_start_recalls_the_same(bundled: ModelDirectory, fresh: Prepared, cache: Path) -> None:
    assert times_split(bundled) == 1
    recalled = prepare(bundled, None, must_not_split)
    theirs, ours = loaded(bundled, fresh), loaded(bundled, recalled)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert torch.equal(query(bundled, recalled), query(bundled, fresh))
    assert len(list(cache.iterdir())) == 1


@pytest.mark.usefixtures("split_before")
def test_a_recalling_process_imports_no_transformers(bundled: ModelDirectory) -> None:
    prepare(bundled, None, lambda: None)
    run = subprocess.run([sys.executable, "-c", PREPARE], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.split() == []


@pytest.mark.parametrize("family", sweep(["qwen2", "mixtral", "gpt_oss"], ["mixtral"]))
def test_weights_of_recalled_models(family: str, tmp_path: Path) -> None:
    """Tied ones, and experts that transformers converts."""
    model = write_checkpoint(variant(family, tie_word_embeddings=True), tmp_path)
    place = directory.find(tmp_path, tokenizer=False)
    prepare(place, DType.FLOAT32, lambda: None)
    found = loaded(place, prepare(place, DType.FLOAT32, must_not_split))
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in found.items())


@pytest.mark.usefixtures("split_before")
def test_dummy_weights_of_a_recalled_model(bundled: ModelDirectory) -> None:
    place = dataclasses.replace(bundled, tensors={})
    drawn = [
        tensors.load(place, prepared.lowered.weights, prepared.weights, "dummy", seed=3)
        for prepared in (prepare(place, None, lambda: None), prepare(place, None, must_not_split))
    ]
    assert drawn[0].keys() == drawn[1].keys() and all(
        torch.equal(plain(drawn[0][name]), plain(drawn[1][name])) for name in drawn[0]
    )


Change = Callable[[ModelDirectory, pytest.MonkeyPatch, Path], ModelDirectory]


def _config(place: ModelDirectory, monkeypatch: pytest.MonkeyPatch, folder: Path) -> ModelDirectory:
    (folder / "config.json").write_bytes((place.path / "config.json").read_bytes() + b"\n")
    return dataclasses.replace(place, path=folder)


def _tensors(place: ModelDirectory, monkeypatch: pytest.MonkeyPatch, folder: Path) -> ModelDirectory:
    return dataclasses.replace(place, tensors={f"model.{name}": entry for name, entry in place.tensors.items()})


def _packing(place: ModelDirectory, monkeypatch: pytest.MonkeyPatch, folder: Path) -> ModelDirectory:
    monkeypatch.setattr(split_cache, "packing", lambda dtype: None)
    return place


def _version(package: str) -> Change:
    def change(place: ModelDirectory, monkeypatch: pytest.MonkeyPatch, folder: Path) -> ModelDirectory:
        real = importlib.metadata.version
        monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0" if name == package else real(name))
        return place

    return change


def _code(name: str) -> Change:
    """One file of the package is another."""

    def change(place: ModelDirectory, monkeypatch: pytest.MonkeyPatch, folder: Path) -> ModelDirectory:
        shutil.copytree(PACKAGE, folder / "lamina", ignore=shutil.ignore_patterns("__pycache__"))
        monkeypatch.setattr(split_cache, "_CODE", folder / "lamina")
        key = cache_key(ingredients(place, None))
        with (folder / "lamina" / name).open("a") as file:
            file.write("# another\n")
        assert cache_key(ingredients(place, None)) != key
        return place

    return change


def _native(place: ModelDirectory, monkeypatch: pytest.MonkeyPatch, folder: Path) -> ModelDirectory:
    (folder / "_native.so").write_bytes(split_cache._NATIVE.read_bytes() + b"\0")
    monkeypatch.setattr(split_cache, "_NATIVE", folder / "_native.so")
    return place


def _set(where: object, name: str, value: object) -> Change:
    def change(place: ModelDirectory, monkeypatch: pytest.MonkeyPatch, folder: Path) -> ModelDirectory:
        monkeypatch.setattr(where, name, value)
        return place

    return change


PACKAGE = Path(lamina.__file__).parent
CHANGES = {
    "config": _config,
    "tensors": _tensors,
    "packing": _packing,
    "native": _native,
    "python": _set(sys, "version", "3.99"),
    "machine": _set(platform, "machine", lambda: "vax"),
    "torch build": _set(torch, "__version__", "0.0+other"),
    "processor's vectors": _set(torch.backends.cpu, "get_cpu_capability", lambda: "NONE"),
    "processor's paths": _set(native, "attention_paths", lambda: []),
    **{
        name: _code(name)
        for name in ("core/types.py", "lowering/fuse.py", "kernels/host_memory.py", "models/pretrained.py")
    },
    **{name: _version(name) for name in ("lamina", "torch", "transformers", "networkx", "safetensors")},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_key_holds_everything_that_matters(
    bundled: ModelDirectory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: Change
) -> None:
    before = cache_key(ingredients(bundled, None))
    assert cache_key(ingredients(bundled, None)) == before
    assert cache_key(ingredients(change(bundled, monkeypatch, tmp_path), None)) != before


@pytest.mark.slow
def test_two_starts_at_once_leave_one_good_file_and_all_their_code_is_in_the_key(
    bundled: ModelDirectory, cache: Path
) -> None:
    """What two processes write, and what they have imported once they have split the model: the key is made of it."""
    code = (
        f"{PREPARE}\nfor name, module in sys.modules.items():\n    if name.startswith('lamina'): print(module.__file__)"
    )
    command = [sys.executable, "-c", code]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [process.communicate(timeout=200)[0].split() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert [words[0] for words in printed] == ["split", "split"]
    assert len(list(cache.iterdir())) == 1
    prepare(bundled, None, must_not_split)

    files = [Path(word) for word in printed[0] if word.startswith("/")]
    made_of = ingredients(bundled, None)
    ours = {file for file in files if file.suffix == ".py"}
    assert len(ours) > 40
    assert {str(file.relative_to(PACKAGE)) for file in ours} <= made_of.keys()
    assert [file for file in files if file.suffix != ".py"] == [split_cache._NATIVE]


def test_the_key_holds_the_element_type(bundled: ModelDirectory) -> None:
    keys = {cache_key(ingredients(bundled, dtype)) for dtype in (None, *DType)}
    assert len(keys) == 1 + len(DType)


def test_two_ingredients_do_not_run_into_each_other() -> None:
    assert cache_key({"a": b"1b", "b": b""}) != cache_key({"a": b"1", "b": b"b"})


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def _empty(file: Path) -> None:
    file.write_bytes(b"")


def _of_another_model(file: Path) -> None:
    prepare(directory.find(None), DType.FLOAT32, lambda: None)
    (other,) = (path for path in file.parent.iterdir() if path != file)
    file.write_bytes(other.read_bytes())


@pytest.mark.usefixtures("split_before")
@pytest.mark.parametrize("damage", [_flip, _truncate, _empty, _of_another_model])
def test_a_damaged_file_is_named_and_made_again(
    bundled: ModelDirectory, cache: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    prepare(bundled, None, lambda: None)
    (file,) = cache.iterdir()
    damage(file)
    with caplog.at_level(logging.WARNING):
        assert times_split(bundled) == 1
    assert str(file) in caplog.text and "cannot be used" in caplog.text
    assert prepare(bundled, None, must_not_split).lowered.dtype is DType.BFLOAT16


@pytest.mark.usefixtures("split_before")
def test_a_folder_that_cannot_be_written_is_a_warning(
    bundled: ModelDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(
        "LAMINA_CACHE_DIR", str(tmp_path / "file")
    )  # root may write any folder, but nobody one in a file
    with caplog.at_level(logging.WARNING):
        assert times_split(bundled) == times_split(bundled) == 1
    assert caplog.text.count("cannot be written") == 2


@pytest.mark.usefixtures("split_before")
def test_a_model_that_cannot_be_written_is_split_at_every_start(
    bundled: ModelDirectory, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lamina.lowering.records._METHOD_NAMES", frozenset())
    with caplog.at_level(logging.INFO):
        assert times_split(bundled) == times_split(bundled) == 1
    assert "split at every start: lowered graphs have no call_method" in caplog.text
    assert not cache.exists()


@pytest.mark.usefixtures("split_before")
def test_without_a_home_nothing_is_kept(bundled: ModelDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LAMINA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert times_split(bundled) == times_split(bundled) == 1


@pytest.mark.usefixtures("split_before")
def test_old_files_are_removed(bundled: ModelDirectory, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_cache, "KEPT_FILES", 2)
    cache.mkdir(parents=True)
    for age, name in enumerate(("newest", "older", "oldest")):
        (cache / name).touch()
        os.utime(cache / name, (1000 - age, 1000 - age))
    prepare(bundled, None, lambda: None)
    assert {path.name for path in cache.iterdir()} == {cache_key(ingredients(bundled, None)), "newest"}


@pytest.mark.usefixtures("split_before")
def test_a_full_disk_is_a_warning_and_leaves_nothing(
    bundled: ModelDirectory, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # the kernel refuses more of one file, as of a full disk
    try:
        assert times_split(bundled) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert "cannot be written" in caplog.text
    assert list(cache.iterdir()) == []


@pytest.mark.usefixtures("split_before")
def test_old_files_that_cannot_be_removed_are_a_warning(
    bundled: ModelDirectory, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))

    monkeypatch.setattr(split_cache, "KEPT_FILES", 0)
    monkeypatch.setattr(Path, "unlink", refuse)  # root, whom tests may run as, is refused nothing
    assert times_split(bundled) == 1
    assert "cannot be removed" in caplog.text
    prepare(bundled, None, must_not_split)


@pytest.mark.usefixtures("split_before")
def test_folders_beside_the_files_are_left_alone(
    bundled: ModelDirectory, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_cache, "KEPT_FILES", 1)
    (cache / "folder").mkdir(parents=True)
    os.utime(cache / "folder", (1000, 1000))
    prepare(bundled, None, lambda: None)
    assert {path.name for path in cache.iterdir()} == {cache_key(ingredients(bundled, None)), "folder"}


def test_stages_load_their_own_weights_and_compute_together_what_the_whole_model_computes(
    bundled: ModelDirectory, fresh: Prepared
) -> None:
    slices = len(fresh.lowered.parts)
    spec, dtype = fresh.lowered.attentions[0], getattr(torch, fresh.lowered.dtype.value)
    attention = torch.ones(5, spec.query_heads, spec.v_dim, dtype=dtype)

    def run(parts: list[range]) -> tuple[torch.Tensor, list[set[str]]]:
        context, found = tuple[torch.Tensor, ...](), []
        for own in parts:
            part = fresh.lowered.stage(own)
            weights = tensors.load(bundled, part.weights, fresh.weights)
            runner, rows = SliceRunner(part, weights), Rows(torch.arange(5), torch.arange(5))  # rows of one runner
            found.append(set(weights))
            for index in own:
                if index == slices - 1:
                    return runner.logits(rows, attention, context, torch.arange(5)).clone(), found
                context = runner.run(index, rows, attention if index else None, context).context
        raise AssertionError("no stage has the last slice")

    whole, (every,) = run([range(slices)])
    logits, held = run([range(2), range(2, 3), range(3, slices)])
    assert torch.equal(logits, whole)
    assert set().union(*held) == every == {*fresh.lowered.weights}
    assert sum(map(len, held)) == len(every) + len(held[0] & held[2]), "no weight twice, but a tied embedding"
    assert len(held[0] & held[2]) <= 1
