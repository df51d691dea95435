"""The settings of one runtime, each defined once. Nothing mutates a config.

The keyword arguments of the SDK, the options of the command line, the names in a ``--config`` file and the page in the
documentation are derived from the fields of ``EngineConfig`` by ``lamina.config.settings``.
"""

import os
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from lamina.config.settings import Meaning, settings
from lamina.core.errors import ConfigError
from lamina.core.types import (
    MOST_MINI_BATCHES,
    Balance,
    DType,
    DTypeName,
    GenerationConfig,
    KvCacheDType,
    LoadFormat,
    Partition,
    Pipelining,
    Polling,
    Quantization,
    TransportName,
)


@dataclass(frozen=True)
class EngineConfig:
    """The settings of an engine. Names follow vLLM's engine arguments where one exists.

    Raises ConfigError for a value of the wrong type or outside its range, and for values that contradict each other.
    """

    model: Annotated[
        str | os.PathLike[str] | None, Meaning("Hugging Face model directory. Default: the bundled small model.")
    ] = None
    _: KW_ONLY
    served_model_name: Annotated[
        str | None,
        Meaning(
            "The model's name for clients of the server, or several joined by commas; answers have the first. Default: "
            "the name of the directory, or ORG/NAME of a snapshot in the Hugging Face cache."
        ),
    ] = None
    compute: Annotated[str, Meaning("Compute workers, kind:count joined by commas.")] = "cpu:1"
    tensor_parallel: Annotated[
        int,
        Meaning(
            "Compute workers that share each copy of the weights: cpu:4 with 2 makes two copies. Each has a part of "
            "every layer and some of the heads. If one of them is lost, the engine ends.",
            unit="compute workers",
            ge=1,
        ),
    ] = 1
    pipeline_parallel: Annotated[
        int,
        Meaning(
            "Stages of each copy of the weights, each on a compute worker that loads a part of the layers: cpu:4 with "
            "2 makes two copies. If one of them is lost, the engine ends.",
            unit="compute workers",
            ge=1,
        ),
    ] = 1
    memory: Annotated[
        str | None,
        Meaning(
            "Memory workers, kind:count joined by commas; local is the compute worker's own spare memory, which needs "
            "no messages. Default: local with one compute worker, else cpu:1."
        ),
    ] = None
    load_format: Annotated[
        LoadFormat,
        Meaning("auto reads safetensors; dummy makes seeded random weights of the right shapes, for benchmarks."),
    ] = "auto"
    dtype: Annotated[
        DTypeName | DType, Meaning("Element type of weights, activations and KV; auto takes the checkpoint's.")
    ] = "auto"
    quantization: Annotated[
        Quantization,
        Meaning(
            "Quantise the weights of linear layers and experts while they are loaded, for less memory: to a byte with "
            "a scale for each output (int8, fp8), or to half a byte with a scale and a zero point for every 128 inputs "
            "(int4). Embeddings, the head and activations keep dtype. CPUs have int8 and int4, in bfloat16. "
            "Not for checkpoints that are quantised already."
        ),
    ] = "none"
    kv_cache_dtype: Annotated[
        KvCacheDType,
        Meaning(
            "Element type of KV on memory workers; auto is that of the activations. int8 and fp8 (e4m3) round K and V "
            "to one byte with a scale per token and head, for about twice as many tokens in the same memory."
        ),
    ] = "auto"
    max_model_len: Annotated[
        int | None,
        Meaning(
            "Longest prompt and completion together. Default: what the model supports and memory workers can hold.",
            unit="tokens",
            ge=2,
        ),
    ] = None
    generation_config: Annotated[
        GenerationConfig,
        Meaning(
            "Sampling defaults of requests that give none: auto takes temperature, top_p, top_k, min_p, "
            "repetition_penalty and max_new_tokens from the model's generation_config.json, none takes nothing from it."
        ),
    ] = "auto"
    max_num_seqs: Annotated[int, Meaning("Most sequences that decode at once.", unit="sequences per replica", ge=1)] = (
        256
    )
    max_num_batched_tokens: Annotated[
        int,
        Meaning("Largest step: a row for each decoding sequence, the rest for prompts.", "token rows", ge=1),
    ] = 2048
    slo_tbt_ms: Annotated[
        int | None,
        Meaning(
            "Target for the time between tokens: while sequences decode, prompts are computed in chunks for which a "
            "step is predicted to take no longer. Default: chunks fill max_num_batched_tokens.",
            unit="milliseconds",
            ge=1,
        ),
    ] = None
    kv_cache_memory_bytes: Annotated[
        int | None,
        Meaning(
            "Memory for KV. Default: an equal share of half of the memory that is free once the weights are loaded.",
            unit="bytes per memory worker",
            ge=1,
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        Meaning(
            "Share of a GPU's memory that may be in use in all, with weights, KV and other programs.",
            ge=0.1,
            le=1.0,
        ),
    ] = 0.9
    kv_tokens_per_worker: Annotated[
        int | None,
        Meaning(
            "Longest run of one sequence's tokens on a memory worker; later tokens go to another worker with room. "
            "Default: as many as the worker has room for.",
            unit="tokens",
            ge=1,
        ),
    ] = None
    kv_overcommit: Annotated[
        float,
        Meaning(
            "KV in a memory worker's memory and on its disk, as a multiple of the KV in memory: cached prefixes are "
            "written to kv_spill_dir, and read for requests that begin with them. Without prefix_cache, 1. Memory "
            "local has no disk.",
            ge=1,
        ),
    ] = 1.0
    kv_spill_dir: Annotated[
        str | os.PathLike[str] | None,
        Meaning("Folder on a local disk of each memory worker for its file of cached prefixes; see kv_overcommit."),
    ] = None
    partition: Annotated[
        Partition,
        Meaning(
            "The part of a request's KV on one memory worker: all of it (request), some of its heads (head) or an "
            "equal part of its tokens (token). auto: all of it, or runs of tokens if it is too long for one worker."
        ),
    ] = "auto"
    threads: Annotated[
        int | None,
        Meaning(
            "CPU threads. Default: the workers of each pool share all cores this process may use.",
            unit="threads per worker",
            ge=1,
        ),
    ] = None
    lanes: Annotated[
        int | None, Meaning("Batches in flight. Default: decided while running, from measured times.", "lanes", ge=1)
    ] = None
    pipelining: Annotated[
        Pipelining,
        Meaning(
            "Order of the lanes' slices on compute workers: fixed, or rotational; auto is rotational if there is one "
            "lane more than compute workers, else fixed."
        ),
    ] = "auto"
    q_first: Annotated[
        bool, Meaning("Send q before k and v are computed: attention to earlier tokens starts sooner.")
    ] = False
    mini_batches: Annotated[
        int, Meaning("Messages in which the rows of q are sent.", unit="messages", ge=1, le=MOST_MINI_BATCHES)
    ] = 1
    polling: Annotated[
        Polling,
        Meaning(
            "Who waits for the messages of memory workers on GPUs: the GPU itself, for decode steps over shared memory "
            "(device), or the host (host); auto: what is faster, measured once for each kind of GPU."
        ),
    ] = "auto"
    prefix_cache: Annotated[
        bool,
        Meaning("Keep the KV of ended requests in otherwise free slots, for requests that begin with the same tokens."),
    ] = True
    balance: Annotated[
        Balance,
        Meaning(
            "Policy that moves KV between memory workers while it is in use: bandwidth evens out the time that they "
            "need to read their KV, and places requests by it; throughput and ledger are the policies of Infinite-LLM "
            "and DistKV-LLM; off: none; auto: bandwidth if memory workers of several kinds start together, else off."
        ),
    ] = "auto"
    plan_ahead: Annotated[bool, Meaning("Plan the next step of a lane while one runs.")] = True
    max_restarts: Annotated[
        int,
        Meaning(
            "Most lost workers of each pool that are replaced within ten minutes, and most restarts of a server's "
            "engine. Beyond that, the other workers continue alone while each pool has one.",
            unit="workers",
            ge=0,
        ),
    ] = 8
    autoscale: Annotated[
        str | None,
        Meaning(
            "Let pools grow and shrink with their load, between a smallest and a largest number of workers: "
            "memory=1:4, or memory=1:4,compute=1:2. Default: pools keep their size."
        ),
    ] = None
    transport: Annotated[
        TransportName,
        Meaning(
            "Transport between workers; auto: shm on one host, else rdma if a trial transfer succeeds, else tcp. If "
            "another value cannot be used, the start fails."
        ),
    ] = "auto"
    tls: Annotated[
        bool,
        Meaning(
            "Encrypt data between machines: tcp runs under TLS 1.3, and rdma, which cannot be encrypted, is not used. "
            "The control plane is always encrypted."
        ),
    ] = False
    secret_file: Annotated[
        str | os.PathLike[str] | None,
        Meaning(
            "File of the cluster's secret, from which its keys are derived; created if it does not exist. Default: a "
            "new secret, kept in memory."
        ),
    ] = None
    listen: Annotated[
        str | None,
        Meaning(
            "HOST:PORT at which workers of other machines may join (`lamina worker`), with the cluster's secret. "
            "Default: all workers are on this machine."
        ),
    ] = None
    advertise: Annotated[
        str | None,
        Meaning("Address at which workers of other machines reach this one. Default: the address of listen."),
    ] = None
    ray: Annotated[
        str | None,
        Meaning(
            "Ray cluster that places and starts all workers: auto for the cluster of this machine, or the HOST:PORT of "
            "a cluster's head. Default: no Ray."
        ),
    ] = None
    kind: Annotated[
        str | None,
        Meaning("With ray: resources that kinds of workers need, name=resource joined by commas: rtx3090=my_gpu."),
    ] = None
    compute_cores: Annotated[
        str | None,
        Meaning(
            "CPU list for this machine's compute workers, such as 0-3,8, divided evenly among them. Default: all cores "
            "for every worker."
        ),
    ] = None
    memory_cores: Annotated[str | None, Meaning("CPU list for this machine's memory workers, as compute_cores.")] = None
    trace: Annotated[
        str | os.PathLike[str] | None, Meaning("Write a timeline for Perfetto to this file when the engine ends.")
    ] = None
    seed: Annotated[
        int, Meaning("Seed of dummy weights, and of requests without one (generate and chat: --seed is the request's).")
    ] = 0

    def __post_init__(self) -> None:
        for setting in settings(type(self)):
            setting.check(getattr(self, setting.name))
        if self.served_model_name is not None and not all(served_names(self)):
            raise ConfigError(
                f"served_model_name is '{self.served_model_name}', which has an empty name; give a name, or several "
                "joined by commas"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens} and max_num_seqs {self.max_num_seqs}; "
                "every sequence needs a row of its own in a step: give max_num_batched_tokens at least "
                f"{self.max_num_seqs}"
            )
        if (self.kv_overcommit > 1) != (self.kv_spill_dir is not None):
            raise ConfigError(
                f"kv_overcommit is {self.kv_overcommit} and kv_spill_dir {self.kv_spill_dir}; give both a number above "
                "1 and a folder, or leave out both"
            )
        if self.kv_overcommit > 1 and self.partition == "head":
            raise ConfigError(
                "kv_overcommit needs cached prefixes with all heads on one memory worker, but partition head divides "
                "heads among several: leave out one of them"
            )
        if self.partition == "request" and self.kv_tokens_per_worker is not None:
            raise ConfigError(
                "kv_tokens_per_worker puts the tokens of a request on several memory workers, and partition request "
                "on one: leave out one of them"
            )
        if self.balance not in ("auto", "off") and self.partition in ("request", "head"):
            raise ConfigError(
                f"balance {self.balance} moves ranges of a request's tokens between memory workers, which partition "
                f"{self.partition} rules out: leave out one of them"
            )
        if self.kind is not None and self.ray is None:
            raise ConfigError("kind names resources of a Ray cluster: give ray too")
        if self.polling == "device" and (self.q_first or self.mini_batches > 1):
            raise ConfigError(
                "polling device serves requests that come in one piece, but q_first and mini_batches cut them: leave "
                "out one of them"
            )
        if self.tls and self.transport == "rdma":
            raise ConfigError("rdma cannot be encrypted: leave out tls, or give transport tcp or auto")


def served_names(config: EngineConfig) -> list[str]:
    """Return the names of ``served_model_name``, without repeats; empty if it is not set."""
    if config.served_model_name is None:
        return []
    return list(dict.fromkeys(name.strip() for name in config.served_model_name.split(",")))


def overcommit(config: EngineConfig) -> float:
    """KV that a memory worker and its disk hold, as a multiple of the KV in memory."""
    return config.kv_overcommit if config.prefix_cache else 1.0


def check_writable(name: str, file: Path) -> None:
    """Check that a file can be written before the work that will fill it. Raises ConfigError."""
    file = file.absolute()
    if not file.parent.is_dir():
        raise ConfigError(f"{name} is '{file}', in a folder that does not exist; make it first")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"{name} is '{file}', which cannot be written; give a file of your own")
