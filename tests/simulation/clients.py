"""The clients of a simulated run: what they send, and whether what comes back is right."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from lamina.core.errors import LaminaError
from lamina.core.outputs import FinishReason
from lamina.core.requests import Drawn
from lamina.core.types import Client
from lamina.engine.streams import Submission
from lamina.engine.updates import RequestUpdate, TokenUpdate
from tests.simulation.frontends import Frontend
from tests.simulation.model import expected
from tests.simulation.scenario import Asked, Asking
from tests.simulation.world import Broken

if TYPE_CHECKING:
    from tests.simulation.cluster import Simulation

MOST_OPEN = 16  # requests: clients wait while there are so many
MOST_POISON = 2  # of these: the first death by each is replaced up to ``liveness.MOST_WAIT_S`` later, within ``CALM_S``
ABORT_S = 5.0  # after an abort, at most, for the last tokens to arrive while nothing stops engine or frontend

Part = tuple[int, Sequence[int], FinishReason | None]
"""News of a completion: its index, new tokens, and why it has ended."""


@dataclass
class Sent:
    """A request of a client, and what has come back.

    Attributes:
        may_abort: Whether the client has aborted it, or will.
        frontend: The process that it was sent through; None: the engine's own.
        aborted_at: When that process was told to abort it.
    """

    number: int
    asked: Asked
    drawn: list[list[int]]
    ended: list[FinishReason | None]
    error: str | None = None
    finished: bool = False
    may_abort: bool = False
    frontend: Frontend | None = None
    aborted_at: float | None = None

    @property
    def name(self) -> str:
        return f"request{self.number}"


class Clients:
    """All clients of a run.

    Attributes:
        sent: Their requests.
        open: How many of these have not ended.
    """

    def __init__(self, run: "Simulation", load: Asking) -> None:
        self.sent: list[Sent] = []
        self.open = 0
        self._run, self._load = run, load

    def send_again(self) -> None:
        """Send what has not ended to another engine, as frontends do for their requests."""
        for sent in self.sent:
            if sent.frontend is None and not sent.finished and self._run.failure is None:
                left = {index: sent.drawn[index] for index, reason in enumerate(sent.ended) if reason is None}
                begun = any(left.values()) or len(left) < sent.asked.params.n
                self._submit(sent, left if begun else None, again=True)

    def request(self) -> None:
        """A client sends a request, and the next one comes later."""
        if self._run.calm or self._run.engine is None:
            return
        if self.open >= MOST_OPEN or (self._run.is_down and not self._run.frontends.living):
            self._run.world.call_later(0.05, self.request)
            return
        asked = self._load.ask(self._run.engine.max_model_len, self._run.layout.config.max_num_seqs)
        if asked is None:
            return
        self._run.world.call_later(asked.next_s, self.request)
        if asked.poison and sum(one.asked.poison and not one.finished for one in self.sent) >= MOST_POISON:
            return
        n = asked.params.n
        sent = Sent(len(self.sent), asked, [[] for _ in range(n)], [None] * n)
        if self._run.frontends.living:
            if not self._submit_remotely(sent):
                return
        elif not self._submit(sent):
            return
        self.sent.append(sent)
        self.open += 1
        self._run.world.tell(
            f"{sent.name} of {asked.client} comes: {len(asked.prompt)} tokens, {n} x {asked.params.max_tokens}"
        )
        if asked.abort_at is not None:
            sent.may_abort = True
            self._run.world.call_later(asked.abort_at, partial(self._abort, sent))
            if asked.again_s is not None:
                self._run.world.call_later(asked.abort_at + asked.again_s, partial(self._abort, sent))

    def _submit(self, sent: Sent, drawn: Drawn | None = None, again: bool = False) -> bool:
        """Give a request to the engine. Returns whether it was accepted."""
        asked, engine = sent.asked, self._run.engine
        assert engine is not None
        client = Client(asked.client, asked.client)

        def on_tokens(update: TokenUpdate) -> None:
            self._on_tokens(sent, update)

        try:
            engine.submit_tokens(
                sent.name, asked.prompt, asked.params, on_tokens, client, asked.seed, drawn, again=again
            )
        except LaminaError as error:
            self._run.world.tell(f"{sent.name} is refused: {error}")
            return False
        return True

    def _submit_remotely(self, sent: Sent) -> bool:
        """Give a request to a frontend. Returns whether one is connected."""
        sent.frontend = one = self._run.frontends.choose(self._run.world.random.random())
        if one is None:
            return False
        sent.asked = asked = replace(sent.asked, cuts={})

        def on_submitted() -> None:
            if sent.aborted_at is not None:  # meanwhile; ``engine.streams`` aborts again, too
                self._abort(sent)

        def on_refused(why: str) -> None:
            if any(sent.drawn):
                self._run.failure = self._run.failure or Broken(f"{sent.name}, which is refused, has drawn tokens")
            self._end(sent, f"is refused: {why}")

        def on_update(update: RequestUpdate) -> None:
            parts = [(part.index, part.token_ids, part.finish_reason) for part in update.completions]
            self._on_news(sent, parts, update.finished, update.error)

        params = replace(asked.params, seed=asked.seed)
        submission = Submission(sent.name, asked.prompt, params, on_update)
        one.submit(submission, Client(asked.client, asked.client), on_submitted, on_refused)
        return True

    def on_frontend_exit(self, frontend: str) -> None:
        """Clients of a frontend that has ended hear nothing more of their requests."""
        for sent in self.sent:
            if sent.frontend is not None and sent.frontend.name == frontend and not sent.finished:
                self._end(sent, "is lost with its frontend")

    def _end(self, sent: Sent, why: str) -> None:
        """A request has ended without a last update."""
        if not sent.finished:
            sent.finished = True
            self.open -= 1
            self._run.world.tell(f"{sent.name} {why}")

    def hang_up(self, choice: float) -> None:
        """A client aborts all its requests at once, as if its frontend had died. ``choice`` selects the client."""
        clients = sorted({one.asked.client for one in self.sent if not one.finished})
        if not clients:
            return
        client = clients[int(choice * len(clients))]
        self._run.world.tell(f"FAULT {client} hangs up")
        for sent in self.sent:
            if sent.asked.client == client and not sent.finished:
                sent.may_abort = True
                self._abort(sent)

    def cut(self, names: Collection[str], choice: float) -> None:
        """A client ends the first completion of one of these requests, or of any other one if there are none."""
        found = [one for one in self.sent if one.frontend is None and not one.finished and one.ended[0] is None]
        found = [one for one in found if one.name in names] or found
        found = [one for one in found if not one.asked.params.use_beam_search]
        if found and self._run.engine is not None and not self._run.is_down:
            sent = found[int(choice * len(found))]
            self._run.world.tell(f"FAULT the client of {sent.name} ends its first completion")
            sent.asked = replace(sent.asked, cuts={**sent.asked.cuts, 0: len(sent.drawn[0])})
            self._run.engine.end_completion(sent.name, 0)

    def _abort(self, sent: Sent) -> None:
        """A client aborts a request: once another engine has taken over, if it was killed."""
        assert self._run.engine is not None
        if sent.frontend is not None:
            if not sent.finished and sent.frontend.remote is not None:
                sent.aborted_at = self._run.world.now
                sent.frontend.remote.abort(sent.name)
        elif self._run.is_down:
            self._run.world.call_later(0.1, partial(self._abort, sent))
        else:
            self._run.engine.abort(sent.name)

    def _on_tokens(self, sent: Sent, update: TokenUpdate) -> None:
        parts = [(part.index, part.token_ids, part.finish_reason) for part in update.completions]
        if any(sent.ended[index] is not None for index, _, _ in parts):
            self._run.failure = self._run.failure or Broken(f"a completion of {sent.name} goes on after its end")
        self._on_news(sent, parts, update.finished, update.error)

    def _on_news(self, sent: Sent, parts: Sequence[Part], finished: bool, error: str | None) -> None:
        try:
            self._take(sent, parts, finished, error)
        except Broken as failure:  # the engine survives what its callers raise
            self._run.failure = self._run.failure or failure

    def _take(self, sent: Sent, parts: Sequence[Part], finished: bool, error: str | None) -> None:
        if sent.finished:
            raise Broken(f"{sent.name} is told more after its end")
        if sent.frontend is not None and sent.aborted_at is not None:
            now = self._run.world.now
            begun = max(sent.aborted_at, self._run.disturbed_at, sent.frontend.loop.stopped_until)
            if now > begun + ABORT_S:
                raise Broken(f"{sent.name} was aborted {now - sent.aborted_at:.1f} s ago, and still draws tokens")
        for index, tokens, reason in parts:
            if sent.ended[index] is not None and tokens:
                raise Broken(f"completion {index} of {sent.name} goes on after its end")
            sent.drawn[index] += tokens
            sent.ended[index] = reason
            cut = sent.asked.cuts.get(index)
            if cut is not None and len(sent.drawn[index]) >= cut and self._run.engine is not None:
                self._run.engine.end_completion(sent.name, index)
        if finished:
            sent.finished, sent.error = True, error
            self.open -= 1
            self._run.world.tell(f"{sent.name} ends: {', '.join(str(one) for one in sent.ended)} {error or ''}")
            self._judge(sent)

    def _judge(self, sent: Sent) -> None:
        """The tokens must be those of the plain function."""
        asked = sent.asked
        if asked.poison:
            cut = {(index, FinishReason.STOP) for index in asked.cuts}
            of_itself = [one for index, one in enumerate(sent.ended) if (index, one) not in cut]
            if not {*of_itself} <= {FinishReason.ERROR, FinishReason.ABORT} or any(sent.drawn):
                raise Broken(f"{sent.name}, which workers die of, ends with {sent.ended} after {sent.drawn}")
            return
        wanted_of = expected(asked.prompt, asked.params, asked.seed)
        for index, (drawn, reason, wanted) in enumerate(zip(sent.drawn, sent.ended, wanted_of, strict=True)):
            if reason is None:
                raise Broken(f"completion {index} of {sent.name} has no finish reason")
            was_cut = len(drawn) >= asked.cuts.get(index, len(drawn) + 1)
            whole = reason in (FinishReason.STOP, FinishReason.LENGTH) and not was_cut
            if (drawn != wanted) if whole else (drawn != wanted[: len(drawn)]):
                at = next(
                    (place for place, pair in enumerate(zip(drawn, wanted, strict=False)) if pair[0] != pair[1]),
                    len(drawn),
                )
                raise Broken(
                    f"completion {index} of {sent.name}, {len(asked.prompt)} tokens of prompt, ends with {reason} "
                    f"after {len(drawn)} tokens of {len(wanted)}; token {at} is the first that is wrong"
                )
            if reason is FinishReason.ABORT and not sent.may_abort:
                raise Broken(f"{sent.name} was aborted, and nobody asked for that")
            if reason is FinishReason.ERROR and not self._may_fail(sent.error or ""):
                raise Broken(f"{sent.name} ends in an error: {sent.error}")

    def _may_fail(self, error: str) -> bool:
        """Errors that are right: too few workers are left, or workers died again and again with this request."""
        return "may need" in error or "is not run again" in error or "not fit" in error
