"""Finds, checks and digests a Hugging Face model directory, and reads its sampling defaults, without torch."""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lamina.core.errors import ModelError
from lamina.core.sampling import SamplingParams
from lamina.core.types import GenerationConfig
from lamina.models import hub
from lamina.models.checkpoint import INDEX, TensorEntry, read_checkpoint
from lamina.models.quantisation.formats import Packed, Scheme, find_packed, part_names, scheme

BUNDLED = Path(__file__).parent / "bundled"
BUNDLED_NAME = "lamina-bundled"
CONFIG = "config.json"
ADAPTER = "adapter_config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
LANGUAGE_MODEL = re.compile(r"^(model\.)?(?:language_model|text_model)\.")
"""How names of the language model's tensors begin in checkpoints of multimodal models."""
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length", "n_ctx")


@dataclass(frozen=True)
class ModelDirectory:
    """The contents of a model directory. Its mappings must not be changed.

    Attributes:
        path: the directory.
        name: the model's name for clients.
        config: parsed config.json.
        generation_config: parsed generation_config.json; empty without that file.
        tensors: every tensor of the checkpoint by name; empty if weights were not requested.
        scheme: how the checkpoint is quantised; None: it is not.
        packed: weights that the checkpoint stores as codes, by the names of the unquantised weights.
    """

    path: Path
    name: str
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, TensorEntry] = field(default_factory=dict, repr=False)
    scheme: Scheme | None = None
    packed: Mapping[str, Packed] = field(default_factory=dict, repr=False)

    @property
    def weight_names(self) -> list[str]:
        """Names of the checkpoint's weights, as they would be without quantisation."""
        return [*(self.tensors.keys() - part_names(self.packed)), *self.packed]

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The part of the config that describes the language model: multi-modal configs nest it."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, dict) else self.config

    @property
    def language_tensors(self) -> list[TensorEntry]:
        """The tensors of the language model; of a multimodal checkpoint, those whose names say so."""
        is_whole = self.text_config is self.config
        return [entry for name, entry in self.tensors.items() if is_whole or LANGUAGE_MODEL.match(name)]

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a text: generation_config.json's, else config.json's. A negative id stands for none.

        Raises:
            ModelError: an id is not an integer.
        """
        for config in (self.generation_config, self.config, self.text_config):
            ids = config.get("eos_token_id")
            if ids is not None:
                ids = ids if isinstance(ids, list) else [ids]
                if not all(
                    isinstance(token, int) or (isinstance(token, float) and token.is_integer()) for token in ids
                ):
                    raise ModelError(f"{self.path}: eos_token_id is {ids}; give a token id or a list of them")
                return frozenset(int(token) for token in ids if token >= 0)
        return frozenset()

    @property
    def files(self) -> list[Path]:
        described = [self.path / name for name in (CONFIG, GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG, INDEX)]
        weights = {entry.file for entry in self.tensors.values()}
        return [file for file in described if file.is_file()] + sorted(weights)

    @property
    def kv_heads(self) -> int | None:
        """The KV heads of every attention, if the config states them; None if it may have several numbers of them."""
        config = self.text_config
        heads = config.get("num_key_value_heads")
        others = [name for name in config if "key_value_heads" in name or "kv_heads" in name or name == "block_configs"]
        return heads if isinstance(heads, int) and others == ["num_key_value_heads"] else None

    @property
    def max_model_len(self) -> int | None:
        return max_model_len(self.config)

    @property
    def most_model_len(self) -> int | None:
        """The longest context that may be asked for. With linear scaling of positions, configs state either the trained
        or the scaled length: the default takes it for the scaled one."""
        rope, stated = _rope(self.text_config), self.max_model_len
        if stated is None or rope.get("rope_type", rope.get("type")) != "linear":
            return stated
        return max(stated, int(stated * rope.get("factor", 1.0)))


def find(model: str | os.PathLike[str] | None, *, weights: bool = True, tokenizer: bool = True) -> ModelDirectory:
    """Return the model directory ``model``; None is the bundled model.

    Args:
        model: a directory, or the name of a model on a hub (``lamina.models.hub``), which is downloaded.
        weights: read the headers of the safetensors files and check them; False for dummy weights or a config alone.
        tokenizer: require tokenizer.json.

    Raises:
        ModelError: the directory does not exist, or a file in it is missing, truncated or invalid.
        UnsupportedModelError: the weights are quantised in a way that Lamina does not read.
    """
    path = BUNDLED if model is None else _located(model, weights)
    _require_directory(path)
    if not (path / CONFIG).is_file():
        if (path / ADAPTER).is_file():
            raise ModelError(f"{path} holds a LoRA adapter, not a model: give the model that it is merged into")
        raise ModelError(f"{path} has no {CONFIG}, so it is not a Hugging Face model directory")
    config = read_json(path / CONFIG)
    if tokenizer and not (path / TOKENIZER).is_file():
        raise ModelError(_no_tokenizer(path))
    known = scheme(path, config) if weights else None
    tensors = read_checkpoint(path) if weights else {}
    return ModelDirectory(
        path=path,
        name=BUNDLED_NAME if model is None else model_name(path),
        config=config,
        generation_config=read_json(path / GENERATION_CONFIG) if (path / GENERATION_CONFIG).is_file() else {},
        tensors=tensors,
        scheme=known,
        packed={} if known is None else find_packed(tensors, known),
    )


def _located(model: str | os.PathLike[str], weights: bool) -> Path:
    path = Path(model).expanduser()
    if path.exists() or not hub.is_name(os.fspath(model)):
        return path
    return hub.download(os.fspath(model), weights=weights)


def model_name(path: Path) -> str:
    """Return the name for clients: OWNER/NAME for a snapshot in the Hugging Face cache, else the directory's name."""
    path = path.resolve()
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return path.name


def find_config(model: str | Path | None) -> ModelDirectory:
    """Return a model directory of which only the configuration is read. ``model`` may also be a JSON file of any name.

    Raises:
        ModelError: the directory or file does not exist, or has no configuration.
    """
    path = None if model is None else Path(model).expanduser()
    if path is None or not path.is_file():
        return find(path, weights=False, tokenizer=False)
    return ModelDirectory(path=path, name=path.stem, config=read_json(path))


def max_model_len(config: Mapping[str, Any]) -> int | None:
    """Return the longest sequence, in tokens, that a config.json allows; None if it gives no limit (ALiBi models).

    For a YaRN config whose max_position_embeddings is still that of training, that is the extended length.
    """
    nested = config.get("text_config")
    config = nested if isinstance(nested, dict) else config
    stated: int | None = next((config[key] for key in _LENGTH_KEYS if isinstance(config.get(key), int)), None)
    if stated is None:
        return None
    rope = _rope(config)
    if rope.get("rope_type", rope.get("type")) == "yarn" and "original_max_position_embeddings" in rope:
        return max(stated, int(rope["original_max_position_embeddings"] * rope.get("factor", 1.0)))
    return stated


def stated_tie(config: Mapping[str, Any]) -> bool | None:
    """Return whether a config.json says that the output head is the embedding; None if it says nothing.

    In a multimodal config, what is stated for the whole model counts before what its language model states.
    """
    nested = config.get("text_config")
    parts = (config, nested) if isinstance(nested, dict) else (config,)
    return next((bool(part[key]) for part in parts if part.get(key := "tie_word_embeddings") is not None), None)


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in ``file``. Raises ModelError if it holds anything else."""
    try:
        value = json.loads(file.read_bytes())
    except ValueError as error:
        raise ModelError(f"{file} is not JSON: {error}. Copy the file again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds a JSON {type(value).__name__}, not an object. Copy the file again")
    return value


def _require_directory(path: Path) -> None:
    if path.is_dir():
        return
    if path.exists():
        raise ModelError(
            f"{path} is a file. Give the directory that holds {CONFIG}, safetensors weights and {TOKENIZER}"
        )
    raise ModelError(
        f"directory {path} does not exist. Give the path of a Hugging Face model directory, or OWNER/NAME of a model "
        "to download, or omit the model to use the one bundled with Lamina"
    )


def _no_tokenizer(path: Path) -> str:
    slow = [name for name in ("tokenizer.model", "vocab.json", "vocab.txt") if (path / name).is_file()]
    found = f"only {', '.join(slow)}" if slow else "no tokenizer at all"
    return (
        f"{path} has no {TOKENIZER} ({found}). Make it with transformers: "
        "AutoTokenizer.from_pretrained(SOURCE).save_pretrained(DIR)"
    )


SAMPLE_NBYTES = 4096
DIGEST_NBYTES = 8


def checkpoint_digest(model: ModelDirectory) -> str:
    """Return 16 hex digits that depend on the configuration, on every tensor's name, type and shape, and on samples of
    its data: 4 KiB at the beginning, in the middle and at the end.

    A digest of all data would take as long as loading it. Training changes all of a tensor, so samples distinguish two
    checkpoints; a bit flipped elsewhere is not found.
    """
    made = hashlib.blake2b(digest_size=DIGEST_NBYTES)
    made.update(json.dumps(model.config, sort_keys=True).encode())
    with contextlib.ExitStack() as stack:
        files = {file: stack.enter_context(file.open("rb")) for file in {one.file for one in model.tensors.values()}}
        for name, entry in sorted(model.tensors.items()):
            made.update(repr((name, entry.dtype, entry.shape, entry.nbytes)).encode())
            last = max(0, entry.nbytes - SAMPLE_NBYTES)
            for offset in sorted({0, last // 2, last}):
                files[entry.file].seek(entry.start + offset)
                made.update(files[entry.file].read(min(SAMPLE_NBYTES, entry.nbytes)))
    return made.hexdigest()


Defaults = Mapping[str, int | float]
"""Values of ``SamplingParams`` by name."""

_SAMPLING_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Name in ``SamplingParams`` by name in generation_config.json, for the fields that vLLM reads."""


def sampling_defaults(model: ModelDirectory, choice: GenerationConfig) -> Defaults:
    """Return the defaults of generation_config.json; none if ``choice`` is "none".

    Raises:
        ModelError: a value has the wrong type or is out of range.
    """
    if choice == "none":
        return {}
    given = model.generation_config
    found = {ours: given[theirs] for theirs, ours in _SAMPLING_NAMES.items() if given.get(theirs) is not None}
    try:
        SamplingParams(**found)
    except ValueError as error:
        name, rest = str(error).split(maxsplit=1)  # its messages begin with the parameter's name
        name = next((theirs for theirs, ours in _SAMPLING_NAMES.items() if ours == name), name)
        raise ModelError(
            f"{model.path / GENERATION_CONFIG}: {name} {rest}. Correct the file, or ignore it: generation_config none"
        ) from None
    return found


def describe_defaults(defaults: Defaults) -> str:
    """Return the defaults as text, such as "temperature 0.6, top_k 20"."""
    return ", ".join(f"{name} {value:g}" for name, value in defaults.items())
