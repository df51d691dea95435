"""Options that several commands share."""

from typing import Annotated, Literal

import typer

from lamina.config import LoadFormat, Pipelining, TransportName
from lamina.errors import ConfigError, RequestError
from lamina.types import DType, SamplingParams

Model = Annotated[str | None, typer.Option(help="Hugging Face model directory. Default: the bundled small model.")]
Compute = Annotated[str, typer.Option(help="Compute workers, kind:count joined by commas.")]
Memory = Annotated[str, typer.Option(help="Memory workers, kind:count joined by commas.")]
MaxTokens = Annotated[int, typer.Option(help="At most so many tokens per completion.")]
Temperature = Annotated[float, typer.Option(help="0 takes the most likely token each time.")]
TopP = Annotated[float, typer.Option(help="Draw from the likeliest tokens that hold this share of probability.")]
Seed = Annotated[int | None, typer.Option(help="Makes drawing repeatable.")]
Weights = Annotated[
    LoadFormat, typer.Option("--load-format", help="dummy: random weights of the right shapes, for benchmarks.")
]
DTypeName = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option("--dtype", help="Of weights, activations and KV; auto takes the checkpoint's."),
]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Tokens of prompt and answer together. Default: what the model and the pool allow.")
]
KvBytes = Annotated[
    int | None,
    typer.Option(
        "--kv-cache-memory-bytes", help="KV bytes per memory worker. Default: half of what is free beside the weights."
    ),
]
Threads = Annotated[int | None, typer.Option(help="CPU threads per worker. Default: each pool shares all cores.")]

Lanes = Annotated[str, typer.Option(help="Batches in flight: auto, or a number.")]
PipeliningName = Annotated[Pipelining, typer.Option("--pipelining", help="How lanes take turns on compute workers.")]
QFirst = Annotated[bool, typer.Option(help="Send q before k and v are computed.")]
MiniBatches = Annotated[int, typer.Option(help="Pieces in which q is sent.")]
Transport = Annotated[
    TransportName, typer.Option(help="Between workers; auto: shm on one host, else rdma if it proves itself, else tcp.")
]
SecretFile = Annotated[
    str | None,
    typer.Option(help="File of the cluster's secret, made if it is not there. Default: a new one, kept in memory."),
]
PlanAhead = Annotated[bool, typer.Option(help="Plan the next step while one runs.")]
ComputeCores = Annotated[str | None, typer.Option(help="CPU list of the compute workers, as 0-3,8. Default: all.")]
MemoryCores = Annotated[str | None, typer.Option(help="CPU list of the memory workers. Default: all.")]
Trace = Annotated[str | None, typer.Option(help="Write a timeline for Perfetto to this file at the end.")]


def as_lanes(text: str) -> int | None:
    """The number of lanes, None for auto. Raises ConfigError."""
    if text == "auto":
        return None
    if not text.isdigit():
        raise ConfigError(f"lanes is {text!r}; give auto or a number")
    return int(text)


def as_dtype(name: Literal["auto", "float32", "bfloat16", "float16"]) -> DType | Literal["auto"]:
    """The element type of this name."""
    return name if name == "auto" else DType(name)


def sampling_params(max_tokens: int, temperature: float, top_p: float, seed: int | None) -> SamplingParams:
    """The parameters of the options above. Raises RequestError for values out of range."""
    try:
        return SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    except ValueError as error:
        raise RequestError(str(error)) from error
