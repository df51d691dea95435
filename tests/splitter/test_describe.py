"""What describes and draws a split model."""

import pytest

from lamina.splitter import SplitModel, describe, split
from lamina.splitter.describe import size, svg
from tests.support.random_models import variant


@pytest.fixture(scope="module")
def model() -> SplitModel:
    return split(variant("gptj", layers=5))


def test_many_kinds_are_abridged() -> None:
    model = split(variant("gpt2-layer-scale", layers=12))
    assert len(describe.kinds(model)) == 13
    assert "5 more kinds" in svg(model)


def test_run_order_stops_at_q(model: SplitModel) -> None:
    before, after = describe.run_order(model.slices[1])
    assert before[-1].endswith("q_proj.weight")
    assert {name.split(".")[-2] for name in after} == {"k_proj", "v_proj", "fc_in", "fc_out"}


def test_ranges() -> None:
    assert describe.ranges([0, 2, 3, 4, 7]) == "0, 2-4, 7"


@pytest.mark.parametrize(
    ("nbytes", "text"), [(96, "96 B"), (2880, "2880 B"), (16384, "16 KiB"), (10 << 20, "10 MiB"), (3 << 29, "1.5 GiB")]
)
def test_size(nbytes: int, text: str) -> None:
    assert size(nbytes) == text
