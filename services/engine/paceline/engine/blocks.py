"""Blocks of the paged KV cache: who owns them, and which hold a known prefix."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

ROOT_HASH = b""
"""Parent of a sequence's first block."""


class IntegrityError(Exception):
    """The block accounting contradicts itself; the message says where."""


def chain_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Name of a full block and the prefix before it: BLAKE2b of its parent's hash and its token ids."""
    return hashlib.blake2b(parent + array("I", token_ids).tobytes(), digest_size=16).digest()


class BlockManager:
    """Reference counts, and the prefix cache: full blocks by chained hash.

    A block that nobody owns keeps its content until it is needed; the least recently freed goes first,
    blocks without known content before all others.
    """

    def __init__(self, num_blocks: int, block_tokens: int, *, prefix_cache: bool) -> None:
        self.total = num_blocks
        self.block_tokens = block_tokens
        self._prefix_cache = prefix_cache
        self._owners = [0] * num_blocks
        self._hash: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def free(self) -> int:
        """Blocks that can be taken, cached ones included."""
        return len(self._free)

    @property
    def used(self) -> int:
        return self.total - len(self._free)

    @property
    def cached(self) -> int:
        """Free blocks whose content is still known."""
        return len(self._by_hash) - sum(1 for block in self._by_hash.values() if self._owners[block])

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def take(self) -> int:
        """A block of one's own. Raises KeyError when none is free."""
        block, _ = self._free.popitem(last=False)
        self._forget(block)
        self._owners[block] = 1
        return block

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The cached blocks of the longest known prefix, without taking them."""
        found = []
        for digest in hashes:
            block = self._by_hash.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def unowned(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` would leave the free ones if shared."""
        return sum(1 for block in blocks if not self._owners[block])

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner for each of these cached blocks."""
        for block in blocks:
            self._free.pop(block, None)
            self._owners[block] += 1

    def register(self, block: int, digest: bytes) -> None:
        """The block is full and computed. The first block of a content stands for it."""
        if self._prefix_cache and digest not in self._by_hash and self._hash[block] is None:
            self._hash[block] = digest
            self._by_hash[digest] = block

    def release(self, blocks: Sequence[int]) -> None:
        """One owner less. The tail of a prefix is forgotten before its head, hence from the end."""
        for block in reversed(blocks):
            self._owners[block] -= 1
            if self._owners[block] == 0:
                self._free[block] = None
                if self._hash[block] is None:
                    self._free.move_to_end(block, last=False)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Compares the accounting with all block tables in use.

        Raises:
            IntegrityError: a leak, a double owner, or a hash that names a wrong block.
        """
        owners: Counter[int] = Counter()
        for table in tables:
            if len(set(table)) != len(table):
                raise IntegrityError(f"a block is twice in one table: {table}")
            owners.update(table)
        for block in range(self.total):
            if self._owners[block] != owners[block]:
                raise IntegrityError(f"block {block}: {self._owners[block]} owners, {owners[block]} tables")
            if (block in self._free) != (owners[block] == 0):
                raise IntegrityError(f"block {block}: {owners[block]} owners, free {block in self._free}")
            if owners[block] > 1 and self._hash[block] is None:
                raise IntegrityError(f"block {block}: shared without known content")
            digest = self._hash[block]
            if digest is not None and self._by_hash.get(digest) != block:
                raise IntegrityError(f"block {block}: its hash names another block")
        if len(self._by_hash) != sum(1 for digest in self._hash if digest is not None):
            raise IntegrityError("a hash names a block that lost it")

    def _forget(self, block: int) -> None:
        digest = self._hash[block]
        if digest is not None:
            del self._by_hash[digest]
            self._hash[block] = None
