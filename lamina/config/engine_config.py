"""The settings of one engine, each defined once. A config is never mutated.

The keyword arguments of the SDK, the options of the command line, the names in a ``--config`` file and the page in the
documentation are derived from the fields of ``EngineConfig`` by ``lamina.config.settings``.
"""

import os
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from lamina.config.settings import Meaning, settings
from lamina.core.errors import ConfigError
from lamina.core.types import (
    ActivationDType,
    Balance,
    DType,
    DTypeName,
    GenerationConfig,
    KvCacheDType,
    LoadFormat,
    Partition,
    Pipelining,
    Polling,
    PromptAttention,
    Quantization,
    ReasoningParserName,
    ToolCallParser,
    TransportName,
)

_model = partial(Meaning, group="Model")
_pools = partial(Meaning, group="Pools")
_memory = partial(Meaning, group="Memory")
_scheduling = partial(Meaning, group="Scheduling")
_network = partial(Meaning, group="Network")


@dataclass(frozen=True)
class EngineConfig:
    """The settings of an engine. Names follow vLLM's engine arguments where one exists.

    Raises ConfigError for a value of the wrong type or outside its range, and for values that contradict each other.
    """

    model: Annotated[
        str | os.PathLike[str] | None,
        _model(
            "Hugging Face model: a directory, or OWNER/NAME[@REVISION] to download. Default: the bundled small model.",
            common=True,
        ),
    ] = None
    _: KW_ONLY
    served_model_name: Annotated[
        str | None,
        _model(
            "Names of the model for clients, joined by commas. Responses carry the first. Default: the name of the "
            "directory, or ORG/NAME of a snapshot in the Hugging Face cache."
        ),
    ] = None
    compute: Annotated[str, _pools("Compute workers, kind:count joined by commas.", common=True)] = "cpu:1"
    tensor_parallel: Annotated[
        int,
        _pools(
            "Compute workers that share each copy of the weights. With 2, cpu:4 makes two copies. Each worker has a "
            "part of every layer and some of the heads. When a worker is lost, its copy is lost.",
            unit="compute workers",
            ge=1,
            common=True,
        ),
    ] = 1
    pipeline_parallel: Annotated[
        int,
        _pools(
            "Stages of each copy of the weights. Each stage is a compute worker that loads some of the layers: cpu:4 "
            "with 2 makes two copies, or one copy with tensor_parallel 2. When a worker is lost, its copy is lost.",
            unit="compute workers",
            ge=1,
        ),
    ] = 1
    memory: Annotated[
        str | None,
        _pools(
            "Memory workers, kind:count joined by commas. local is the compute worker's own spare memory, which needs "
            "no messages. Default: local with one compute worker, else cpu:1.",
            common=True,
        ),
    ] = None
    load_format: Annotated[
        LoadFormat,
        _model(
            "Where weights come from. auto reads safetensors; dummy makes seeded random weights of the right shapes, "
            "for benchmarks."
        ),
    ] = "auto"
    dtype: Annotated[
        DTypeName | DType, _model("Element type of weights, activations and KV. auto: that of the checkpoint.")
    ] = "auto"
    quantization: Annotated[
        Quantization,
        _model(
            "Type to which weights are quantised while loaded. CPUs support int8 and int4, with dtype bfloat16. A "
            "weight of linear layers and experts takes one byte, with a scale per output (int8, fp8), or half a byte, "
            "with a scale and a zero point per 128 inputs (int4). Embeddings, the head and activations keep dtype. "
            "Not for checkpoints that are quantised already.",
            common=True,
        ),
    ] = "none"
    activation_dtype: Annotated[
        ActivationDType,
        _model(
            "Element type of the inputs of int8 and int4 layers. dtype leaves them in dtype. int8 rounds them to one "
            "byte with a scale per token and 128 inputs or fewer, which makes prompts and large batches faster and "
            "logits less exact; it needs CPUs with AVX-512 and VNNI. auto is int8 on such CPUs with quantization int4, "
            "whose own error is many times larger, and dtype otherwise."
        ),
    ] = "auto"
    kv_cache_dtype: Annotated[
        KvCacheDType,
        _memory(
            "Element type of KV on memory workers. auto is that of the activations. int8 and fp8 (e4m3) round K and V "
            "to one byte with a scale per token and head, for about twice as many tokens in the same memory."
        ),
    ] = "auto"
    max_model_len: Annotated[
        int | None,
        _model(
            "Longest prompt and completion together. Default: what the model supports and memory workers can hold.",
            unit="tokens",
            ge=2,
            common=True,
        ),
    ] = None
    generation_config: Annotated[
        GenerationConfig,
        _model(
            "Source of sampling defaults. auto takes temperature, top_p, top_k, min_p, repetition_penalty and "
            "max_new_tokens from the model's generation_config.json, none takes nothing from it."
        ),
    ] = "auto"
    chat_template: Annotated[
        str | None, _model("File with a Jinja template for chats. Default: the model's own template.")
    ] = None
    tool_call_parser: Annotated[
        ToolCallParser, _model("Form of the tool calls in answers. auto goes by the chat template.")
    ] = "auto"
    reasoning_parser: Annotated[
        ReasoningParserName, _model("Form of the reasoning in answers. auto goes by the chat template.")
    ] = "auto"
    max_num_seqs: Annotated[
        int, _scheduling("Most sequences that decode at once.", unit="sequences per replica", ge=1, common=True)
    ] = 256
    max_num_batched_tokens: Annotated[
        int,
        _scheduling(
            "Rows of the largest step. Each decoding sequence has one; prompts share the rest.", unit="token rows", ge=1
        ),
    ] = 2048
    slo_tbt_ms: Annotated[
        int | None,
        _scheduling(
            "Target for the time between tokens. While sequences decode, prompts are computed in chunks so small that "
            "no step is predicted to take longer. Default: chunks fill max_num_batched_tokens.",
            unit="milliseconds",
            ge=1,
        ),
    ] = None
    prefill: Annotated[
        str | None,
        _pools(
            "Compute workers that only prefill, such as h100:2. The workers of compute then decode. /tp2/pp2 "
            "after the last count of prefill or compute replaces tensor_parallel and pipeline_parallel for that pool. "
            "Memory workers have the KV of both; with local memory, workers that decode fetch it while the prompt "
            "runs. Default: compute workers do both."
        ),
    ] = None
    slo_ttft_ms: Annotated[
        int | None,
        _scheduling(
            "Target for the time to the first token. policy slo orders requests by it, and autoscale changes the roles "
            "of replicas by it.",
            unit="milliseconds",
            ge=1,
        ),
    ] = None
    prompt_attention: Annotated[
        PromptAttention,
        _scheduling(
            "Workers that attend to a prompt's earlier chunks. memory: memory workers, so that several replicas or "
            "stages can run chunks of it at once. compute: the replica that runs it, which keeps a copy of its KV "
            "until its last chunk while memory workers store the KV and attend only to cached prefixes. The copies "
            "take at most a tenth of the free memory, or half on a GPU without other KV; prompts without room use "
            "memory workers. Lanes do not rotate over several replicas then. auto, decided at the start: compute with "
            "prefill and local memory; with memory workers, if one replica of one stage runs all prompts, and it does "
            "not decode, or it is on GPUs and memory workers are on CPUs."
        ),
    ] = "auto"
    policy: Annotated[
        str,
        _scheduling(
            "Order in which requests are admitted and computed. fifo: order of arrival, fair between clients; "
            "shortest: shortest prompt first; priority: smallest priority of the request first; slo: earliest "
            "deadline by slo_ttft_ms and slo_tbt_ms first, late requests last; loongserve: order of arrival, and "
            "measured times decide when prompts run, and in which lanes; or the name of an entry point lamina.policies."
        ),
    ] = "fifo"
    kv_cache_memory_bytes: Annotated[
        int | None,
        _memory(
            "Memory for KV. Default: an equal share of half of the memory that is free once the weights are loaded.",
            unit="bytes per memory worker",
            ge=1,
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        _memory(
            "Share of a GPU's memory that may be in use in all. It includes weights, KV and other programs.",
            ge=0.1,
            le=1.0,
            common=True,
        ),
    ] = 0.9
    kv_tokens_per_worker: Annotated[
        int | None,
        _memory(
            "Most tokens of one sequence on a memory worker. Later tokens go to another worker with free slots. "
            "Default: as many as the worker has free slots for.",
            unit="tokens",
            ge=1,
        ),
    ] = None
    kv_overcommit: Annotated[
        float,
        _memory(
            "KV in memory and on disk, relative to KV in memory. Cached prefixes are written to "
            "kv_spill_dir, and read back for requests that begin with them. Without prefix_cache it counts as 1. "
            "Not with memory local.",
            ge=1,
        ),
    ] = 1.0
    kv_spill_dir: Annotated[
        str | os.PathLike[str] | None,
        _memory("Folder on a local disk for cached prefixes. Each memory worker has a file there; see kv_overcommit."),
    ] = None
    partition: Annotated[
        Partition,
        _memory(
            "Division of a request's KV between memory workers. request: one worker holds all of it; head: each "
            "holds some heads; token: each holds an equal part of the tokens. auto: request, or runs of tokens if the "
            "KV is too long for one worker."
        ),
    ] = "auto"
    threads: Annotated[
        int | None,
        _pools(
            "CPU threads of each worker. Default: the workers of each pool share all cores this process may use.",
            unit="threads per worker",
            ge=1,
        ),
    ] = None
    lanes: Annotated[
        int | None,
        _scheduling("Batches in flight. Default: decided while running, from measured times.", unit="lanes", ge=1),
    ] = None
    pipelining: Annotated[
        Pipelining,
        _scheduling(
            "How lanes are assigned to compute workers. auto is rotational if there is one lane more than compute "
            "workers, else fixed."
        ),
    ] = "auto"
    polling: Annotated[
        Polling,
        Meaning(
            "Who polls for messages to memory workers on GPUs. device: the GPU itself, for decode steps over shared "
            "memory; host: the CPU. auto: the faster of the two, measured once for each kind of GPU."
        ),
    ] = "auto"
    prefix_cache: Annotated[
        bool,
        _memory(
            "Reuse KV of finished requests for prompts with the same prefix. Cached KV occupies only slots that are "
            "otherwise free."
        ),
    ] = True
    balance: Annotated[
        Balance,
        _memory(
            "Policy that moves KV between memory workers. bandwidth balances the time in which each worker reads its "
            "KV, and places new requests accordingly; throughput and ledger are the policies of Infinite-LLM and "
            "DistKV-LLM; off: KV does not move; auto: bandwidth if memory workers of several kinds start together, "
            "else off."
        ),
    ] = "auto"
    plan_ahead: Annotated[bool, _scheduling("Plan the next step of a lane while one runs.")] = True
    max_restarts: Annotated[
        int,
        _pools(
            "Most lost workers of a pool replaced in ten minutes. The ranks and stages of a copy of the weights are "
            "replaced together and count as one. Also the most restarts of a server's engine. Beyond that, lost "
            "workers are not replaced; the engine runs while each pool has a worker.",
            unit="workers",
            ge=0,
        ),
    ] = 8
    autoscale: Annotated[
        str | None,
        _pools(
            "Grow and shrink pools with their load. Each pool has a smallest and a largest number of workers: "
            "memory=1:4, or memory=1:4,compute=1:2. With prefill=1:3, replicas change their role by slo_ttft_ms and "
            "slo_tbt_ms. Default: pools keep their size."
        ),
    ] = None
    transport: Annotated[
        TransportName,
        _network(
            "Transport between workers. auto: shm on one host, else rdma if a trial transfer succeeds, else tcp. If "
            "another value cannot be used, the start fails."
        ),
    ] = "auto"
    tls: Annotated[
        bool,
        _network(
            "Encrypt data between machines. tcp runs under TLS 1.3, and rdma, which cannot be encrypted, is not used. "
            "The control plane is always encrypted."
        ),
    ] = False
    secret_file: Annotated[
        str | os.PathLike[str] | None,
        _network(
            "File with the cluster's secret. Its keys are derived from the secret. The file is created if it does not "
            "exist. Default: a new secret, kept in memory."
        ),
    ] = None
    listen: Annotated[
        str | None,
        _network(
            "HOST:PORT at which workers of other machines join. They need the cluster's secret (`lamina worker`). "
            "Default: all workers are on this machine."
        ),
    ] = None
    advertise: Annotated[
        str | None, _network("Address of this machine that workers elsewhere use. Default: the address of listen.")
    ] = None
    ray: Annotated[
        str | None,
        _pools(
            "Ray cluster that places and starts all workers. auto is the cluster of this machine; else give the "
            "HOST:PORT of a cluster's head. Default: no Ray."
        ),
    ] = None
    kind: Annotated[
        str | None,
        _pools(
            "With ray: custom resource for each kind of worker. Pairs kind=resource are joined by commas: "
            "rtx3090=my_gpu."
        ),
    ] = None
    compute_cores: Annotated[
        str | None,
        _pools(
            "CPU list for compute workers, such as 0-3,8. This machine's workers share the cores evenly. Default: all "
            "cores for every worker."
        ),
    ] = None
    memory_cores: Annotated[
        str | None, _pools("CPU list for memory workers, such as 4-7,12. Default: all cores for every worker.")
    ] = None
    trace: Annotated[
        str | os.PathLike[str] | None,
        Meaning("File for a Perfetto timeline of the engine. It is written when the engine ends."),
    ] = None
    seed: Annotated[
        int,
        _model("Seed of dummy weights, and of requests without one. In generate and chat, --seed is the request's."),
    ] = 0

    def __post_init__(self) -> None:
        for setting in settings(type(self)):
            setting.validate(getattr(self, setting.name))
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
        if self.kind is not None and self.ray is None:
            raise ConfigError("kind names resources of a Ray cluster: give ray too")
        if self.tls and self.transport == "rdma":
            raise ConfigError("rdma cannot be encrypted: leave out tls, or give transport tcp or auto")


def served_names(config: EngineConfig) -> list[str]:
    """Return the names of ``served_model_name``, without repeats; empty if it is not set."""
    if config.served_model_name is None:
        return []
    return list(dict.fromkeys(name.strip() for name in config.served_model_name.split(",")))


def overcommit(config: EngineConfig) -> float:
    """Return the KV that a memory worker and its disk hold together, as a multiple of the KV in memory."""
    return config.kv_overcommit if config.prefix_cache else 1.0


def check_writable(name: str, file: Path) -> None:
    """Raise ConfigError if a file cannot be written. ``name``: the setting or option, for the message."""
    file = file.absolute()
    if not file.parent.is_dir():
        raise ConfigError(f"{name} is '{file}', in a folder that does not exist; make it first")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"{name} is '{file}', which cannot be written; give a file that you may write")
