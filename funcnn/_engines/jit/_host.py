"""What kernels are compiled for: the CPU's vector registers, the codes of dtypes, the sources that they come from."""

from __future__ import annotations

import platform
import zlib
from functools import cache
from pathlib import Path

import llvmlite.binding as llvm
from numba.core import config

__all__ = [
    "CODES",
    "NAMES",
    "bits",
    "converts_halves",
    "lanes_of",
    "register_bytes",
    "registers",
    "stamp",
]

CODES = {
    name: code
    for code, name in enumerate(
        ("float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")
    )
}
NAMES = list(CODES)


def bits(code: int) -> int:
    """Bits of a number."""
    return 1 if NAMES[code] == "bool" else int(NAMES[code].removeprefix("u").removeprefix("int").removeprefix("float"))


@cache
def register_bytes() -> int:
    """Bytes of the widest vector register of the CPU that Numba compiles for."""
    features = set(_cpu_features())
    if "avx512f" in features:
        return 64
    return 32 if "avx2" in features else 16


def registers() -> int:
    """Vector registers of that CPU: 32 with AVX-512 and on ARM, else 16."""
    return 32 if register_bytes() == 64 or platform.machine().lower() in ("arm64", "aarch64") else 16


def converts_halves() -> bool:
    """Whether that CPU converts float16; elsewhere LLVM calls functions that may not be there."""
    return "f16c" in _cpu_features() or platform.machine().lower() in ("arm64", "aarch64")


def _cpu_features() -> list[str]:
    """Features that Numba compiles with: of the host, or of NUMBA_CPU_NAME and NUMBA_CPU_FEATURES."""
    if config.CPU_FEATURES is not None:
        return [f[1:] for f in config.CPU_FEATURES.split(",") if f.startswith("+")]
    if config.CPU_NAME not in (None, "host"):
        return _FEATURES_OF.get(config.CPU_NAME, [])
    return [name for name, present in llvm.get_host_cpu_features().items() if present]


# What a named CPU has, where it stands in for the host in tests.
_FEATURES_OF = {
    "haswell": ["avx2", "fma", "f16c"],
    "skylake": ["avx2", "fma", "f16c"],
    "skylake-avx512": ["avx512f", "avx2", "fma", "f16c"],
}


def lanes_of(dtype: str) -> int:
    """Numbers of a dtype in a register."""
    return register_bytes() * 8 // bits(CODES[dtype])


@cache
def stamp() -> int:
    """Checksum of this package's sources: a literal in every kernel, for Numba's cache does not see what a kernel calls."""
    here = Path(__file__).parent
    return zlib.crc32(b"".join(path.read_bytes() for path in sorted(here.glob("*.py"))))
