"""Frozen settings of one runtime. Nothing mutates a config. And the check of a file that one names."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from lamina.errors import ConfigError
from lamina.types import DType

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
"""How a user says an element type: one of DType's, or auto for the model's own."""

LoadFormat = Literal["auto", "dummy"]


@dataclass(frozen=True)
class Overlap:
    """How compute workers send q, k and v, so that attention begins before all of it is there.

    Attributes:
        q_first: send q as soon as it exists; memory workers attend to the tokens before while k and v are computed.
        mini_batches: pieces in which the rows of q travel, at most ``MOST_MINI_BATCHES``.
    """

    q_first: bool = False
    mini_batches: int = 1


MOST_MINI_BATCHES = 15

DEFAULT_MAX_TOKENS = 1024

Pipelining = Literal["auto", "fixed", "rotational"]
TransportName = Literal["auto", "shm", "rdma", "tcp"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What a user may choose. Field names follow vLLM's engine arguments where one exists.

    Attributes:
        model: a Hugging Face model directory; None is the bundled model.
        compute, memory: pools as typed, ``kind:count`` joined by commas.
        dtype: of weights and activations; "auto" takes the checkpoint's.
        kv_cache_memory_bytes: KV bytes per memory worker; None: a share of what is free once the weights are loaded.
        max_model_len: tokens of prompt plus completion of one request; None: what the model and one memory worker hold.
        default_max_tokens: most tokens of the answer to a chat that asks for no limit, which then ends for its length;
            None: ``DEFAULT_MAX_TOKENS``, or an eighth of max_model_len if that is less. Room for all of it is reserved.
        max_num_seqs: sequences decoding at once per compute worker.
        max_num_batched_tokens: token rows of one step (decode rows plus prompt-chunk rows).
        threads: CPU threads per worker; None: the workers of each pool share all cores this process may use.
        load_format: "auto" reads safetensors; "dummy" makes seeded random weights of the right shapes.
        seed: of dummy weights and of requests that give none.
        lanes: batches in flight; None: decided while running, from measured slice and attention times.
        pipelining: order of the lanes' slices on compute workers; "auto" is rotational if there is one lane more than
            compute workers, else fixed.
        q_first, mini_batches: how q, k and v are sent, see ``Overlap``.
        plan_ahead: plan the next step of a lane while one runs.
        transport: of the data between workers; "auto" is shared memory on one host, else RDMA where it proves itself,
            else TCP. One asked for by name is used or nothing is.
        tls: encrypt what goes from one machine to another: tcp runs under TLS 1.3 with a key that comes from the
            cluster's secret, and rdma, which cannot be encrypted, is not used. The control plane always is encrypted.
        secret_file: of the cluster's secret, which its keys come from; made if it is not there. None: a new secret that
            only this cluster's processes ever have.
        trace: a file for what every worker did when, written when the engine ends; None: nothing is recorded.
        compute_cores, memory_cores: CPU list of each pool, as ``taskset`` takes it, shared out evenly among its
            workers; None: all cores that this process may use, for every worker. Workers that share no core with
            another look longer for a message before they sleep.
    """

    model: str | None = None
    compute: str = "cpu:1"
    memory: str = "cpu:1"
    dtype: DType | Literal["auto"] = "auto"
    kv_cache_memory_bytes: int | None = None
    max_model_len: int | None = None
    default_max_tokens: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    threads: int | None = None
    load_format: LoadFormat = "auto"
    seed: int = 0
    lanes: int | None = None
    pipelining: Pipelining = "auto"
    q_first: bool = False
    mini_batches: int = 1
    plan_ahead: bool = True
    transport: TransportName = "auto"
    tls: bool = False
    secret_file: str | None = None
    trace: str | None = None
    compute_cores: str | None = None
    memory_cores: str | None = None


def as_dtype(name: DType | str) -> DType | Literal["auto"]:
    """The element type that a ``DTypeName`` stands for. Raises ConfigError for any other."""
    if name == "auto":
        return "auto"
    try:
        return DType(name)
    except ValueError:
        raise ConfigError(f"dtype is {name!r}; give {', '.join(get_args(DTypeName))}") from None


def check_writable(name: str, file: Path) -> None:
    """Refuse a file to write before the work that is to fill it, not after. Raises ConfigError."""
    file = file.absolute()
    if not file.parent.is_dir():
        raise ConfigError(f"{name} is '{file}', in a folder that does not exist; make it first")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"{name} is '{file}', which cannot be written; give a file of your own")
