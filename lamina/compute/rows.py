"""The rows of a step: what slices read besides weights, attention and context."""

import torch

from lamina.lowering import LoweredSlice, Workspace


class Rows:
    """Token ids and positions of a step, int64 [rows], and what slices derive from the positions alone.

    Attributes:
        workspace: memory for the step's slices; may be reused from another step with as many rows.
        placed: what a GPU keeps of them.
    """

    placed: object = None

    def __init__(self, ids: torch.Tensor, positions: torch.Tensor, workspace: Workspace | None = None) -> None:
        self.ids = ids
        self.positions = positions
        self.workspace = workspace or Workspace(len(ids))
        self._prepared: dict[object, tuple[torch.Tensor, ...]] = {}

    def prepared(self, piece: LoweredSlice) -> tuple[torch.Tensor, ...]:
        """Return what ``piece`` derives from the positions, computed once a step for all slices that need the same."""
        prepared = self._prepared.get(piece.prelude_key)
        if prepared is None:
            prepared = self._prepared[piece.prelude_key] = piece.prepare(self.positions)
        return prepared


def pad(rows: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [T], extended with zeros to [count]."""
    if count == len(rows):
        return rows
    return torch.nn.functional.pad(rows, (0, count - len(rows)))
