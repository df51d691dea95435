"""Scores after the masks of grammars, in one thread and in several, against what the grammars' expressions match."""

import re

import pytest
import torch

from lamina.compute import constraints
from lamina.compute.constraints import Grammars, forbid
from lamina.core.sampling import StructuredOutputs
from lamina.models.directory import find
from lamina.text.tokenizer import Tokenizer

WIDTH = 2048  # 40 rows are more than one part
FORMS = ["[0-9]{3}", "(yes|no)", "[a-z]+=[0-9]+"]


@pytest.mark.parametrize("most", [0, 1 << 20], ids=["several threads", "one thread"])
def test_tokens_that_cannot_come_next_are_forbidden_in_their_rows_alone(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraints, "MASKED_IN_PLACE", most)
    tokenizer = Tokenizer(find(None))
    grammars = Grammars(lambda: tokenizer, [0])
    rows = list(range(1, 40, 2))
    forms = [FORMS[row % 3] for row in rows]
    before = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(1))
    scores = forbid(before, rows, [grammars.begin(StructuredOutputs(regex=form), WIDTH) for form in forms])
    texts = {token: tokenizer.decode([token]) for token in range(WIDTH)}
    begins = {"[0-9]{3}": "[0-9]{1,3}", "(yes|no)": "y|ye|yes|n|no", "[a-z]+=[0-9]+": "[a-z]+(=[0-9]*)?"}
    for row in range(40):
        if row not in rows:
            assert torch.equal(scores[row], before[row])
            continue
        allowed = re.compile(begins[FORMS[row % 3]])
        kept = [token for token in range(WIDTH) if scores[row, token] > -torch.inf]
        assert kept and kept == [token for token, text in texts.items() if allowed.fullmatch(text)]
        assert torch.equal(scores[row, kept], before[row, kept])
