"""Which tokens of which sequences the next step feeds, and what becomes of them afterwards."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from paceline.core.errors import ErrorKind, PacelineError
from paceline.engine.blocks import ROOT_HASH, BlockManager, IntegrityError, chain_hash
from paceline.engine.step import Runner, Sequence, StepItem, StepPlan

PREFILL_SHARE = 4
"""Drafts leave one part in this many of the step's tokens to prompts that wait for them."""


@dataclass(slots=True, eq=False)
class _Entry:
    sequence: Sequence
    age: int
    """Order of arrival; the highest is the youngest."""
    hashes: list[bytes] = field(default_factory=list)
    """Of the sequence's leading full blocks, as far as computed once."""
    admitted: bool = False

    @property
    def missing(self) -> int:
        """Committed tokens whose keys and values are not in the cache; 1 while decoding."""
        return len(self.sequence.tokens) - self.sequence.computed


class Scheduler:
    """Continuous batching over the runner's blocks. Plain computation; call it from one thread.

    Each step feeds at most ``max_step_tokens``: first the one token of every decoding sequence, then drafts,
    then prompt chunks, then newcomers, older sequences first. Out of blocks, the youngest sequence gives its
    own back and is computed again later.

    Call `plan`, execute it, then `commit` or `remove` each item before the next `plan`. While a plan is being
    executed the block tables must not change: no `remove` then.
    """

    def __init__(
        self, runner: Runner, *, max_sequences: int, max_step_tokens: int, prefix_cache: bool
    ) -> None:
        self.blocks = BlockManager(runner.num_blocks, runner.block_tokens, prefix_cache=prefix_cache)
        self.max_context_tokens = min(runner.max_context_tokens, runner.num_blocks * runner.block_tokens)
        """Longest sequence, prompt and output: the model's limit or what the cache holds."""
        self.preemptions = 0
        self._max_sequences = max_sequences
        self._max_step_tokens = max_step_tokens
        self._prefix_cache = prefix_cache
        self._running: dict[int, _Entry] = {}
        self._waiting: deque[_Entry] = deque()
        self._ages = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def decoding(self, sequence: Sequence) -> bool:
        """Whether the next step can verify a draft of this sequence."""
        entry = self._running.get(sequence.id)
        return entry is not None and entry.missing == 1

    def room(self, sequence: Sequence) -> int:
        """Tokens that may still be committed, by ``max_tokens`` and the context."""
        length = len(sequence.tokens)
        left = self.max_context_tokens - length
        if sequence.params.max_tokens is not None:
            left = min(left, sequence.prompt_tokens + sequence.params.max_tokens - length)
        return left

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence.

        Raises:
            PacelineError: CONTEXT_LENGTH_EXCEEDED, there is no room for even one more token.
        """
        if len(sequence.tokens) >= self.max_context_tokens:
            raise PacelineError(
                ErrorKind.CONTEXT_LENGTH_EXCEEDED,
                f"prompt: {len(sequence.tokens)} tokens leave no room in a context of "
                f"{self.max_context_tokens} tokens",
                field="prompt",
            )
        self._ages += 1
        self._waiting.append(_Entry(sequence, self._ages))

    def remove(self, sequence: Sequence) -> None:
        """Forgets a sequence in whatever state; its full blocks stay cached. Unknown ones are fine."""
        entry = self._running.pop(sequence.id, None)
        if entry is not None:
            self._release(entry)
        else:
            self._waiting = deque(e for e in self._waiting if e.sequence is not sequence)

    def plan(self, drafts: Mapping[int, Tokens[int]]) -> StepPlan:
        """The next step. ``drafts`` by sequence id, for sequences that are `decoding`.

        A draft comes back shortened, possibly to nothing, where the step's tokens, the blocks or `room` do
        not allow all of it: compare with the items.
        """
        budget = self._max_step_tokens
        chosen: dict[int, tuple[_Entry, int, Tokens[int]]] = {}
        by_age = sorted(self._running.values(), key=lambda entry: entry.age)
        for entry in (e for e in by_age if e.missing == 1):
            if budget and entry.sequence.id in self._running and self._reserve(entry, 1, chosen):
                chosen[entry.sequence.id] = (entry, 1, ())
                budget -= 1
        prefilling = [e for e in by_age if e.missing > 1 and e.sequence.id in self._running]
        newcomers = bool(self._waiting) and len(self._running) < self._max_sequences
        reserved = self._max_step_tokens // PREFILL_SHARE if prefilling or newcomers else 0
        spare = max(0, budget - reserved)
        for entry, _, _ in list(chosen.values()):
            draft = drafts.get(entry.sequence.id, ())
            count = min(len(draft), spare, self.room(entry.sequence) - 1)
            count = self._grow(entry, 1 + max(0, count)) - 1
            chosen[entry.sequence.id] = (entry, 1, draft[:count])
            budget -= count
            spare -= count
        for entry in prefilling:
            if budget and entry.sequence.id in self._running and self._reserve(entry, 1, chosen):
                count = self._grow(entry, min(entry.missing, budget))
                chosen[entry.sequence.id] = (entry, count, ())
                budget -= count
        while budget and self._waiting and len(self._running) < self._max_sequences:
            newcomer = self._admit()
            if newcomer is None:
                break
            count = self._grow(newcomer, min(newcomer.missing, budget))
            chosen[newcomer.sequence.id] = (newcomer, count, ())
            budget -= count
        return StepPlan(tuple(_item(*part) for part in chosen.values()))

    def commit(self, item: StepItem, new_tokens: Tokens[int]) -> None:
        """Takes over an executed item: ``new_tokens`` are the accepted part of its draft and the target's
        own token (or less, where the choice ended); none for a prompt chunk."""
        sequence = item.sequence
        entry = self._running[sequence.id]
        sequence.tokens.extend(new_tokens)
        fed = item.start + len(item.token_ids) - len(item.draft)
        sequence.computed = fed + max(0, len(new_tokens) - 1)
        keep = self.blocks.blocks_for(max(len(sequence.tokens), sequence.computed))
        self.blocks.release(sequence.blocks[keep:])
        del sequence.blocks[keep:]
        if self._prefix_cache:
            self._extend_hashes(entry, sequence.computed)
            for index in range(item.start // self.blocks.block_tokens, len(entry.hashes)):
                if (index + 1) * self.blocks.block_tokens <= sequence.computed:
                    self.blocks.register(sequence.blocks[index], entry.hashes[index])

    def check_integrity(self) -> None:
        """Raises IntegrityError if the accounting of blocks contradicts itself."""
        running = [entry.sequence for entry in self._running.values()]
        self.blocks.check(sequence.blocks for sequence in running)
        for sequence in running:
            covered = len(sequence.blocks) * self.blocks.block_tokens
            if not sequence.computed <= min(covered, len(sequence.tokens) - 1):
                raise IntegrityError(
                    f"sequence {sequence.id}: computed {sequence.computed} of {len(sequence.tokens)} tokens, "
                    f"blocks for {covered}"
                )
        for entry in self._waiting:
            if entry.sequence.blocks or entry.sequence.computed:
                raise IntegrityError(f"sequence {entry.sequence.id}: waits with blocks")

    def _admit(self) -> _Entry | None:
        """The first that waits, if blocks for all its tokens are free beside its cached prefix."""
        entry = self._waiting[0]
        sequence = entry.sequence
        cached: list[int] = []
        if self._prefix_cache:
            # The last token is always computed: its logits are needed.
            self._extend_hashes(entry, len(sequence.tokens) - 1)
            cached = self.blocks.match(entry.hashes)
        needed = self.blocks.blocks_for(len(sequence.tokens)) - len(cached)
        if needed + self.blocks.unowned(cached) > self.blocks.free:
            return None
        self.blocks.share(cached)
        sequence.blocks = cached
        sequence.computed = len(cached) * self.blocks.block_tokens
        if not entry.admitted:
            entry.admitted = True
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_tokens)
        self._waiting.popleft()
        self._running[sequence.id] = entry
        return entry

    def _reserve(self, entry: _Entry, tokens: int, chosen: Mapping[int, object]) -> bool:
        """Blocks for ``tokens`` more, taken from younger sequences outside this step if need be."""
        while self._grow(entry, tokens) < tokens:
            younger = [e for e in self._running.values() if e.age > entry.age and e.sequence.id not in chosen]
            if not younger:
                return False
            self._preempt(max(younger, key=lambda e: e.age))
        return True

    def _grow(self, entry: _Entry, tokens: int) -> int:
        """Extends the block table towards ``tokens`` beyond the computed; returns how many it covers."""
        sequence = entry.sequence
        needed = self.blocks.blocks_for(sequence.computed + tokens) - len(sequence.blocks)
        for _ in range(min(needed, self.blocks.free)):
            sequence.blocks.append(self.blocks.take())
        covered = len(sequence.blocks) * self.blocks.block_tokens - sequence.computed
        return min(tokens, covered)

    def _preempt(self, entry: _Entry) -> None:
        self.preemptions += 1
        del self._running[entry.sequence.id]
        self._release(entry)
        position = next((i for i, e in enumerate(self._waiting) if e.age > entry.age), len(self._waiting))
        self._waiting.insert(position, entry)

    def _release(self, entry: _Entry) -> None:
        self.blocks.release(entry.sequence.blocks)
        entry.sequence.blocks = []
        entry.sequence.computed = 0

    def _extend_hashes(self, entry: _Entry, tokens: int) -> None:
        size = self.blocks.block_tokens
        for index in range(len(entry.hashes), tokens // size):
            parent = entry.hashes[-1] if entry.hashes else ROOT_HASH
            block = entry.sequence.tokens[index * size : (index + 1) * size]
            entry.hashes.append(chain_hash(parent, block))


def _item(entry: _Entry, count: int, draft: Iterable[int]) -> StepItem:
    sequence = entry.sequence
    draft = tuple(draft)
    start = sequence.computed
    committed = tuple(sequence.tokens[start : start + count])
    samples = len(draft) + 1 if count == entry.missing else 0
    return StepItem(sequence, start, committed + draft, draft, samples)
