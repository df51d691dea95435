"""Options that several commands share."""

import functools
import inspect
import resource
import secrets
from collections.abc import Callable
from typing import Annotated, Any

import typer

from lamina.config import DTypeName, EngineConfig, LoadFormat, Pipelining, TransportName, as_dtype
from lamina.errors import ConfigError, RequestError
from lamina.types import SamplingParams

MaxTokens = Annotated[int, typer.Option(help="At most so many tokens per completion.")]
Temperature = Annotated[float, typer.Option(help="0 takes the most likely token each time.")]
TopP = Annotated[float, typer.Option(help="Draw from the likeliest tokens that hold this share of probability.")]
Seed = Annotated[int | None, typer.Option(help="Makes drawing repeatable. Default: another one each time.")]

Lanes = Annotated[str | None, typer.Option(help="Batches in flight: a number, or auto (the default).")]
PipeliningName = Annotated[Pipelining, typer.Option("--pipelining", help="How lanes take turns on compute workers.")]

LEAST_FILES = 64
"""Open files with which one compute and one memory worker can be started."""

ENGINE: dict[str, Any] = {
    "model": Annotated[
        str | None, typer.Option(help="Hugging Face model directory. Default: the bundled small model.")
    ],
    "compute": Annotated[str, typer.Option(help="Compute workers, kind:count joined by commas.")],
    "memory": Annotated[str, typer.Option(help="Memory workers, kind:count joined by commas.")],
    "load_format": Annotated[
        LoadFormat, typer.Option(help="dummy: random weights of the right shapes, for benchmarks.")
    ],
    "dtype": Annotated[
        DTypeName,
        typer.Option(help="Of weights, activations and KV; auto takes the checkpoint's."),
    ],
    "max_model_len": Annotated[
        int | None,
        typer.Option(help="Tokens of prompt and answer together. Default: what the model and the pool allow."),
    ],
    "default_max_tokens": Annotated[
        int | None,
        typer.Option(
            help="Most tokens of an answer to a chat that gives no max_tokens. "
            "Default: 1024, or an eighth of max-model-len if that is less."
        ),
    ],
    "max_num_seqs": Annotated[int, typer.Option(help="Sequences that decode at once, for each compute worker.")],
    "max_num_batched_tokens": Annotated[
        int, typer.Option(help="Token rows of one step: sequences that decode, and chunks of prompts.")
    ],
    "kv_cache_memory_bytes": Annotated[
        int | None,
        typer.Option(help="KV bytes per memory worker. Default: its share of half of what is free beside the weights."),
    ],
    "threads": Annotated[int | None, typer.Option(help="CPU threads per worker. Default: each pool shares all cores.")],
    "lanes": Lanes,
    "pipelining": PipeliningName,
    "q_first": Annotated[bool, typer.Option(help="Send q before k and v are computed.")],
    "mini_batches": Annotated[int, typer.Option(help="Pieces in which q is sent.")],
    "plan_ahead": Annotated[bool, typer.Option(help="Plan the next step while one runs.")],
    "transport": Annotated[
        TransportName,
        typer.Option(help="Between workers; auto: shm on one host, else rdma if it proves itself, else tcp."),
    ],
    "tls": Annotated[bool, typer.Option(help="Encrypt tcp between workers (TLS 1.3), and use no rdma.")],
    "secret_file": Annotated[
        str | None,
        typer.Option(help="File of the cluster's secret, made if it is not there. Default: a new one, kept in memory."),
    ],
    "compute_cores": Annotated[
        str | None, typer.Option(help="CPU list of the compute workers, as 0-3,8. Default: all.")
    ],
    "memory_cores": Annotated[str | None, typer.Option(help="CPU list of the memory workers. Default: all.")],
    "trace": Annotated[str | None, typer.Option(help="Write a timeline for Perfetto to this file at the end.")],
}
"""The options of every command that runs a model, by the field of EngineConfig that each sets; defaults are its own."""


def engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` with the options of ``ENGINE`` behind its own: they reach it as an EngineConfig, its first argument.

    What is returned raises ConfigError for a value that cannot be.
    """
    defaults = EngineConfig()
    own = list(inspect.signature(command).parameters.values())[1:]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=getattr(defaults, name), annotation=option)
        for name, option in ENGINE.items()
    ]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        settings = {name: values.pop(name) for name in ENGINE}
        _require_files()
        settings |= {"lanes": as_lanes(settings["lanes"]), "dtype": as_dtype(settings["dtype"])}
        command(EngineConfig(**settings), **values)

    run.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
    return run


def _require_files() -> None:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY and files < LEAST_FILES:
        raise ConfigError(
            f"{files} files may be open at once, and sockets count as files; two workers need {LEAST_FILES}. Raise the "
            "limit and run it again: ulimit -n 1024"
        )


def check_model(config: EngineConfig) -> None:
    """Refuse what is mistyped most often before anything slow is imported. Raises ModelError."""
    from lamina.models.directory import find

    find(config.model, weights=False, tokenizer=False)


def as_lanes(text: str | None) -> int | None:
    """The number of lanes, None for auto. Raises ConfigError."""
    if text is None or text == "auto":
        return None
    if not text.isdigit():
        raise ConfigError(f"lanes is {text!r}; give auto or a number")
    return int(text)


def sampling_params(max_tokens: int, temperature: float, top_p: float, seed: int | None) -> SamplingParams:
    """The parameters of the options above, with a fresh seed where none is given. Raises RequestError for values out
    of range."""
    seed = secrets.randbits(31) if seed is None else seed
    try:
        return SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    except ValueError as error:
        raise RequestError(str(error)) from error
