"""dropout: the mask bit for bit on every library, its statistics, selection, steps."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import reference as ref
from conftest import Backend, eps, need
from numpy.testing import assert_array_equal
from running import COMPLEX, FLOATS, LAYOUTS, assert_array, spare_jax, to_layout

import funcnn as fn

SEEDS = [0, 1, 2**32 - 1, 2**32, 0x0123456789ABCDEF, 2**64 - 1]
SHAPES = [(5,), (3, 7), (2, 3, 4), (2, 3, 2, 5), (2, 1, 2, 3, 2)]


def drop(backend: Backend, x: Any, rate: float, seed: int, step: int = 0, **options: Any) -> tuple[Any, Any]:
    """y and the state after one training call at a step."""
    state = fn.dropout_init(x, rate, seed=seed, engine=backend.engine, **options)
    state = dataclasses.replace(state, step=backend.asarray(np.asarray(step, "int32")))
    return fn.dropout(x, state)


def mask_of(backend: Backend, shape: tuple[int, ...], rate: float, seed: int, step: int = 0) -> Any:
    return drop(backend, backend.asarray(np.ones(shape, "float32")), rate, seed, step)[1].mask


# ---- the mask --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_mask_is_the_oracles_bit_for_bit(backend: Backend, shape: tuple[int, ...], layout: str) -> None:
    """A function of (seed, step, row, index in the channels-first row): not of layout, library or engine."""
    x = backend.asarray(to_layout("x", np.ones(shape), layout), "float32")
    spare_jax(backend, len(shape) not in (1, 4))
    chosen = list(zip(SEEDS, (0.5, 0.1, 0.9, 0.3, 0.999, 0.5), (0, 1, 7, 2**31 - 1, -1, -(2**31)), strict=True))
    for seed, rate, step in chosen[:2] if backend is Backend.JAX else chosen:
        _, state = drop(backend, x, rate, seed, step, layout=layout)
        wanted = ref.dropout_mask(shape, rate, seed, step)
        assert_array(backend, state.mask, to_layout("x", wanted, layout), "bool", f"seed {seed}")


def test_the_rate_is_rounded_to_31_bits_and_a_hash_equal_to_it_is_kept(backend: Backend) -> None:
    hashed = 0  # of the only element: the highest rate that keeps it, by bisection
    for bit in reversed(range(31)):
        if ref.dropout_mask((1,), (hashed + 2**bit) / 2**31, 8, 0).all():
            hashed += 2**bit
    for more, kept in ((0, True), (0.4, True), (0.6, False), (1, False)):
        assert_array(backend, mask_of(backend, (1,), (hashed + more) / 2**31, 8), [kept], "bool")


def test_mask_of_a_long_row(numpy_backend: Backend) -> None:
    """Longer than any block that an engine hashes at a time."""
    shape = (2, 66_000)
    assert_array_equal(mask_of(numpy_backend, shape, 0.4, 3, 5), ref.dropout_mask(shape, 0.4, 3, 5))


def test_mask_under_jit() -> None:
    need(Backend.JAX)
    import jax

    x = Backend.JAX.asarray(np.ones((3, 2, 5), "float32"))
    step = jax.jit(fn.dropout)
    state = fn.dropout_init(x, 0.3, seed=9)
    for count in range(3):
        _, state = step(x, state)
        assert_array(Backend.JAX, state.mask, ref.dropout_mask(x.shape, 0.3, 9, count), "bool")


def test_first_rows_do_not_depend_on_the_batch(backend: Backend) -> None:
    whole = backend.numpy(mask_of(backend, (7, 3, 5), 0.5, 4))
    for n in (4,) if backend is Backend.JAX else (0, 1, 4):
        assert_array(backend, mask_of(backend, (n, 3, 5), 0.5, 4), whole[:n], "bool")


def test_same_state_same_mask_and_the_returned_state_the_next_one(backend: Backend) -> None:
    x = backend.asarray(np.ones((2, 40)), "float32")
    state = fn.dropout_init(x, 0.5, seed=8, engine=backend.engine)
    first, after = fn.dropout(x, state)
    again, _ = fn.dropout(x, state)
    assert_array(backend, again, backend.numpy(first), "float32")
    assert int(backend.numpy(state.step)) == 0
    for count in (1, 2):
        assert_array(backend, after.step, count, "int32")
        _, after = fn.dropout(x, after)
        assert_array(backend, after.mask, ref.dropout_mask(x.shape, 0.5, 8, count), "bool")


@pytest.mark.parametrize("order", ["C", "F"])
def test_mask_does_not_depend_on_memory_order_or_threads(numpy_backend: Backend, order: Any) -> None:
    shape = (3, 4, 50, 60)
    wanted = ref.dropout_mask(shape, 0.5, 1, 0)
    x = np.asarray(np.ones(shape), order=order)
    for view in (x, np.moveaxis(np.ones((3, 50, 60, 4)), -1, 1), np.broadcast_to(1.0, shape)):
        for threads in (1, 3):
            _, state = drop(numpy_backend, view, 0.5, 1, options=fn.Options(threads=threads))
            assert_array_equal(state.mask, wanted)


# ---- its statistics: one stream of bits, whatever engine -------------------------------------------------------------

ROWS, COLUMNS = 512, 2048


def sigmas(bits: Any, probability: float) -> float:
    """How many standard deviations the mean of independent bits lies from its expectation."""
    return float((bits.mean() - probability) / np.sqrt(probability * (1 - probability) / bits.size))


def correlation(a: Any, b: Any) -> float:
    """Of two fair streams of bits, in standard deviations."""
    return sigmas(a == b, 0.5)


def chi_square(counts: Any, expected: float) -> float:
    """Of Poisson-like counts, in standard deviations from its mean."""
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


@pytest.fixture(scope="module")
def fair() -> dict[tuple[int, int], Any]:
    """Masks of rate 1/2 by (seed, step)."""
    pairs = itertools.product((0, 1, 2**32, 2**63), (0, 1))
    return {pair: mask_of(Backend.NUMPY_BLAS, (ROWS, COLUMNS), 0.5, *pair) for pair in pairs}


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.25, 0.5, 0.9, 0.999])
def test_share_of_kept_elements(rate: float) -> None:
    assert abs(sigmas(mask_of(Backend.NUMPY_BLAS, (ROWS, COLUMNS), rate, 11), 1 - rate)) < 5


def test_a_higher_rate_drops_a_superset() -> None:
    """The same hash is compared with a higher threshold."""
    masks = [mask_of(Backend.NUMPY_BLAS, (4, 100), rate, 5) for rate in (0, 0.2, 0.5, 0.51, 1)]
    for low, high in itertools.pairwise(masks):
        assert not (high & ~low).any()


def test_no_correlation_between_seeds_and_steps(fair: dict[tuple[int, int], Any]) -> None:
    for a, b in itertools.combinations(fair.values(), 2):
        assert abs(correlation(a, b)) < 5


def test_no_correlation_between_rows_columns_and_neighbours(fair: dict[tuple[int, int], Any]) -> None:
    for mask in fair.values():
        for lag in (1, 2, 3, 4, 7, 8, 16, 28, 32, 64, 128, 256):
            assert abs(correlation(mask[:, lag:], mask[:, :-lag])) < 5, f"columns at distance {lag}"
            assert abs(correlation(mask[lag:], mask[:-lag])) < 5, f"rows at distance {lag}"
            assert abs(correlation(mask[lag:, lag:], mask[:-lag, :-lag])) < 5, f"diagonals at distance {lag}"


def test_rows_are_no_windows_into_one_stream(fair: dict[tuple[int, int], Any]) -> None:
    """With one key a row, two rows of 2,048 would agree at some shift; the best of all shifts stays within chance."""
    mask = fair[0, 0][:40].astype(float) * 2 - 1
    spectra = np.fft.rfft(mask, 2 * COLUMNS)
    for i, j in itertools.combinations(range(len(mask)), 2):
        agreement = np.fft.irfft(spectra[i] * spectra[j].conj())
        assert np.abs(agreement).max() < 7 * np.sqrt(COLUMNS)


def test_bytes_rows_and_columns_have_the_spread_of_chance(fair: dict[tuple[int, int], Any]) -> None:
    for mask in fair.values():
        counts = np.bincount(np.packbits(mask), minlength=256)
        assert abs(chi_square(counts, mask.size / 8 / 256)) < 5
        # Sums of bits are binomial, of half the variance of a Poisson count.
        for axis, size in ((0, ROWS), (1, COLUMNS)):
            freedom = mask.shape[1 - axis]
            spread = ((mask.sum(axis) - size / 2) ** 2 / (size / 4)).sum()
            assert abs(spread - freedom) < 5 * np.sqrt(2 * freedom)


# ---- selection -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX])
def test_kept_elements_are_scaled_and_the_rest_is_zero(backend: Backend, dtype: str) -> None:
    """In the backward too, by the same mask. The scale and the product are rounded once; half floats in float32 first."""
    if not backend.has_dtype(dtype):
        pytest.skip(f"{backend.module} has no {dtype}")
    values = np.random.default_rng(0).standard_normal((2, 3, 5)).astype(dtype)
    x = backend.asarray(values)
    y, state = drop(backend, x, 0.3, 2)
    mask = ref.dropout_mask(x.shape, 0.3, 2, 0)
    wide = "complex128" if dtype in COMPLEX else "float64"
    wanted = ref.dropout(values.astype(wide), mask, 0.3)
    rounding = eps(dtype) / 2 + 2 * eps("float32") if "16" in dtype else 2 * eps(dtype)
    for got in (y, fn.dropout_backward(x, state)):
        assert backend.dtype_name(got) == dtype
        error = np.abs(backend.numpy(got).astype(wide) - wanted)
        assert (error <= rounding * np.abs(wanted)).all()


def test_infinities_and_nan_vanish_where_they_are_dropped(backend: Backend) -> None:
    values = np.asarray([[np.inf, -np.inf, np.nan, 0.0, -2.0] * 4])
    x = backend.asarray(values, "float32")
    y, state = drop(backend, x, 0.5, 3)
    wanted = np.where(ref.dropout_mask(x.shape, 0.5, 3, 0), values * 2, 0)
    assert np.isnan(wanted).any()
    assert (wanted == 0).sum() > 4
    assert_array(backend, y, wanted, "float32")
    assert_array(backend, fn.dropout_backward(x, state), wanted, "float32")


def test_rate_1_gives_exact_zeros_and_rate_0_the_input(backend: Backend) -> None:
    values = np.asarray([[np.inf, -np.inf, np.nan, 1.5, -0.0]])
    x = backend.asarray(values, "float32")
    for rate, wanted in ((1, np.zeros((1, 5))), (1.0, np.zeros((1, 5))), (0, values), (0.0, values)):
        y, state = drop(backend, x, rate, 0)
        for got in (y, fn.dropout_backward(x, state)):
            assert_array(backend, got, wanted, "float32")
        assert_array(backend, state.mask, np.full(x.shape, not rate), "bool")
        if not rate:
            assert np.signbit(backend.numpy(y)[0, 4])


@pytest.mark.parametrize("dtype", ["float16", "float64", "complex128"])
def test_without_training_it_is_the_identity_and_the_step_stays(numpy_backend: Backend, dtype: str) -> None:
    """Bit for bit, and in memory of its own."""
    values = np.asarray([[np.inf, np.nan, -0.0, 1.5]])
    x = values.astype(dtype)
    if dtype == "complex128":
        x.imag = values[:, ::-1]
    _, state = drop(numpy_backend, x, 0.5, 0, step=6)
    y, after = fn.dropout(x, state, train=False)
    assert y.dtype == x.dtype
    assert y.tobytes() == x.tobytes()
    assert not np.shares_memory(x, y)
    assert after.mask.shape == (0, 0)
    assert int(after.step) == 7


def test_rate_0_keeps_complex_infinities(numpy_backend: Backend) -> None:
    x = np.asarray([[complex(np.inf, 1), complex(2, np.nan)]])
    y, state = drop(numpy_backend, x, 0, 0)
    for got in (y, fn.dropout_backward(x, state)):
        assert_array_equal(got.real, x.real)
        assert_array_equal(got.imag, x.imag)


def test_zeros_of_the_input_pass_their_gradient(backend: Backend) -> None:
    """The mask is kept, not guessed from y == 0."""
    x, dy = (backend.asarray(np.full((1, 30), value), "float32") for value in (0, 3))
    _, state = drop(backend, x, 0.5, 0)
    wanted = np.where(ref.dropout_mask((1, 30), 0.5, 0, 0), 6, 0)
    assert_array(backend, fn.dropout_backward(dy, state), wanted, "float32")


def test_a_mask_of_ones_own_is_obeyed(backend: Backend) -> None:
    x = backend.asarray(np.arange(6.0).reshape(2, 3), "float32")
    mask = np.asarray([[True, False, True], [False, False, True]])
    state = dataclasses.replace(fn.dropout_init(x, 0.75, seed=0, engine=backend.engine), mask=backend.asarray(mask))
    assert_array(backend, fn.dropout_backward(x, state), np.where(mask, np.arange(6.0).reshape(2, 3) * 4, 0), "float32")


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 2, 3, 4), (3, 0, 2)], ids=str)
def test_empty_arrays(backend: Backend, shape: tuple[int, ...]) -> None:
    x = backend.asarray(np.ones(shape), "float32")
    y, state = drop(backend, x, 0.5, 0)
    assert_array(backend, y, np.ones(shape), "float32")
    assert_array(backend, fn.dropout_backward(y, state), np.ones(shape), "float32")


@pytest.mark.parametrize("library", [Backend.JAX, Backend.TORCH], ids=["jax", "torch"])
def test_autograd_through_dropout_is_dropout_backward(library: Backend) -> None:
    need(library)
    x = library.asarray(np.arange(12.0).reshape(2, 6), "float32")
    state = fn.dropout_init(x, 0.5, seed=0)
    y, after = fn.dropout(x, state)
    own = fn.dropout_backward(y, after)
    if library is Backend.JAX:
        import jax

        through = jax.grad(lambda x: (fn.dropout(x, state)[0] * y).sum())(x)
    else:
        leaf = x.clone().requires_grad_()
        fn.dropout(leaf, state)[0].backward(y)
        through = leaf.grad
    assert_array(library, through, library.numpy(own), "float32")
