"""Noise against an independent scalar implementation and against the distributions it must have."""

import hashlib
import math
import struct

import numpy as np
from scipy import stats

from paceline.core import noise
from paceline.core.nullmodel import null_token

M32, M64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF


def scalar_bits(key: int, position: int, token_id: int) -> int:
    """docs/noise.md, written with Python integers only."""
    z = (key + (position + 1) * 0x9E3779B97F4A7C15) & M64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
    z ^= z >> 31
    w0, w1 = z & M32, z >> 32

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D & M32
        x ^= x >> 15
        x = x * 0x846CA68B & M32
        return x ^ (x >> 16)

    return mix(mix((token_id * 0x9E3779B1 + w0) & M32) ^ w1)


def test_key_is_blake2b_of_seed_choice_domain_and_prompt() -> None:
    digest = hashlib.blake2b(digest_size=8, person=b"paceline.noise")
    digest.update(struct.pack("<qII", -7, 2, 1) + struct.pack("<3I", 5, 0, 49151))
    expected = int.from_bytes(digest.digest(), "little")
    assert noise.noise_key(-7, 2, [5, 0, 49151], noise.Domain.TARGET) == expected


def test_bits_equal_scalar_form() -> None:
    ids = np.asarray([0, 1, 2, 1000, 49151, 151_935, 2**31 - 1], dtype=np.int64)
    for key in (0, 1, 0xDEADBEEFCAFEBABE, M64):
        for position in (0, 1, 77, 100_000):
            expected = [scalar_bits(key, position, int(i)) for i in ids]
            assert noise.noise_bits(key, position, ids).tolist() == expected


def test_bits_are_uniform_and_unrelated_between_positions_seeds_choices_and_prompts() -> None:
    ids = np.arange(49_152)

    def bits(
        seed: int = 1, choice: int = 0, prompt: tuple[int, ...] = (1, 2), position: int = 0
    ) -> np.ndarray:
        key = noise.noise_key(seed, choice, prompt, noise.Domain.TARGET)
        return noise.noise_bits(key, position, ids)

    base = bits()
    assert stats.kstest(base / 2.0**32, "uniform").pvalue > 1e-3
    for other in (bits(seed=2), bits(choice=1), bits(prompt=(1, 3)), bits(position=1)):
        # The correlation of independent uniforms over n draws has standard deviation 1 / sqrt(n).
        correlation = np.corrcoef(base / 2.0**32, other / 2.0**32)[0, 1]
        assert abs(correlation) < 4.5 / math.sqrt(len(ids))
        assert not np.array_equal(base, other)


def test_every_bit_is_fair_over_consecutive_ids_and_positions() -> None:
    key = noise.noise_key(3, 0, [9], noise.Domain.TARGET)
    draws = np.concatenate([noise.noise_bits(key, p, np.arange(4096)) for p in range(16)])
    for bit in range(32):
        ones = int(((draws >> np.uint32(bit)) & 1).sum())
        # Binomial(65536, 1/2): standard deviation 128.
        assert abs(ones - len(draws) / 2) < 5 * 128


def test_exponentials_have_mean_and_variance_one_and_stay_positive_and_finite() -> None:
    edge = noise.exponentials(np.asarray([0, M32], dtype=np.uint32))
    assert edge[0] == -math.log1p(-(0.5 * 2.0**-32))
    assert math.isclose(edge[1], -math.log(0.5 * 2.0**-32), rel_tol=1e-9)
    key = noise.noise_key(1, 0, [1], noise.Domain.TARGET)
    draws = noise.exponentials(noise.noise_bits(key, 0, np.arange(400_000)))
    assert abs(draws.mean() - 1) < 0.008
    assert abs(draws.var() - 1) < 0.02


def test_race_samples_the_distribution() -> None:
    """argmax(log p - log E) over many positions follows p (chi-square)."""
    p = np.asarray([0.5, 0.25, 0.15, 0.07, 0.03])
    key = noise.noise_key(11, 0, [4, 2], noise.Domain.TARGET)
    counts = np.zeros(len(p))
    for position in range(20_000):
        e = noise.exponentials(noise.noise_bits(key, position, np.arange(len(p))))
        counts[np.argmax(np.log(p) - np.log(e))] += 1
    assert stats.chisquare(counts, p * counts.sum()).pvalue > 1e-3


def test_null_token_follows_its_documented_rule() -> None:
    assert null_token(77, 3, 1234, 49_152) == 1000 + scalar_bits(77, 3, 1234) % 48_152
    assert null_token(77, 3, 5, 64) == 32 + scalar_bits(77, 3, 5) % 32
