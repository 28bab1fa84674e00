"""Linear algebra, which JAX lowers on CPU to FFI targets that the worker brings. Runs on one worker."""

import functools
import sys

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import numpy as np
import scipy.linalg as sl
from harness import check, main, server_only, status
from jax import lax
from jax.experimental import sparse

jax.config.update("jax_enable_x64", True)

DTYPES = [np.float32, np.float64, np.complex64, np.complex128]
TALL, WIDE, SQUARE, STACK = (7, 3), (3, 7), (5, 5), (2, 3, 4, 4)


def sample(dtype, shape, seed=0):
    random = np.random.default_rng(seed)
    value = random.normal(size=shape)
    if np.dtype(dtype).kind == "c":
        value = value + 1j * random.normal(size=shape)
    return value.astype(dtype)


def positive(dtype, shape):
    value = sample(dtype, shape)
    return value @ adjoint(value) + shape[-1] * np.eye(shape[-1], dtype=dtype)


def hermitian(dtype, shape):
    value = sample(dtype, shape)
    return (value + adjoint(value)) / 2


def adjoint(value):
    return np.conj(np.swapaxes(value, -1, -2))


def host(array, like=None):
    """The fetched value in double precision; `like`: an array with the precision that it must have."""
    value = np.asarray(array)
    if like is not None:
        assert np.finfo(value.dtype).bits == np.finfo(like.dtype).bits, (value.dtype, like.dtype)
    return value.astype(np.complex128 if value.dtype.kind == "c" else np.float64)


def close(got, wanted, like, factor=1.0):
    tolerance = factor * (2e-4 if np.finfo(like.dtype).bits == 32 else 1e-11)
    np.testing.assert_allclose(host(got), host(wanted), rtol=tolerance, atol=tolerance)


def each(*shapes, make=sample):
    """Runs a check for every type of elements on the first of the shapes, and for one type, in turn, on each other."""
    cases = [(dtype, shapes[0]) for dtype in DTYPES]
    cases += [(DTYPES[-index % 4], shape) for index, shape in enumerate(shapes) if index > 0]

    def decorate(function):
        @functools.wraps(function)
        def wrapped():
            for dtype, shape in cases:
                try:
                    function(make(dtype, shape))
                except Exception as error:
                    raise AssertionError(f"{np.dtype(dtype).name}{shape}: {str(error)[:1500]}") from error

        return wrapped

    return decorate


def eye_like(product):
    return np.broadcast_to(np.eye(product.shape[-1]), product.shape)


def diagonals(values):
    return host(values)[..., None] * np.eye(values.shape[-1])


@check
@each(SQUARE, TALL, WIDE, STACK)
def qr(a):
    q, r = jnp.linalg.qr(a)
    close(host(q, a) @ host(r, a), a, a)
    close(adjoint(host(q)) @ host(q), eye_like(adjoint(host(q)) @ host(q)), a)
    close(np.tril(host(r), -1), np.zeros(r.shape), a)
    q, r = jnp.linalg.qr(a, mode="complete")
    assert q.shape[-1] == a.shape[-2] and r.shape == a.shape
    close(host(q) @ host(r), a, a)
    close(jnp.abs(jnp.linalg.qr(a, mode="r")), np.abs(host(r))[..., : min(a.shape[-2:]), :], a)


@check
@each(SQUARE, TALL, WIDE)
def qr_with_pivoting(a):
    q, r, p = jsl.qr(a, pivoting=True, mode="economic")
    close(host(q) @ host(r), a[:, np.asarray(p)], a)
    sizes = np.abs(np.diagonal(host(r)))
    assert np.all(sizes[:-1] >= sizes[1:] - 1e-4), sizes


@check
@each(SQUARE, TALL, WIDE, STACK)
def svd(a):
    values = np.linalg.svd(host(a), compute_uv=False)
    for full in (True, False):
        u, s, vh = jnp.linalg.svd(a, full_matrices=full)
        close(s, values, a)
        k = s.shape[-1]
        close((host(u, a)[..., :k] * host(s)[..., None, :]) @ host(vh, a)[..., :k, :], a, a)
        close(adjoint(host(u)) @ host(u), eye_like(adjoint(host(u)) @ host(u)), a)
        close(host(vh) @ adjoint(host(vh)), eye_like(host(vh) @ adjoint(host(vh))), a)
    close(jnp.linalg.svd(a, compute_uv=False), values, a)
    close(jnp.linalg.svdvals(a), values, a)


@check
@each(SQUARE, TALL)
def svd_by_qr_iteration(a):
    u, s, vh = lax.linalg.svd(a, full_matrices=False, algorithm=lax.linalg.SvdAlgorithm.QR)
    close((host(u) * host(s)) @ host(vh), a, a)
    close(s, np.linalg.svd(host(a), compute_uv=False), a)


@check
@each(SQUARE, STACK, make=hermitian)
def eigh(a):
    wanted = np.linalg.eigvalsh(host(a))
    for uplo in "LU":
        w, v = jnp.linalg.eigh(a, UPLO=uplo)
        close(w, wanted, a)
        close(host(a) @ host(v, a), host(v) @ diagonals(w), a)
        close(adjoint(host(v)) @ host(v), eye_like(adjoint(host(v)) @ host(v)), a)
    close(jnp.linalg.eigvalsh(a), wanted, a)


@check
@each(SQUARE, STACK)
def eig(a):
    w, v = jnp.linalg.eig(a)
    close(host(a) @ host(v, a), host(v) @ diagonals(w), a, 5)
    order = lambda values: np.sort_complex(np.round(host(values), 3))
    close(order(jnp.linalg.eigvals(a)), order(np.linalg.eigvals(host(a))), a, 20)
    # lax.linalg.eig gives left vectors too.
    w, left, _ = lax.linalg.eig(a)
    close(adjoint(host(left)) @ host(a), diagonals(w) @ adjoint(host(left)), a, 5)


@check
def eig_of_what_is_not_finite_is_nan():
    a = np.eye(3)
    a[1, 1] = np.inf
    assert np.all(np.isnan(host(jnp.linalg.eigvals(a))))


@check
@each(SQUARE, STACK, make=positive)
def cholesky(a):
    close(jnp.linalg.cholesky(a), np.linalg.cholesky(host(a)), a)
    close(jnp.linalg.cholesky(a, upper=True), adjoint(np.linalg.cholesky(host(a))), a)
    b = sample(a.dtype, a.shape[:-1] + (2,), 1)
    if a.ndim == 2:
        close(jsl.cho_solve(jsl.cho_factor(a), b), np.linalg.solve(host(a), host(b)), a)


@check
def cholesky_of_what_is_not_positive_is_nan():
    assert np.all(np.isnan(np.diagonal(host(jnp.linalg.cholesky(-np.eye(3))))))


@check
@each(SQUARE, TALL, WIDE)
def lu(a):
    p, l, u = jsl.lu(a)
    close(host(p) @ host(l, a) @ host(u, a), a, a)
    for got, wanted in zip(jsl.lu_factor(a), sl.lu_factor(a)):
        close(got, wanted, a)


@check
@each(SQUARE, STACK)
def solve_inv_det(a):
    b = sample(a.dtype, a.shape[:-1] + (2,), 1)
    close(jnp.linalg.solve(a, b), np.linalg.solve(host(a), host(b)), a, 20)
    close(jnp.linalg.inv(a), np.linalg.inv(host(a)), a, 20)
    close(jnp.linalg.det(a), np.linalg.det(host(a)), a, 5)
    sign, log = jnp.linalg.slogdet(a)
    wanted_sign, wanted_log = np.linalg.slogdet(host(a))
    close(sign, wanted_sign, a)
    close(log, wanted_log, a, 5)


@check
@each(TALL, WIDE, SQUARE)
def least_squares(a):
    b = sample(a.dtype, a.shape[:-1] + (2,), 1)
    x, _, rank, s = jnp.linalg.lstsq(a, b)
    wanted = np.linalg.lstsq(host(a), host(b), rcond=None)
    close(x, wanted[0], a, 20)
    close(s, wanted[3], a)
    assert int(rank) == wanted[2]
    close(jnp.linalg.pinv(a), np.linalg.pinv(host(a)), a, 20)
    assert int(jnp.linalg.matrix_rank(a)) == min(a.shape)
    close(jnp.linalg.norm(a, 2), np.linalg.norm(host(a), 2), a)
    close(jnp.linalg.cond(a), np.linalg.cond(host(a)), a, 20)


@check
@each(SQUARE)
def schur(a):
    t, z = jsl.schur(a, output="complex" if a.dtype.kind == "c" else "real")
    close(host(z, a) @ host(t, a) @ adjoint(host(z)), a, a)
    close(adjoint(host(z)) @ host(z), np.eye(5), a)
    below = -1 if a.dtype.kind == "c" else -2
    close(np.tril(host(t), below), np.zeros((5, 5)), a)


@check
@each(SQUARE)
def functions_of_matrices(a):
    a = a / 4
    close(jsl.expm(a), sl.expm(host(a)), a, 5)
    close(jnp.linalg.matrix_power(a, -2), np.linalg.matrix_power(host(a), -2), a, 500)
    p = positive(a.dtype, SQUARE)
    root = host(jsl.sqrtm(p))
    close(root @ root, p, a, 20)


@check
@each((5, 5), (3, 4, 4))
def triangular_solve(a):
    a = a + 4 * np.eye(a.shape[-1], dtype=a.dtype)
    b = sample(a.dtype, a.shape[:-1] + (3,), 1)
    for left, lower, unit, adjoined in [(1, 1, 0, 0), (0, 0, 1, 0), (1, 0, 0, 1), (0, 1, 1, 1)]:
        triangle = np.tril(host(a)) if lower else np.triu(host(a))
        if unit:
            triangle = triangle - triangle * np.eye(a.shape[-1]) + np.eye(a.shape[-1])
        triangle = adjoint(triangle) if adjoined else triangle
        right = b if left else np.swapaxes(b, -1, -2)
        flags = {"left_side": left, "lower": lower, "unit_diagonal": unit, "transpose_a": adjoined, "conjugate_a": adjoined}
        x = lax.linalg.triangular_solve(a, right, **{name: bool(flag) for name, flag in flags.items()})
        product = triangle @ host(x, a) if left else host(x, a) @ triangle
        close(product, right, a, 50)


@check
@each(SQUARE, (2, 4, 4))
def hessenberg(a):
    packed, taus = lax.linalg.hessenberg(a)
    n = a.shape[-1]
    h = np.triu(host(packed, a), -1)
    # Q from its reflectors: one row and column further down than those of a QR.
    q = np.broadcast_to(np.eye(n, dtype=host(h).dtype), a.shape).copy()
    q[..., 1:, 1:] = host(lax.linalg.householder_product(packed[..., 1:, :-1], taus))
    close(q @ h @ adjoint(q), a, a)


@check
@each(SQUARE, (2, 4, 4), make=hermitian)
def tridiagonal(a):
    for lower in (True, False):
        _, d, e, _ = lax.linalg.tridiagonal(a, lower=lower)
        d, e = host(d), np.abs(host(e))
        n = a.shape[-1]
        t = np.zeros(a.shape)
        t[..., range(n), range(n)] = d
        t[..., range(n - 1), range(1, n)] = e
        t[..., range(1, n), range(n - 1)] = e
        close(np.linalg.eigvalsh(t), np.linalg.eigvalsh(host(a)), a)


@check
@each((6, 2), (3, 6, 2))
def tridiagonal_solve(b):
    n = b.shape[-2]
    dl, d, du = (sample(b.dtype, b.shape[:-1], seed) for seed in (1, 2, 3))
    dl[..., 0] = 0
    du[..., -1] = 0
    d = d + 4
    full = np.zeros(b.shape[:-1] + (n,), np.complex128)
    full[..., range(n), range(n)] = d
    full[..., range(1, n), range(n - 1)] = dl[..., 1:]
    full[..., range(n - 1), range(1, n)] = du[..., :-1]
    close(full @ host(lax.linalg.tridiagonal_solve(dl, d, du, b), b), b, b)


@check
@each((6, 4))
def products_with_q(a):
    packed, taus = lax.linalg.geqrf(a) if hasattr(lax.linalg, "geqrf") else jnp.linalg.qr(a, mode="raw")
    if not hasattr(lax.linalg, "geqrf"):
        packed = jnp.swapaxes(packed, -1, -2)
    q = host(lax.linalg.householder_product(packed, taus), a)
    close(q @ np.triu(host(packed))[:4], a, a)
    q, _ = np.linalg.qr(host(a), mode="complete")
    if hasattr(lax.linalg, "ormqr"):
        c = sample(a.dtype, (6, 3), 1)
        back = lax.linalg.ormqr(packed, taus, lax.linalg.ormqr(packed, taus, c, transpose=True), transpose=False)
        close(back, c, a)


@check
def empty_stacks_and_matrices():
    for shape in [(0, 3, 3), (2, 0, 0), (0, 0)]:
        a = np.zeros(shape, np.float32)
        for function in (jnp.linalg.qr, jnp.linalg.eigh, jnp.linalg.cholesky, jnp.linalg.inv, jnp.linalg.eig):
            for result in jax.tree.leaves(function(a)):
                assert np.asarray(result).size == 0, (shape, function)
    u, s, vh = jnp.linalg.svd(np.zeros((3, 0), np.float32))
    assert (u.shape, s.shape, vh.shape) == ((3, 3), (0,), (0, 0))
    close(u, np.eye(3), np.zeros(1))


@check
def gradients():
    a = positive(np.float64, SQUARE)
    close(jax.jit(jax.grad(lambda a: jnp.linalg.slogdet(a)[1]))(a), np.linalg.inv(a).T, a)
    close(jax.grad(lambda a: jnp.sum(jnp.linalg.eigvalsh(a)))(a), np.eye(5), a)
    close(jax.grad(lambda a: jnp.trace(jnp.linalg.cholesky(a) @ jnp.linalg.cholesky(a).T))(a), np.eye(5), a)
    gradient = jax.grad(lambda a: jnp.sum(jnp.linalg.svd(a, compute_uv=False) ** 2))(a)
    close(gradient, 2 * a, a, 20)
    q_norm = lambda a: jnp.sum(jnp.abs(jnp.linalg.qr(a)[1]) ** 2)
    close(jax.grad(q_norm)(sample(np.float64, TALL)), 2 * sample(np.float64, TALL), a, 20)
    solve = lambda b: jnp.sum(jnp.linalg.solve(a, b))
    close(jax.grad(solve)(np.ones(5)), np.linalg.solve(a.T, np.ones(5)), a)


@check
def inside_larger_programs():
    a = sample(np.float32, (8, 4, 4))
    product = jax.jit(jax.vmap(lambda a: jnp.linalg.inv(a) @ a))(a)
    close(product, np.broadcast_to(np.eye(4), (8, 4, 4)), a, 20)
    power = lax.fori_loop(0, 20, lambda _, q: jnp.linalg.qr(a[0] @ q)[0], np.eye(4, dtype=np.float32))
    close(adjoint(host(power)) @ host(power), np.eye(4), a)
    placed = jax.device_put(positive(np.float64, (64, 64)), jax.devices()[-1])
    close(jnp.linalg.cholesky(placed), np.linalg.cholesky(np.asarray(placed)), placed)


@check
def on_all_devices_at_once():
    devices = jax.devices()
    values = [positive(np.float64, (48, 48)) + i for i in range(len(devices))]
    placed = [jax.device_put(value, device) for value, device in zip(values, devices)]
    results = [jnp.linalg.eigh(value) for value in placed]
    for value, (w, v) in zip(values, results):
        close(host(value) @ host(v), host(v) @ diagonals(w), value, 1000)


@check
def sparse_times_dense():
    for dtype in (np.float32, np.float64, np.complex64, np.complex128, np.int32):
        dense = sample(np.float64, (6, 5)).round() if dtype == np.int32 else sample(dtype, (6, 5))
        dense = np.where(np.abs(sample(np.float64, (6, 5), 3)) > 1, dense, 0).astype(dtype)
        matrix = sparse.CSR.fromdense(dense)
        for other in (np.arange(5), np.arange(10).reshape(5, 2)):
            got = np.asarray(matrix @ other.astype(dtype))
            np.testing.assert_allclose(got, dense @ other.astype(dtype), rtol=1e-4, atol=1e-4)


@check
@server_only
def the_worker_computed_it():
    before = status()["totals"]["ffi_calls"]
    jnp.linalg.cholesky(positive(np.float64, (9, 9))).block_until_ready()
    assert status()["totals"]["ffi_calls"] > before


if __name__ == "__main__":
    sys.exit(main())
