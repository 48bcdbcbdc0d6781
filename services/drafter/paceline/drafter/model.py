"""Kind ``model``: a small causal language model on the shared engine, drawing with the verifier's noise."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from paceline.drafter.kinds import Ask, DraftSession, Proposal, confidence_byte
from paceline.engine.step import ItemResult, Runner, Sequence, StepItem, StepPlan
from paceline.wire.settings import MAX_DRAFT_TOKENS, DrafterSettings

CHUNK_TOKENS = {"cpu": 128, "cuda": 512}
"""Prompt tokens fed in one forward: about what a device computes within a few draft steps' time."""

ROUND_TOKENS = MAX_DRAFT_TOKENS + 1
"""A session at most this far behind is level: one round may commit so many tokens."""

CACHED_CONTEXTS = 16
"""Full contexts that the cache holds, memory permitting; sessions are mostly far shorter."""


def margin_chance(margin: float) -> float:
    """Guess at the chance of acceptance from the race margin: 1 - exp(-m) / 2, not calibrated.

    The margin is the best minus the second of log q - log E, the best predictor of acceptance that a drafter
    has (design section 4); at 0 the second-best token would have been as good.
    """
    return 1.0 - 0.5 * math.exp(-max(0.0, margin))


@dataclass(slots=True, eq=False)
class _State:
    """What the cache holds of a session: its committed tokens, then the last draft."""

    sequence: Sequence
    committed: int = 0

    @property
    def left(self) -> int:
        """Tokens that are not in the cache yet."""
        return len(self.sequence.tokens) - self.sequence.computed

    def replace_draft(self, committed: Items[int]) -> None:
        """Makes the sequence hold ``committed`` alone; what was fed and still holds stays computed."""
        tokens = self.sequence.tokens
        same = self.committed
        while same < min(len(tokens), len(committed)) and tokens[same] == committed[same]:
            same += 1
        tokens[same:] = committed[same:]
        # The last token is fed again where it was computed: the step needs its logits.
        self.sequence.computed = min(self.sequence.computed, same, len(committed) - 1)
        self.committed = len(committed)


@dataclass(slots=True, eq=False)
class _Draft:
    """One ask while it is worked on."""

    state: _State
    k: int
    token_ids: list[int] = field(default_factory=list)
    confidence: bytearray = field(default_factory=bytearray)

    @property
    def finished(self) -> bool:
        """Nothing after the end of the text is of use."""
        ended = bool(self.token_ids) and self.token_ids[-1] in self.state.sequence.stop_ids
        return ended or len(self.token_ids) >= self.k


def load_model_kind(entry: DrafterSettings) -> ModelKind:
    """Loads the draft model named by ``entry.path``; blocks.

    Raises:
        ConfigError: it is absent, broken, or memory does not hold its cache.
    """
    # Imported here: the rest of this module runs on any runner, without torch.
    from paceline.engine.runner import TorchRunner

    runner = TorchRunner(
        entry.path,
        dtype=entry.dtype,
        device=entry.device,
        threads=entry.threads,
        max_sequences=min(entry.max_sessions, CACHED_CONTEXTS),
    )
    return ModelKind(runner, chunk_tokens=CHUNK_TOKENS[runner.device.split(":")[0]])


class ModelKind:
    """Drafts k tokens by k single-token steps, batched over sessions, after catching up on what is committed.

    A draft is rolled back by forgetting it: the keys and values of its accepted part stay valid, everything
    behind is overwritten. The cache is shared by all sessions; the least recently asked lose theirs first.

    Args:
        runner: computes the steps; its cache bounds the sessions that draft without recomputing.
        chunk_tokens: tokens of sessions far behind that are fed in one forward.
    """

    blocking = True

    def __init__(self, runner: Runner, *, chunk_tokens: int) -> None:
        self.vocab_size = runner.vocab_size
        self.max_context_tokens = runner.max_context_tokens
        self._runner = runner
        self._chunk_tokens = chunk_tokens
        self._free = list(range(runner.num_blocks))
        # Of the worker thread, least recently asked first.
        self._states: OrderedDict[DraftSession, _State] = OrderedDict()
        self._ids = 0
        # Between the event loop and the worker thread.
        self._lock = threading.Lock()
        self._closed: deque[DraftSession] = deque()
        self._behind: OrderedDict[DraftSession, None] = OrderedDict()

    @property
    def behind(self) -> bool:
        return bool(self._behind)

    def open(self, session: DraftSession) -> None:
        """The state is made by the worker thread, at first need."""

    def extend(self, session: DraftSession, token_ids: Items[int]) -> None:
        if (
            len(session.tokens) <= session.total_tokens
        ):  # prompts are prefilled ahead, commits at the next ask
            with self._lock:
                self._behind[session] = None

    def close(self, session: DraftSession) -> None:
        with self._lock:
            self._behind.pop(session, None)
            self._closed.append(session)

    def propose(self, asks: Items[Ask]) -> list[Proposal]:
        drafts = [_Draft(self._state(ask.session, ask.base_length), ask.k) for ask in asks]
        try:
            self._draft(drafts)
        finally:
            self._forget_closed()
        return [Proposal(draft.token_ids, bytes(draft.confidence)) for draft in drafts]

    def _draft(self, drafts: Items[_Draft]) -> None:
        for draft in drafts:
            draft.k = min(draft.k, self.max_context_tokens - len(draft.state.sequence.tokens))
        busy = {draft.state for draft in drafts}
        active = [draft for draft in drafts if draft.k > 0 and self._reserve(draft.state, draft.k, busy)]
        parts = self._first_parts([draft.state for draft in active])
        ready = [draft for draft in active if parts.get(draft.state) == draft.state.left]
        while parts:
            results = self._feed(parts)
            ready = [draft for draft in ready if self._take(draft, results[draft.state])]
            parts = {draft.state: 1 for draft in ready}

    def _first_parts(self, states: Items[_State]) -> dict[_State, int]:
        """Tokens of each state for the first step, which also catches up.

        Level sessions are fed whole and draft now; of those far behind one chunk is fed in all, so that they
        do not hold up the others. They draft in a later round.
        """
        budget = self._chunk_tokens
        parts = {}
        for state in states:
            if state.left <= ROUND_TOKENS:
                parts[state] = state.left
            elif budget:
                parts[state] = min(state.left, budget)
                budget -= parts[state]
        return parts

    def catch_up(self) -> None:
        """Feeds one chunk of one session's prompt, up to its last token: the first ask feeds that one."""
        with self._lock:
            session = next(iter(self._behind), None)
            length = len(session.tokens) if session is not None else 0
        if session is None:
            return
        try:
            state = self._state(session, length)
            done = not self._reserve(state, 0, {state})
            if not done:
                if state.left > 1:
                    self._feed({state: min(state.left - 1, self._chunk_tokens)})
                done = state.left <= 1
        finally:
            self._forget_closed()
        with self._lock:
            if done and len(session.tokens) == length:
                self._behind.pop(session, None)

    def shutdown(self) -> None:
        self._runner.close()

    def _state(self, session: DraftSession, length: int) -> _State:
        """The session's state, level with its first ``length`` tokens."""
        state = self._states.get(session)
        if state is None:
            params = replace(session.params, logprobs=None)
            ends = frozenset(params.stop_token_ids)
            if not params.ignore_eos:
                ends |= self._runner.eos_token_ids
            self._ids += 1
            state = _State(
                Sequence(self._ids, [], session.prompt_tokens, params, session.noise_key, stop_ids=ends)
            )
            self._states[session] = state
        self._states.move_to_end(session)
        state.replace_draft(session.tokens[:length])
        return state

    def _reserve(self, state: _State, k: int, busy: set[_State]) -> bool:
        """Blocks for the committed tokens and the drafts fed back; takes them from states not in ``busy``."""
        sequence = state.sequence
        positions = len(sequence.tokens) + max(0, k - 1)
        wanted = -(-positions // self._runner.block_tokens) - len(sequence.blocks)
        for other in self._states.values():
            if len(self._free) >= wanted:
                break
            if other not in busy:
                self._release(other)
        if len(self._free) < wanted:
            return False
        # Lowest first: neighbouring blocks are read without a copy.
        sequence.blocks.extend(heappop(self._free) for _ in range(wanted))
        return True

    def _feed(self, parts: Mapping[_State, int]) -> dict[_State, ItemResult]:
        """One forward over the next ``count`` tokens of each state; those then level choose a token."""
        items = []
        for state, count in parts.items():
            sequence = state.sequence
            start = sequence.computed
            token_ids = tuple(sequence.tokens[start : start + count])
            items.append(StepItem(sequence, start, token_ids, (), 1 if count == state.left else 0))
        results = self._runner.execute(StepPlan(tuple(items)))
        for state, count in parts.items():
            state.sequence.computed += count
        return dict(zip(parts, results, strict=True))

    def _take(self, draft: _Draft, result: ItemResult) -> bool:
        """Appends the chosen token; False once the draft is finished. Logits that are not finite end it."""
        if result.error is not None:
            return False
        draft.state.sequence.tokens.append(result.chosen[0])
        draft.token_ids.append(result.chosen[0])
        draft.confidence.append(confidence_byte(margin_chance(result.margins[0])))
        return not draft.finished

    def _forget_closed(self) -> None:
        with self._lock:
            closed = list(self._closed)
            self._closed.clear()
        for session in closed:
            state = self._states.pop(session, None)
            if state is not None:
                self._release(state)

    def _release(self, state: _State) -> None:
        for block in state.sequence.blocks:
            heappush(self._free, block)
        state.sequence.blocks.clear()
        state.sequence.computed = 0
