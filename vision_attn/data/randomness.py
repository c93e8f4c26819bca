"""Randomness as a function: (seed, epoch, sample, stream) -> a number, with no state to carry along.

A generator that is advanced draw by draw makes a result depend on who drew before: on the number of
workers, on the batch size, on what was skipped by a resume. Here every number is the hash of what it is
*for*, so it can be computed anywhere, in any order, and again.

The hash is the finaliser of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
generators"), applied once to the sample and once to the stream. It runs on int64 tensors on any device,
with the wrap-around of two's complement standing in for unsigned arithmetic, and is exact everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_M1 = 0xBF58476D1CE4E5B9
_M2 = 0x94D049BB133111EB


class Stream(IntEnum):
    """What a random number is used for. Numbers of different streams are independent.

    The values are part of what a seed means: changing one changes every run. New uses get new numbers.
    """

    ORDER = 0
    SUBSET = 1
    SPLIT = 2
    FLIP = 10
    CROP_Y = 11
    CROP_X = 12
    ERASE = 13
    ERASE_AREA = 14
    ERASE_ASPECT = 15
    ERASE_Y = 16
    ERASE_X = 17
    ERASE_NOISE = 18
    MIX = 20
    MIX_KIND = 21
    MIX_PARTNER = 22
    MIX_LAMBDA = 23
    MIX_Y = 24
    MIX_X = 25
    BRIGHTNESS = 30
    CONTRAST = 31
    SATURATION = 32
    RESIZED_AREA = 40
    RESIZED_ASPECT = 41
    RESIZED_Y = 42
    RESIZED_X = 43
    SEQUENCE = 50  # which image stands at a place of a sequence
    SEQUENCE_LENGTH = 51
    CANVAS = 60  # to 64: places, and what lies there
    DETECTION = 70  # to 89: geometry of images with boxes, order of batches by shape
    RANDAUGMENT = 100  # op k uses RANDAUGMENT + 2k (which one) and RANDAUGMENT + 2k + 1 (its sign)
    PARTNER = 1000  # the partner of a mix is augmented with every stream moved up by this much


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


_S_GOLDEN, _S_M1, _S_M2 = _signed(_GOLDEN), _signed(_M1), _signed(_M2)


def _mix_int(z: int) -> int:
    """SplitMix64's finaliser on one Python integer (unsigned 64 bits)."""
    z = (z + _GOLDEN) & _MASK64
    z = ((z ^ (z >> 30)) * _M1) & _MASK64
    z = ((z ^ (z >> 27)) * _M2) & _MASK64
    return z ^ (z >> 31)


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's finaliser, elementwise on int64."""
    z = z + _S_GOLDEN  # the one copy; everything after it is in place
    # `>>` on int64 keeps the sign, so the bits it smears in are masked away
    z.bitwise_xor_((z >> 30).bitwise_and_((1 << 34) - 1)).mul_(_S_M1)
    z.bitwise_xor_((z >> 27).bitwise_and_((1 << 37) - 1)).mul_(_S_M2)
    return z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))


def key(*numbers: int) -> int:
    """One 64-bit number out of several; their order counts."""
    state = 0
    for number in numbers:
        state = _mix_int(state ^ _mix_int(number & _MASK64))
    return state


def hashes(seed: int, epoch: int, index: Tensor, streams: Sequence[int]) -> Tensor:
    """64 random bits for every sample and stream.

    Args:
        seed: of the run.
        epoch: 0, 1, ...
        index: (B,) int64, identities of the samples; any shape will do.
        streams: K stream numbers (:class:`Stream`).

    Returns:
        (B, K) int64 on the device of ``index``.
    """
    base = _mix(index.to(torch.int64) ^ _signed(key(seed, epoch)))  # (B,)
    lanes = [_signed(_mix_int(int(stream))) for stream in streams]
    return _mix(base[..., None] ^ torch.tensor(lanes, dtype=torch.int64, device=index.device))


def uniforms(seed: int, epoch: int, index: Tensor, streams: Sequence[int]) -> Tensor:
    """Uniform numbers in [0, 1), one for every sample and stream.

    24 bits each, so every value is exact in float32 and 1 is never reached.

    Args:
        seed: of the run.
        epoch: 0, 1, ...
        index: (B,) int64, identities of the samples.
        streams: K stream numbers.

    Returns:
        (B, K) float32 on the device of ``index``.
    """
    bits = (hashes(seed, epoch, index, streams) >> 40).bitwise_and_((1 << 24) - 1)
    return bits.to(torch.float32).mul_(2.0**-24)


def permutation(n: int, seed: int, epoch: int, stream: int = Stream.ORDER) -> Tensor:
    """A permutation of 0..n-1 that depends on nothing but its arguments.

    Args:
        n: how many.
        seed: of the run.
        epoch: 0, 1, ...
        stream: tells apart permutations for different purposes.

    Returns:
        (n,) int64 on the CPU.
    """
    return hashes(seed, epoch, torch.arange(n), [stream])[:, 0].argsort(stable=True)
