"""The draft sessions of all verifiers: assembled from chunks, continued by commits, bounded in number."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from enum import Enum, auto

from paceline.core.errors import invalid
from paceline.core.tokens import extend_hash
from paceline.core.types import SamplingParams
from paceline.drafter.kinds import DraftKind, DraftSession

MAX_SESSION_TOKENS = 1 << 20
"""Longest session where the kind has no limit of its own."""

MAX_TABLE_TOKENS = 1 << 26
"""Tokens of all sessions together (8 bytes each here, more in the kinds); beyond it the oldest go."""


class CommitStatus(Enum):
    OK = auto()
    UNKNOWN_SESSION = auto()
    PREFIX_MISMATCH = auto()


class SessionTable:
    """Owns the sessions. Soft state: whatever is dropped here, a verifier opens again.

    The least recently used session goes when there are more than ``max_sessions`` (those still being
    assembled counted apart, with the same bound) or too many tokens.
    """

    def __init__(
        self, kind: DraftKind, *, max_sessions: int, max_table_tokens: int = MAX_TABLE_TOKENS
    ) -> None:
        self._kind = kind
        self._max_sessions = max_sessions
        self._max_table_tokens = max_table_tokens
        self._max_session_tokens = min(kind.max_context_tokens or MAX_SESSION_TOKENS, MAX_SESSION_TOKENS)
        self._sessions: OrderedDict[int, DraftSession] = OrderedDict()
        self._opening: OrderedDict[int, DraftSession] = OrderedDict()
        self._tokens = 0

    @property
    def vocab_size(self) -> int | None:
        """Token ids must be below this, where it is known."""
        return self._kind.vocab_size or None

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, session_id: int) -> DraftSession | None:
        """The usable session of this id, if any."""
        return self._sessions.get(session_id)

    def begin(
        self,
        session_id: int,
        generation: int,
        *,
        total_tokens: int,
        prompt_tokens: int,
        params: SamplingParams,
        noise_key: int,
    ) -> None:
        """Starts assembling a session; the one of an older generation stays until the new one is whole.

        Raises:
            PacelineError: INVALID_ARGUMENT naming the field and its limit.
        """
        if not 1 <= total_tokens <= self._max_session_tokens:
            raise invalid("total_tokens", f"must be from 1 to {self._max_session_tokens}")
        if not 1 <= prompt_tokens <= total_tokens:
            raise invalid("sampling.prompt_tokens", f"must be from 1 to total_tokens ({total_tokens})")
        for known in (self._sessions.get(session_id), self._opening.get(session_id)):
            if known is not None and generation < known.generation:
                raise invalid("session_gen", f"must be at least {known.generation}, the newest seen")
        session = DraftSession(session_id, generation, total_tokens, prompt_tokens, params, noise_key)
        self._drop(self._opening, session_id)
        self._opening[session_id] = session
        self._kind.open(session)
        while len(self._opening) > self._max_sessions:
            self._drop(self._opening, next(iter(self._opening)))

    def append(
        self, session_id: int, generation: int, offset: int, token_ids: Sequence[int]
    ) -> DraftSession | None:
        """Adds the next tokens of a session being assembled; returns it once it is whole, else None.

        Raises:
            PacelineError: INVALID_ARGUMENT, and the assembly is dropped.
        """
        session = self._opening.get(session_id)
        if session is None or session.generation != generation:
            raise invalid("offset", "chunks must come in order, from offset 0")
        try:
            if offset != len(session.tokens):
                raise invalid("offset", f"must be {len(session.tokens)}: chunks must come in order")
            if offset + len(token_ids) > session.total_tokens:
                raise invalid("token_ids", f"must not go beyond total_tokens ({session.total_tokens})")
            self._check_vocabulary(token_ids)
        except Exception:
            self._drop(self._opening, session_id)
            raise
        self._extend(session, token_ids)
        if len(session.tokens) < session.total_tokens:
            self._bound_tokens()
            return None
        del self._opening[session_id]
        self._drop(self._sessions, session_id)
        self._sessions[session_id] = session
        while len(self._sessions) > self._max_sessions:
            self._drop(self._sessions, next(iter(self._sessions)))
        self._bound_tokens()
        return session

    def commit(
        self, session_id: int, generation: int, base_length: int, prefix_hash: int, token_ids: Sequence[int]
    ) -> tuple[CommitStatus, DraftSession | None]:
        """Applies tokens that the verifier committed after its first ``base_length`` tokens.

        Only what is new is appended, so that replayed and overlapping commits are harmless. A session that
        grows out of its limits or gets a token it cannot hold is dropped.
        """
        session = self._sessions.get(session_id)
        if session is None or session.generation != generation:
            return CommitStatus.UNKNOWN_SESSION, None
        self._sessions.move_to_end(session_id)
        known = len(session.tokens) - base_length
        if (
            known < 0
            or session.hashes[base_length] != prefix_hash
            or list(token_ids[:known]) != list(session.tokens[base_length : base_length + len(token_ids)])
        ):
            return CommitStatus.PREFIX_MISMATCH, session
        new = token_ids[known:]
        if new:
            if not self._fits(new) or len(session.tokens) + len(new) > MAX_SESSION_TOKENS:
                self._drop(self._sessions, session_id)
                return CommitStatus.UNKNOWN_SESSION, None
            self._extend(session, new)
            self._bound_tokens()
        return CommitStatus.OK, session

    def close(self, session_id: int, up_to_generation: int | None = None) -> None:
        """Ends the session and any assembly of it, unless of a newer generation; unknown ids are fine."""
        for sessions in (self._opening, self._sessions):
            session = sessions.get(session_id)
            if session is None:
                continue
            if up_to_generation is None or session.generation <= up_to_generation:
                self._drop(sessions, session_id)

    def _fits(self, token_ids: Sequence[int]) -> bool:
        return not self._kind.vocab_size or max(token_ids) < self._kind.vocab_size

    def _check_vocabulary(self, token_ids: Sequence[int]) -> None:
        if token_ids and not self._fits(token_ids):
            raise invalid(
                "token_ids",
                f"id {max(token_ids)} must be below the vocabulary's size ({self._kind.vocab_size})",
            )

    def _extend(self, session: DraftSession, token_ids: Sequence[int]) -> None:
        session.tokens.extend(token_ids)
        digest = session.hashes[-1]
        for token_id in token_ids:
            digest = extend_hash(digest, (token_id,))
            session.hashes.append(digest)
        self._tokens += len(token_ids)
        self._kind.extend(session, token_ids)

    def _bound_tokens(self) -> None:
        """The youngest usable session stays, whatever its size."""
        while self._tokens > self._max_table_tokens:
            if len(self._opening) > 1:
                self._drop(self._opening, next(iter(self._opening)))
            elif len(self._sessions) > 1:
                self._drop(self._sessions, next(iter(self._sessions)))
            else:
                return

    def _drop(self, sessions: OrderedDict[int, DraftSession], session_id: int) -> None:
        session = sessions.pop(session_id, None)
        if session is not None:
            self._tokens -= len(session.tokens)
            self._kind.close(session)
