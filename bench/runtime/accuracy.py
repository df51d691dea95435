"""Accuracy of variants of the bundled model on held-out text: perplexity, and how far logits are from a reference.

The text is files of Python's standard library that the model was not trained on, in windows of ``CONTEXT`` tokens.
"""

import argparse
import math
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from lamina.models.directory import find
from lamina.text.tokenizer import Tokenizer
from tools.train_bundled import CONTEXT, read_sources


def read_arguments(description: str | None) -> argparse.Namespace:
    """Return the arguments ``windows`` and ``threads`` of the command line, and let torch use so many threads."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=16, help=f"number of windows of {CONTEXT} tokens")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    return args


def read_windows(count: int) -> Tensor:
    """Return token ids [count, CONTEXT] of held-out text."""
    _, texts = read_sources(Path(sysconfig.get_paths()["stdlib"]))
    return torch.tensor(Tokenizer(find(None)).encode("\n".join(texts))[: count * CONTEXT]).view(-1, CONTEXT)


def run(model: Any, ids: Tensor) -> list[Tensor]:
    """Return a model's logits [CONTEXT, vocabulary] of each window."""
    return [model(window[None], use_cache=False).logits[0] for window in ids]


class AccuracyTable:
    """A table with one row for each variant of a model, compared with the logits of a reference."""

    def __init__(self, names: Sequence[str], ids: Tensor, exact: Sequence[Tensor]) -> None:
        """Create an empty table.

        Args:
            names: Headings of the columns that say which variant a row is.
            ids: Token ids [windows, CONTEXT].
            exact: The reference's logits of each window.
        """
        self._ids, self._exact = ids, exact
        deviation = float(torch.stack([each.std() for each in exact]).mean())
        tokens = len(ids) * (CONTEXT - 1)
        self.table = Table(title=f"{tokens} held-out tokens; standard deviation of the logits {deviation:.2f}")
        for name in names:
            self.table.add_column(name)
        for heading in ("perplexity", "mean logit error", "max logit error", "top-1 agreement"):
            self.table.add_column(heading, justify="right")

    def add(self, names: Sequence[str], logits: Sequence[Tensor]) -> None:
        """Add the row of one variant, given its logits of each window."""
        pairs = list(zip(logits, self._exact, strict=True))
        errors = [(got - right).abs() for got, right in pairs]
        agree = [(got.argmax(-1) == right.argmax(-1)).double() for got, right in pairs]
        self.table.add_row(
            *names,
            f"{self._perplexity(logits):.4f}",
            f"{_mean(errors):.5f}",
            f"{max(float(each.max()) for each in errors):.3f}",
            f"{_mean(agree):.2%}",
        )

    def _perplexity(self, logits: Sequence[Tensor]) -> float:
        pairs = zip(logits, self._ids, strict=True)
        return math.exp(_mean([torch.nn.functional.cross_entropy(each[:-1], window[1:]) for each, window in pairs]))


def _mean(windows: Sequence[Tensor]) -> float:
    return float(torch.stack([each.double().mean() for each in windows]).mean())
