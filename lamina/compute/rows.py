"""The token rows of one step, which all slices read: token ids, positions and values derived from positions."""

import torch

from lamina.lowering import LoweredSlice, Workspace


class Rows:
    """Token ids and positions of a step, int64 [rows], and the values that slices derive only from positions.

    Attributes:
        workspace: Memory for the step's slices. It may come from an earlier step with as many rows.
        placed: Copy of ids and positions on the GPU; None until a GPU's runner has copied them.
    """

    placed: object = None

    def __init__(self, ids: torch.Tensor, positions: torch.Tensor, workspace: Workspace | None = None) -> None:
        self.ids = ids
        self.positions = positions
        self.workspace = workspace or Workspace(len(ids))
        self._prepared: dict[object, tuple[torch.Tensor, ...]] = {}

    def prepared(self, piece: LoweredSlice) -> tuple[torch.Tensor, ...]:
        """Return the values that ``piece`` derives from positions, such as rotary embeddings.

        Slices with the same ``prelude_key`` share them: they are computed once per step.
        """
        prepared = self._prepared.get(piece.prelude_key)
        if prepared is None:
            prepared = self._prepared[piece.prelude_key] = piece.prepare(self.positions)
        return prepared


def pad(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return ``rows``, int64 [T], extended with zeros to [count]."""
    if count == len(rows):
        return rows
    return torch.nn.functional.pad(rows, (0, count - len(rows)))
