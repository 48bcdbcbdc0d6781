"""What was measured since the last report to the policy."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from paceline.core.types import StepRecord
from paceline.v1 import policy_pb2

MAX_RECORDS = 4096
"""Steps and requests kept while no policy takes them; the oldest go first."""


@dataclass(slots=True)
class DraftTally:
    """Rounds of this verifier with one drafter."""

    kind: str
    rounds: int = 0
    undrafted_rounds: int = 0
    verified_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    asked_tokens: int = 0
    arrived_tokens: int = 0
    proposals: int = 0
    elapsed_s: float = 0.0
    hold_s: float = 0.0
    queue_s: float = 0.0
    compute_s: float = 0.0
    waited_s: float = 0.0

    def round(self, asked: int, verified: int, accepted: int, waited_s: float) -> None:
        self.rounds += asked > 0
        self.undrafted_rounds += asked > 0 and not verified
        self.asked_tokens += asked
        self.waited_s += waited_s
        longer = [0] * (verified - len(self.verified_by_position))
        self.verified_by_position += longer
        self.accepted_by_position += longer
        for position in range(verified):
            self.verified_by_position[position] += 1
            self.accepted_by_position[position] += position < accepted

    def proposal(
        self, tokens: int, *, elapsed_s: float, hold_s: float, queue_s: float, compute_s: float
    ) -> None:
        self.proposals += 1
        self.arrived_tokens += tokens
        self.elapsed_s += elapsed_s
        self.hold_s += hold_s
        self.queue_s += queue_s
        self.compute_s += compute_s

    def to_proto(self, drafter_id: str) -> policy_pb2.DraftStats:
        return policy_pb2.DraftStats(
            drafter_id=drafter_id,
            drafter_kind=self.kind,
            rounds=self.rounds,
            undrafted_rounds=self.undrafted_rounds,
            verified_by_position=self.verified_by_position,
            accepted_by_position=self.accepted_by_position,
            asked_tokens=self.asked_tokens,
            arrived_tokens=self.arrived_tokens,
            proposals=self.proposals,
            elapsed_s=self.elapsed_s,
            hold_s=self.hold_s,
            queue_s=self.queue_s,
            compute_s=self.compute_s,
            waited_s=self.waited_s,
        )


class Reports:
    """Collects on the event loop; `take` empties it."""

    def __init__(self) -> None:
        self.steps: deque[StepRecord] = deque(maxlen=MAX_RECORDS)
        self.requests: deque[policy_pb2.RequestRecord] = deque(maxlen=MAX_RECORDS)
        self._drafts: dict[str, DraftTally] = {}

    def drafter(self, drafter_id: str, kind: str) -> DraftTally:
        """The tally of the current interval; ask again for every use."""
        return self._drafts.setdefault(drafter_id, DraftTally(kind))

    def take(
        self,
    ) -> tuple[list[StepRecord], dict[str, DraftTally], list[policy_pb2.RequestRecord]]:
        taken = list(self.steps), self._drafts, list(self.requests)
        self.steps.clear()
        self.requests.clear()
        self._drafts = {}
        return taken
