"""Models in which a row's results depend on its place in the step, or on the rows beside it, are refused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaMLP

from lamina.core.errors import UnsupportedModelError
from lamina.splitter import adapters, split
from tests.support.random_models import variant

ORIGINAL = LlamaMLP.forward


def _temperature(x: Tensor) -> Tensor:
    """Differs from 1 only after more rows than any trial has."""
    return x * (1 + torch.floor(torch.arange(x.shape[1]) / 8192.0))[:, None]


def _bias_by_row(x: Tensor) -> Tensor:
    return x + (torch.arange(x.shape[1]) % 8).to(x.dtype)[:, None]


def _table_by_row(x: Tensor) -> Tensor:
    return x + torch.linspace(0, 1, 64)[torch.arange(x.shape[1]) % 64][:, None]


def _masked_by_row(x: Tensor) -> Tensor:
    return torch.where((torch.arange(x.shape[1]) >= 4096)[:, None], 0.0, x)


def _scaled_by_count(x: Tensor) -> Tensor:
    return x / x.shape[1]


def _filled_with_count(x: Tensor) -> Tensor:
    return x + torch.full((1,), x.shape[1], dtype=x.dtype)


def _share_of_rows(x: Tensor) -> Tensor:
    chosen = torch.histc((x[0, :, 0] > 0).float(), 2, 0, 1)
    return x * chosen[0]


def _shifted(x: Tensor) -> Tensor:
    return x + x[:, torch.arange(x.shape[1]) - 1]


def _left_sorted(x: Tensor) -> Tensor:
    return x[:, x[0, :, 0].sort().indices]


def _first_row(x: Tensor) -> Tensor:
    return x + x[:, torch.zeros(1, dtype=torch.long)]


def _sorted_and_back(x: Tensor) -> Tensor:
    order = x[0, :, 0].sort().indices
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0])
    return (2 * x[:, order])[:, back]


def _zeros(x: Tensor) -> Tensor:
    return x + torch.zeros(x.shape[1])[:, None]


def _patched(monkeypatch: pytest.MonkeyPatch, function: Callable[[Tensor], Tensor]) -> None:
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: function(ORIGINAL(self, x)))


@pytest.mark.parametrize(
    "function",
    [_temperature, _bias_by_row, _table_by_row, _masked_by_row, _scaled_by_count, _filled_with_count, _share_of_rows],
)
def test_numbers_of_rows_are_refused(function: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    _patched(monkeypatch, function)
    with pytest.raises(UnsupportedModelError, match="numbers of rows"):
        split(variant("llama"))


@pytest.mark.parametrize("function", [_shifted, _left_sorted, _first_row])
def test_rows_that_read_others_are_refused(
    function: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    _patched(monkeypatch, function)
    with pytest.raises(UnsupportedModelError, match="depends on the other tokens"):
        split(variant("llama"))


@pytest.mark.parametrize("function", [_sorted_and_back, _zeros])
def test_rows_that_come_back_are_accepted(
    function: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    _patched(monkeypatch, function)
    assert split(variant("llama")).slices


def test_a_temperature_of_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model as transformers writes it: with a scale that no trial reaches."""
    monkeypatch.delitem(adapters._ADAPTERS, "llama4_text")
    with pytest.raises(UnsupportedModelError, match=r"self_attn .*numbers of rows"):
        split(variant("llama4_text", floor_scale=8192))
