"""Options that several commands share."""

from typing import Annotated

import typer

from lamina.config import LoadFormat

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
