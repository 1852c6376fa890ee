"""Calls on arrays that lie flush against memory that no one may touch: `python guards.py LAYOUT`, on Linux.

What a call must not write can be read only. A kernel that reads or writes elsewhere ends the process with SIGSEGV.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys
from dataclasses import replace

import numpy as np
from cases import Case, avg_pool, conv, conv_transpose, inputs, max_pool
from conftest import Backend
from numpy.testing import assert_array_equal
from running import start, steps, to_layout

import funcnn as fn

# Of the memory on either side of an array: what is read a row too far must not lie beyond it.
GUARD = 1 << 20


def guarded(a: np.ndarray, end: bool) -> np.ndarray:
    """A read-only copy that ends (or begins) at memory that no one may touch."""
    size = -(-max(a.nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + 2 * GUARD)
    copy: np.ndarray = np.frombuffer(memory, a.dtype, a.size, GUARD + (size - a.nbytes if end else 0)).reshape(a.shape)
    copy[...] = a
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    for offset, length, access in ((0, GUARD, 0), (GUARD, size, mmap.PROT_READ), (GUARD + size, GUARD, 0)):
        assert protect(ctypes.c_void_p(base + offset), ctypes.c_size_t(length), access) == 0
    copy.flags.writeable = False
    return copy


def spaced(a: np.ndarray, end: bool) -> np.ndarray:
    """As `guarded`, every second number of a row."""
    return guarded(np.repeat(a, 2, -1)[..., :-1], end)[..., ::2]


CASES = [
    conv("tiles", (2, 1, 5, 7), (17, 1, 3, 3), padding=1),
    conv("columns", (2, 3, 9, 31), (33, 3, 5, 3), padding=2, stride=2),
    conv("few outputs", (1, 17, 4, 15), (3, 17, 3, 3), padding=1),
    conv("stride of rows", (2, 33, 6, 17), (64, 33, 3, 2), padding=1, stride=(1, 2)),
    conv("whole registers", (1, 64, 7, 7), (64, 64, 3, 3), padding=1),
    conv("wide", (2, 129, 3, 5), (257, 129, 3, 3), padding=1),
    conv("squares", (2, 64, 24, 27), (65, 64, 3, 3), padding=1, options=fn.Options(numerics="fast")),
    conv("in place", (1, 64, 9, 31), (17, 64, 3, 3), padding=(0, 1), stride=2),
    conv("one column", (2, 64, 5, 1), (33, 64, 3, 1), padding=(1, 0)),
    conv("one output", (2, 17, 5, 15), (1, 17, 2, 2)),
    conv("1x1", (2, 64, 7, 17), (17, 64, 1, 1)),
    conv("1x1, one column", (2, 33, 3, 1), (64, 33, 1, 1)),
    conv("1x1 with stride", (2, 17, 7, 31), (64, 17, 1, 1), stride=2),
    conv("groups", (2, 34, 5, 15), (6, 17, 3, 3), padding=1, groups=2),
    conv("groups with stride", (1, 66, 6, 7), (66, 33, 2, 3), padding=(0, 1), stride=2, groups=2),
    conv("rank 1", (2, 3, 31), (17, 3, 5), padding=4, dilation=2),
    conv("rank 3", (1, 17, 3, 4, 7), (33, 17, 2, 3, 3), padding=1, stride=(1, 2, 1)),
    conv_transpose("columns", (2, 17, 4, 7), (17, 3, 3, 3), stride=2, padding=1),
    conv_transpose("phases", (2, 33, 4, 15), (33, 17, 2, 3), stride=(3, 2)),
    conv("multiplier", (2, 17, 6, 15), (34, 1, 3, 3), padding=1, groups=17),
    conv("depthwise rank 3", (1, 33, 4, 5, 17), (33, 1, 2, 3, 3), stride=(1, 1, 2), groups=33),
    *(
        conv(f"depthwise {c} {width} {s}", (2, c, 6, width), (c, 1, 3, 3), padding=1, stride=s, groups=c)
        for c, width, s in itertools.product((3, 17, 33, 64), (1, 7, 15, 17, 31), (1, 2))
    ),
    *(
        pool(f"{c} {width} {s}", (2, c, 3, width), (2, 5), stride=(1, s), padding=((1, 0), (2, 2)))
        for pool in (max_pool, avg_pool)
        for c, width, s in itertools.product((1, 5, 17, 64), (1, 2, 5, 13, 16, 17, 40, 66), (1, 2))
    ),
]


def check(case: Case, layout: str) -> None:
    """Every result is that of engine xp."""
    arrays = {name: to_layout(name, a, layout) for name, a in inputs(case, dtype="float32").items()}
    wanted, _ = steps(case.op, arrays, start(case, Backend.NUMPY_XP, arrays, layout))
    for place, end in itertools.product((guarded, spaced), (True, False)):
        mine = {name: (place if name in ("x", "dy") else guarded)(a, end) for name, a in arrays.items()}
        got, state = steps(case.op, mine, start(case, Backend.NUMPY_JIT, mine, layout))
        if case.op == "max_pool":
            state = replace(state, argmax=guarded(state.argmax, end))
            got["dx"] = fn.max_pool_backward(mine["dy"], state)
        for name, array in wanted.items():
            assert_array_equal(got[name], array, err_msg=name)


if __name__ == "__main__":
    for case in CASES:
        print(case.op, case, flush=True)  # the last one, where the process dies
        check(case, sys.argv[1])
