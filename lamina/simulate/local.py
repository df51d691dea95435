"""Times of steps with ``--memory local``: KV lies beside the weights, and the compute worker attends to all of it."""

from collections.abc import Mapping, Sequence

from lamina import _native
from lamina.simulate.arrivals import Ints
from lamina.simulate.deployment import Deployment
from lamina.simulate.step_times import Places, slice_times
from lamina.steps import StepPlan


class LocalStepModel:
    """As ``StepModel``, without messages: the virtual cluster's memory workers and cards have nothing to do."""

    latency_s = 0.0

    def __init__(self, deployment: Deployment) -> None:
        self._cost = deployment.compute_cost
        self._tp = deployment.tensor_parallel
        self._slices = slice_times(self._cost, self._tp, deployment.max_num_batched_tokens)

    def times(
        self, plan: StepPlan, homes: Ints, chunk_homes: Sequence[int], split: Mapping[int, Places]
    ) -> tuple[int, _native.StepTimes]:
        """Rows and times of one step. All KV is here: ``homes``, ``chunk_homes`` and ``split`` say nothing more."""
        starts, cost, tp = plan.decoding.starts, self._cost, self._tp
        rows, attention_s = len(starts), 0.0
        if starts:
            attention_s = float(cost.attention_seconds(sum(starts) + rows, rows, 1 / tp))
        draws = rows
        for chunk in plan.chunks:
            rows += len(chunk.tokens)
            draws += bool(chunk.draws)
            attention_s += float(cost.chunk_attention_seconds(len(chunk.tokens), chunk.start, tp))
        slices, runtime = self._slices, cost.fits.runtime
        return rows, _native.StepTimes(
            first_s=slices.first[rows],
            inner_s=slices.inner[rows],
            last_s=slices.after[rows] + slices.ends[draws] + runtime.step_s + runtime.step_row_s * draws,
            chunks_s=attention_s,
            send_s=0.0,
            receive_s=0.0,
            context_s=0.0,
            shares=_native.Shares([]),
        )

    def migration_seconds(self, tokens: int) -> float:
        """Nothing moves: there is no other place."""
        raise AssertionError(f"{tokens} tokens are to move, but only the compute worker has memory")
