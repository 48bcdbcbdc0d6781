"""The torch noise against the published vectors, a plain integer form, and core.noise."""

from __future__ import annotations

import hashlib
import math
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.core import noise as core
from paceline.engine.noise import hashed_ids, log_exponentials, noise_bits

DOC = Path(__file__).resolve().parents[3] / "docs" / "noise.md"
MASK32 = 0xFFFFFFFF
MASK64 = 0xFFFFFFFFFFFFFFFF


def rows(columns: int) -> list[list[str]]:
    """Data rows of the tables in docs/noise.md that have so many columns."""
    lines = [line for line in DOC.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    cells = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if len(row) == columns and row[-1][0].isdigit()]


def mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK32
    x ^= x >> 15
    x = x * 0x846CA68B & MASK32
    return x ^ (x >> 16)


def words(key: int, position: int) -> tuple[int, int]:
    z = (key + (position + 1) * 0x9E3779B97F4A7C15) & MASK64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK64
    z ^= z >> 31
    return z & MASK32, z >> 32


@pytest.mark.parametrize("row", rows(5))
def test_key_vectors(row: list[str]) -> None:
    seed, choice, domain, key = int(row[0]), int(row[1]), int(row[2]), int(row[4], 16)
    prompt = [int(token_id) for token_id in row[3].split()]
    message = struct.pack("<qII", seed, choice, domain) + b"".join(struct.pack("<I", t) for t in prompt)
    digest = hashlib.blake2b(message, digest_size=8, person=b"paceline.noise").digest()
    assert int.from_bytes(digest, "little") == key
    assert core.noise_key(seed, choice, prompt, core.Domain(domain)) == key


@pytest.mark.parametrize("row", rows(7))
def test_bit_vectors(row: list[str]) -> None:
    key, position, token_id = int(row[0], 16), int(row[1]), int(row[2])
    w0, w1, h = (int(cell, 16) for cell in row[3:6])
    assert words(key, position) == (w0, w1)
    assert mix(mix((token_id * 0x9E3779B1 + w0) & MASK32) ^ w1) == h
    assert core.noise_bits(key, position, np.asarray([token_id]))[0] == h
    bits = noise_bits(key, position, hashed_ids(torch.tensor([token_id])))
    assert bits.item() & MASK32 == h
    expected = -math.log1p(-(h + 0.5) * 2.0**-32)
    assert float(row[6]) == pytest.approx(expected, abs=1e-11)
    assert log_exponentials(bits).item() == pytest.approx(math.log(expected), abs=1e-12)


def test_bits_equal_core_for_a_whole_vocabulary() -> None:
    generator = np.random.default_rng(8)
    ids = np.arange(151_936)
    hashed = hashed_ids(torch.from_numpy(ids))
    for _ in range(10):
        key = int(generator.integers(0, 2**64, dtype=np.uint64))
        position = int(generator.integers(0, 2**20))
        expected = core.noise_bits(key, position, ids)
        bits = noise_bits(key, position, hashed)
        assert np.array_equal(bits.numpy().view(np.uint32), expected)
        exponentials = log_exponentials(bits).exp().numpy()
        np.testing.assert_allclose(exponentials, core.exponentials(expected), rtol=1e-12)


def test_extreme_bits_stay_finite() -> None:
    extreme = log_exponentials(torch.tensor([0, -1, 2**31 - 1, -(2**31)], dtype=torch.int32))
    assert extreme.isfinite().all()
    assert extreme[1].exp().item() == pytest.approx(33 * math.log(2), rel=1e-9)
