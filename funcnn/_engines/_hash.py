"""The counter-based hash of dropout, as constants and plain-integer helpers that every engine shares.

`lowbias32` of Chris Wellons' hash prospector (public domain), twice keyed; everything modulo 2**32:

    mix(v): v ^= v >> 16; v *= M1; v ^= v >> 15; v *= M2; v ^= v >> 16
    key     = mix(mix(mix(low word of seed + GOLDEN) ^ high word of seed) + step)
    k1(n)   = mix(key + n);  k2(n) = mix(k1(n) ^ SALT)                                  for row n of the batch
    v       = i + k1; v ^= v >> 16; v *= M1; v ^= k2; v ^= v >> 15; v *= M2; v ^= v >> 16   for element i of the row
    keep    = (v >> 1) >= round(rate * 2**31)

Two keys, because with one the rows of a batch would be windows into a single sequence of 2**32 values: in a batch of 128
rows of 50,000 elements two such windows overlap with a chance of about 0.2; both keys agree with one of 2**-32 of that.
"""

from __future__ import annotations

M1 = 0x7FEB352D
M2 = 0x846CA68B
GOLDEN = 0x9E3779B9
SALT = 0x85EBCA6B
_WORD = 0xFFFFFFFF


def mix(v: int) -> int:
    """lowbias32 of a Python int."""
    v = (v ^ v >> 16) * M1 & _WORD
    v = (v ^ v >> 15) * M2 & _WORD
    return v ^ v >> 16


def base_key(seed: int) -> int:
    """What is added to step before the last mix of the key: it depends on the seed alone."""
    return mix(mix((seed + GOLDEN) & _WORD) ^ seed >> 32)


def threshold(rate: float) -> int:
    """Least 31-bit hash that is kept."""
    return round(rate * 2**31)
