"""Arrays moved to other shardings by the server (pathwaysutils' reshard, in both its forms): any sharding to any other, on
other devices too. Natively `jax.device_put` stands in, to show that the checks are right."""

import itertools
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pathwaysutils
import pathwaysutils.experimental.reshard as reshard_program
import pathwaysutils.reshard as reshard_request
from harness import NATIVE, check, main, raises, server_only, status
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

# Before the first use of a device, as pathwaysutils wants it.
pathwaysutils.initialize()

DEVICES = np.array(jax.devices())
# jaxlib 0.8.3 has no ReshardArrays, only the plugin program.
PROGRAM_ONLY = jax.version.__version_info__ < (0, 9)


def meshes():
    """Different shapes, orders and subsets of the eight devices."""
    return {
        "8": Mesh(DEVICES.reshape(8), ("x",)),
        "2x4": Mesh(DEVICES.reshape(2, 4), ("x", "y")),
        "backwards": Mesh(DEVICES[::-1].reshape(4, 2), ("x", "y")),
        "first": Mesh(DEVICES[:4].reshape(2, 2), ("x", "y")),
        "last": Mesh(DEVICES[4:].reshape(4), ("x",)),
        "mixed": Mesh(DEVICES[[6, 1]].reshape(2), ("x",)),
    }


def shardings(rank):
    made = [SingleDeviceSharding(DEVICES[0]), SingleDeviceSharding(DEVICES[5])]
    for mesh in meshes().values():
        names = (None,) + mesh.axis_names
        for spec in itertools.product(names, repeat=rank):
            used = [name for name in spec if name]
            if len(used) == len(set(used)):
                made.append(NamedSharding(mesh, P(*spec)))
        if rank and len(mesh.axis_names) == 2:
            made.append(NamedSharding(mesh, P(mesh.axis_names)))
    return made


def reshard(x, sharding, program=False, **options):
    if NATIVE:
        return jax.device_put(x, sharding)
    function = reshard_program.reshard if program or PROGRAM_ONLY else reshard_request.reshard
    return function(x, sharding, **options)


def put(values, sharding):
    return jax.device_put(values, sharding)


def same(array, sharding, values):
    """The whole, and each device's shard, which a wrong shard elsewhere must not hide behind."""
    assert array.sharding.is_equivalent_to(sharding, values.ndim), (array.sharding, sharding)
    for shard in array.addressable_shards:
        found, wanted = np.asarray(shard.data), values[shard.index]
        assert found.dtype == wanted.dtype and found.shape == wanted.shape, (found.shape, wanted.shape)
        assert found.tobytes() == np.ascontiguousarray(wanted).tobytes(), (sharding, shard.device)


@check
def every_sharding_of_a_matrix_to_every_other():
    values = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)
    every = shardings(2)
    # Each once as source with targets spread over the list: all pairs would be some thousand.
    for number, source in enumerate(every):
        x = put(values, source)
        for target in every[number % 5 :: 5]:
            same(reshard(x, target), target, values)


@check
def other_ranks():
    for shape in ((), (48,), (8, 8, 8), (8, 1, 16, 2)):
        values = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
        every = shardings(len(shape))
        every = [s for s in every if not fails(s, shape)]
        for number, source in enumerate(every[:: max(1, len(every) // 6)]):
            x = put(values, source)
            for target in every[number % 7 :: max(7, len(every) // 6)]:
                same(reshard(x, target), target, values)


def fails(sharding, shape):
    try:
        sharding.shard_shape(shape)
    except ValueError:
        return True
    return False


@check
def every_dtype():
    rows, columns = (NamedSharding(meshes()["2x4"], spec) for spec in (P("x", "y"), P("y", "x")))
    for dtype in (np.bool_, np.int8, np.uint16, np.int32, np.float16, ml_dtypes.bfloat16, np.float32, np.complex64,
                  ml_dtypes.float8_e4m3fn, ml_dtypes.int4, ml_dtypes.uint4):  # fmt: skip
        values = (np.arange(64).reshape(8, 8) % 7).astype(dtype)
        same(reshard(put(values, rows), columns), columns, values)


@check
def arrays_of_no_elements():
    rows, columns = (NamedSharding(meshes()["8"], spec) for spec in (P("x", None), P(None, "x")))
    values = np.zeros((0, 8), np.float32)
    same(reshard(put(values, rows), columns), columns, values)
    same(reshard(put(values, columns), rows), rows, values)


@check
def larger_than_a_frame():
    rows, columns = NamedSharding(meshes()["8"], P("x", None)), NamedSharding(meshes()["backwards"], P("y", "x"))
    values = np.random.default_rng(1).standard_normal((2048, 1536)).astype(np.float32)
    x = put(values, rows)
    same(reshard(x, columns), columns, values)
    everywhere = NamedSharding(meshes()["8"], P())
    same(reshard(x, everywhere), everywhere, values)


@check
def results_that_are_not_there_yet():
    rows, columns = (NamedSharding(meshes()["first"], spec) for spec in (P("x"), P(None, "x")))
    step = jax.jit(lambda x: x * 2 + 1)
    x, expected = put(np.arange(64.0, dtype=np.float32).reshape(8, 8), rows), np.arange(64.0, dtype=np.float32).reshape(8, 8)
    for _ in range(20):
        x, expected = step(reshard(x, columns)), expected * 2 + 1
        x = reshard(step(x), rows)
        expected = expected * 2 + 1
        x, expected = x / 4, expected / 4
    assert np.array_equal(np.asarray(x), expected)


@check
def trees_of_arrays():
    rows, columns = (NamedSharding(meshes()["2x4"], spec) for spec in (P("x", "y"), P("y", "x")))
    values = {"a": np.arange(64.0, dtype=np.float32).reshape(8, 8), "b": [np.ones((16, 8), np.int32)]}
    moved = reshard(jax.tree.map(lambda v: put(v, rows), values), columns)
    jax.tree.map(lambda m, v: same(m, columns, v), moved, values)


@check
@server_only
def donated_arrays_are_gone_and_others_stay():
    rows, columns = (NamedSharding(meshes()["2x4"], spec) for spec in (P("x", "y"), P("y", "x")))
    values = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    for program in (False, True):
        kept = put(values, rows)
        same(reshard(kept, columns, program=program), columns, values)
        same(kept, rows, values)
        given = put(values, rows)
        same(reshard(given, columns, program=program, donate=True), columns, values)
        if not program and not PROGRAM_ONLY:
            assert given.is_deleted()


@check
@server_only
def the_plugin_program_does_the_same():
    values = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)
    every = shardings(2)
    for number, source in enumerate(every[::7]):
        x = put(values, source)
        for target in every[number % 11 :: 11]:
            same(reshard(x, target, program=True), target, values)


@check
@server_only
def a_failed_array_fails_what_is_made_of_it():
    too_big = jax.jit(lambda x: jnp.broadcast_to(x, (1 << 47,)) + jnp.arange(1 << 47, dtype=jnp.float32))
    first = jax.jit(lambda b: b[:8])
    columns = NamedSharding(meshes()["8"], P("x"))
    failed = 0
    for _ in range(3):
        try:
            bad = first(too_big(1.0))
        except jax.errors.JaxRuntimeError:
            continue
        raises(jax.errors.JaxRuntimeError, lambda: jax.block_until_ready(reshard(bad, columns)), "Out of memory")
        failed += 1
    assert failed


@check
@server_only
def what_moves_between_workers_is_what_is_needed():
    values = np.arange(1 << 16, dtype=np.float32).reshape(256, 256)
    nbytes = values.nbytes
    rows = NamedSharding(Mesh(DEVICES, ("x",)), P("x", None))
    columns = NamedSharding(Mesh(DEVICES, ("x",)), P(None, "x"))

    def pulled(x, target):
        jax.block_until_ready(x)
        before = status()["totals"]["pulled_bytes"]
        jax.block_until_ready(reshard(x, target))
        return status()["totals"]["pulled_bytes"] - before

    workers = len(status()["workers"])
    everywhere = NamedSharding(Mesh(DEVICES, ("x",)), P())
    # Of what a worker is to hold, its part is there already.
    assert pulled(put(values, rows), columns) == nbytes * (workers - 1) // workers
    # To every device: each worker fetches what it lacks once, not once a device.
    assert pulled(put(values, rows), everywhere) == nbytes * (workers - 1)
    # A copy that is on the worker is taken from there.
    assert pulled(put(values, everywhere), columns) == 0


if __name__ == "__main__":
    sys.exit(main())
