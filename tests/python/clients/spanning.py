"""Two workers of four devices each: what is on either of them, on both, and goes from one to the other."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from harness import Skip, check, main, raises, server_only
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from pathwaysutils.experimental.concatenate_by_mesh_axis import concatenate_by_mesh_axis
from pathwaysutils.experimental.split_by_mesh_axis import split_by_mesh_axis


@check
def a_program_over_both_workers_runs():
    mesh = Mesh(np.array(jax.devices()), ("x",))
    x = jax.device_put(np.arange(16.0), NamedSharding(mesh, P("x")))
    assert float(jax.jit(jnp.sum)(x)) == 120
    assert np.array_equal(np.asarray(x), np.arange(16.0))


@check
def programs_on_either_worker_run():
    for devices in [jax.devices()[:4], jax.devices()[4:]]:
        mesh = Mesh(np.array(devices).reshape(2, 2), ("x", "y"))
        value = np.arange(64, dtype=np.float32).reshape(8, 8)
        x = jax.device_put(value, NamedSharding(mesh, P("x", "y")))
        assert np.array_equal(np.asarray(jax.jit(lambda x: x @ x.T)(x)), value @ value.T)


@check
def results_of_one_worker_feed_the_other():
    meshes = [Mesh(np.array(devices), ("x",)) for devices in (jax.devices()[:4], jax.devices()[4:])]
    step = jax.jit(lambda x: x * 2 + 1)
    x, expected = jax.device_put(np.arange(8, dtype=np.float32), NamedSharding(meshes[0], P("x"))), np.arange(8, dtype=np.float32)
    for i in range(6):
        x, expected = step(x), expected * 2 + 1
        x = jax.device_put(x, NamedSharding(meshes[(i + 1) % 2], P("x")))
    assert np.array_equal(np.asarray(x), expected)


@check
def copies_of_one_device_arrays_cross():
    value = np.random.default_rng(0).normal(size=(1 << 20,)).astype(np.float32)
    x = jax.device_put(value, jax.devices()[0])
    for device in (7, 1, 6, 2, 5):
        x = jax.device_put(x, jax.devices()[device])
    assert np.array_equal(np.asarray(x), value)


@check
def results_become_one_array_over_both():
    f = jax.jit(lambda x: x + 1)
    pieces = [f(jax.device_put(np.full((2,), i, np.float32), device)) for i, device in enumerate(jax.devices())]
    mesh = Mesh(np.array(jax.devices()), ("x",))
    whole = jax.make_array_from_single_device_arrays((16,), NamedSharding(mesh, P("x")), pieces)
    assert np.array_equal(np.asarray(whole), np.repeat(np.arange(8) + 1, 2))


@check
@server_only
def arrays_are_split_and_joined_by_an_axis_over_the_workers():
    if jax.version.__version_info__ < (0, 10):
        raise Skip("before JAX 0.10 there is no concatenate_by_mesh_axis")
    value = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)
    for axis, number, dimension in [("s", 2, 0), ("x", 4, 1), ("x", 2, 1)]:
        # The first axis goes from worker to worker, each piece of the second one has devices of both.
        mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("s", "x"))
        whole = {"cut": P("s", "x"), "kept": P()}
        whole = {name: jax.device_put(value, NamedSharding(mesh, spec)) for name, spec in whole.items()}
        pieces = split_by_mesh_axis(whole, axis, number)
        assert len(pieces) == number
        for piece, wanted in zip(pieces, np.split(value, number, dimension)):
            assert np.array_equal(np.asarray(piece["cut"]), wanted)
            assert np.array_equal(np.asarray(piece["kept"]), value)
        assert np.array_equal(np.asarray(whole["cut"]), value)
        joined = concatenate_by_mesh_axis([piece["cut"] for piece in pieces], axis)
        assert joined.sharding.is_equivalent_to(whole["cut"].sharding, 2)
        assert np.array_equal(np.asarray(joined), value)


@check
def an_error_crosses_workers_with_its_words():
    too_many = 1 << 47
    bad = jax.jit(lambda x: jnp.broadcast_to(x, (too_many,)) + jnp.arange(too_many, dtype=jnp.float32), device=None)
    pick = jax.jit(lambda x: x[:1])
    x = jax.device_put(np.float32(1), jax.devices()[1])
    for _ in range(3):
        try:
            y = pick(bad(x))
            z = jax.device_put(y, jax.devices()[6])
            raises(jax.errors.JaxRuntimeError, lambda: jax.block_until_ready(z), "Out of memory")
        except jax.errors.JaxRuntimeError as error:
            assert "Out of memory" in str(error)
    assert float(jax.device_put(x, jax.devices()[6])) == 1


if __name__ == "__main__":
    sys.exit(main())
