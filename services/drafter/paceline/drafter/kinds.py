"""What a way of drafting must offer, and the values it works on."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.core.tokens import EMPTY_HASH
from paceline.core.types import SamplingParams


@dataclass(slots=True, eq=False)
class DraftSession:
    """One choice of a verifier as the drafter knows it. `SessionTable` owns and changes it; kinds read it."""

    id: int
    generation: int
    total_tokens: int
    """Length announced by the open; the session is usable once it holds that many tokens."""
    prompt_tokens: int
    """Length of the original prompt; noise positions count from its end."""
    params: SamplingParams
    noise_key: int
    tokens: array[int] = field(default_factory=lambda: array("I"))
    """Original prompt, then committed tokens. Only ever grows."""
    hashes: array[int] = field(default_factory=lambda: array("I", [EMPTY_HASH]))
    """Entry i is the prefix hash of the first i tokens."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Draft up to ``k`` tokens after the first ``base_length`` tokens of the session."""

    session: DraftSession
    base_length: int
    k: int


@dataclass(frozen=True, slots=True)
class Proposal:
    """At most k tokens, each with one byte: 255 times the chance that it is accepted given those before."""

    token_ids: Sequence[int] = ()
    confidence: bytes = b""


class DraftKind(Protocol):
    """A way of drafting, batched over sessions.

    Kinds read sessions and never change them; what a kind keeps for a session it keys by the session object
    (identity, not id: a new generation is a new object) and drops at `close`. `open`, `extend` and `close`
    run on the event loop, must be quick, and for a ``blocking`` kind may run while `propose` does: such a
    kind only notes the news there and reads ``session.tokens[:base_length]`` in its thread, which is safe
    since tokens only grow. `propose` and `catch_up` of a blocking kind run in the one worker thread, of
    other kinds on the loop.
    """

    blocking: bool
    vocab_size: int
    """Token ids must be below this; 0 where any fits."""
    max_context_tokens: int
    """Longest session that can be opened; 0 means no limit of its own."""

    @property
    def behind(self) -> bool:
        """Whether `catch_up` has anything to do."""

    def open(self, session: DraftSession) -> None:
        """A session begins, without tokens yet; they come through `extend`."""

    def extend(self, session: DraftSession, token_ids: Sequence[int]) -> None:
        """``token_ids`` were just appended to ``session.tokens``."""

    def close(self, session: DraftSession) -> None:
        """The session is over (finished, evicted or replaced)."""

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        """One proposal for each ask, in order; empty where there is nothing worth proposing."""

    def catch_up(self) -> None:
        """One bounded piece of work that is not urgent, run while nothing is asked."""

    def shutdown(self) -> None:
        """Frees what the kind holds; nothing is called afterwards."""


def confidence_byte(chance: float) -> int:
    """A probability as the protocol's byte."""
    return max(0, min(255, round(255 * chance)))


class InlineKind:
    """Base of kinds that are cheap enough for the event loop and fit any vocabulary."""

    blocking = False
    vocab_size = 0
    max_context_tokens = 0

    @property
    def behind(self) -> bool:
        return False

    def catch_up(self) -> None:
        """Nothing is ever put off."""

    def shutdown(self) -> None:
        """Nothing to free."""
