"""Arrays without programs that span devices: put, fetch, delete, move. Runs on one worker and on two."""

import gc
import sys
import time

import jax
import ml_dtypes
import numpy as np
from harness import NATIVE, Skip, check, main, raises, server_only, status
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding
from values import fresh, grid, sample, same

DTYPES = [
    np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64,
    np.float16, np.float32, np.float64, np.complex64, np.complex128, ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3b11fnuz, ml_dtypes.float8_e4m3fnuz,
    ml_dtypes.float8_e5m2fnuz, ml_dtypes.int4, ml_dtypes.uint4,
]  # fmt: skip

jax.config.update("jax_enable_x64", True)


@check
def every_dtype_comes_back_bit_for_bit():
    wrong = []
    for dtype in DTYPES:
        for shape in [(16, 24), (), (8,), (0, 4), (3, 1, 5)]:
            value = sample(dtype, shape)
            try:
                same(jax.device_put(value, jax.devices()[3]), value)
            except Exception as error:  # pylint: disable=broad-exception-caught
                wrong.append(f"{np.dtype(dtype).name}{shape}: {str(error)[:200]}")
    assert not wrong, "\n".join(wrong)


@check
def every_dtype_is_sharded_and_comes_back():
    mesh = grid(4, 2)
    wrong = []
    for dtype in DTYPES:
        value = sample(dtype, (16, 24))
        try:
            array = jax.device_put(value, NamedSharding(mesh, P("x", "y")))
            same(array, value)
            for shard in array.addressable_shards:
                same(shard.data, value[shard.index])
        except Exception as error:  # pylint: disable=broad-exception-caught
            wrong.append(f"{np.dtype(dtype).name}: {str(error)[:200]}")
    assert not wrong, "\n".join(wrong)


@check
def strided_views_are_put_right():
    base = np.arange(24 * 36, dtype=np.float32).reshape(24, 36)
    views = {
        "transposed": base.T,
        "fortran": np.asfortranarray(base),
        "stepped rows": base[::3],
        "stepped columns": base[:, ::2],
        "stepped both": base[4::2, 1::5],
        "three dimensions": base.reshape(4, 6, 36).transpose(2, 0, 1),
        "one column": base[:, 5:6],
        "offset": base[7:, 11:],
    }
    for name, view in views.items():
        array = jax.device_put(view, jax.devices()[1])
        fetched = np.asarray(array)
        assert np.array_equal(fetched, view), name
    mesh = grid(4, 2)
    for name in ["transposed", "fortran", "stepped rows"]:
        view = views[name][:8, :8]
        assert np.array_equal(np.asarray(jax.device_put(view, NamedSharding(mesh, P("x", "y")))), view), name


@check
def zero_size_and_rank_zero():
    for shape in [(0,), (0, 8), (8, 0), (2, 0, 3)]:
        value = np.zeros(shape, np.float32)
        same(jax.device_put(value), value)
    same(jax.device_put(np.float32(3.25), jax.devices()[7]), np.array(3.25, np.float32))
    replicated = jax.device_put(np.int32(9), NamedSharding(grid(8, 1), P()))
    same(replicated, np.array(9, np.int32))
    empty = np.zeros((8, 0), np.float32)
    same(jax.device_put(empty, NamedSharding(grid(8, 1), P("x"))), empty)


@check
def a_big_array_comes_back():
    value = np.random.default_rng(1).integers(0, 1 << 30, (4096, 4096), dtype=np.int32)  # 64 MiB
    array = jax.device_put(value, jax.devices()[5])
    same(array, value)
    sharded = jax.device_put(value, NamedSharding(grid(4, 2), P("x", "y")))
    same(sharded, value)


@check
def all_shardings_of_a_matrix():
    value = np.arange(16 * 32, dtype=np.int32).reshape(16, 32)
    for mesh in [grid(4, 2), grid(2, 4), grid(8, 1)]:
        for spec in [P(), P("x"), P("y"), P("x", "y"), P("y", "x"), P(None, "x"), P(None, "y"), P(("x", "y")), P(None, ("y", "x"))]:
            array = jax.device_put(value, NamedSharding(mesh, spec))
            assert len(array.addressable_shards) == 8
            for shard in array.addressable_shards:
                assert np.array_equal(np.asarray(shard.data), value[shard.index]), (mesh.shape, spec, shard.device)
            same(fresh(array), value)


@check
def a_mesh_in_another_device_order():
    order = [5, 2, 7, 0, 3, 6, 1, 4]
    mesh = grid(4, 2, devices=[jax.devices()[i] for i in order])
    value = np.arange(64, dtype=np.float32).reshape(8, 8)
    array = jax.device_put(value, NamedSharding(mesh, P("x", "y")))
    for shard in array.addressable_shards:
        assert np.array_equal(np.asarray(shard.data), value[shard.index])
    same(fresh(array), value)


@check
def make_array_from_callback():
    value = np.arange(8 * 6, dtype=np.float32).reshape(8, 6)
    for spec in [P("x"), P("x", "y"), P()]:
        sharding = NamedSharding(grid(4, 2), spec)
        same(jax.make_array_from_callback(value.shape, sharding, lambda index: value[index]), value)


@check
def make_array_from_single_device_arrays():
    sharding = NamedSharding(grid(8, 1), P("x"))
    pieces = [jax.device_put(np.full((2, 3), i, np.int32), device) for i, device in enumerate(jax.devices())]
    array = jax.make_array_from_single_device_arrays((16, 3), sharding, pieces)
    same(array, np.repeat(np.arange(8, dtype=np.int32), 2)[:, None] * np.ones((1, 3), np.int32))
    # The pieces are still there, and deleting them takes nothing from the whole... but what is shared is gone for both.
    same(pieces[3], np.full((2, 3), 3, np.int32))


@check
def copies_between_devices():
    value = np.arange(1000, dtype=np.float32)
    array = jax.device_put(value, jax.devices()[0])
    for device in jax.devices():
        array = jax.device_put(array, device)
        assert array.devices() == {device}
    same(array, value)
    back = jax.device_put(jax.device_put(value, jax.devices()[6]), jax.devices()[1])
    same(back, value)


@check
def a_layout_is_kept_between_devices():
    if NATIVE and jax.version.__version_info__ < (0, 11):
        raise Skip("native JAX forgets the layout")
    value = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)
    array = jax.device_put(value, Format(Layout((1, 0)), SingleDeviceSharding(jax.devices()[0])))
    for device in (jax.devices()[1], jax.devices()[-1]):
        moved = jax.device_put(array, device)
        assert moved.devices() == {device}
        same(moved, value)
        # The program takes the array as the client believes it to lie on the device.
        same(jax.jit(lambda x: x * 2, in_shardings=moved.format)(moved), value * 2)


@check
def device_put_to_other_shardings():
    mesh = grid(4, 2)
    value = np.arange(16 * 16, dtype=np.float32).reshape(16, 16)
    targets = [
        NamedSharding(mesh, P("x", "y")),
        NamedSharding(mesh, P("y", "x")),
        NamedSharding(mesh, P()),
        NamedSharding(mesh, P("y")),
        NamedSharding(grid(2, 4), P("x", "y")),
        NamedSharding(grid(2, 2), P("x", "y")),
        NamedSharding(grid(2, 2, devices=jax.devices()[4:]), P("y")),
        SingleDeviceSharding(jax.devices()[2]),
        SingleDeviceSharding(jax.devices()[6]),
        NamedSharding(grid(4, 2, devices=jax.devices()[::-1]), P("x", "y")),
    ]
    for source in targets:
        array = jax.device_put(value, source)
        for target in targets:
            moved = jax.device_put(array, target)
            assert moved.sharding.is_equivalent_to(target, 2)
            same(fresh(moved), value)


@check
def one_device_to_many():
    value = np.arange(64, dtype=np.float32).reshape(8, 8)
    single = jax.device_put(value, jax.devices()[0])
    same(fresh(jax.device_put(single, NamedSharding(grid(8, 1), P("x")))), value)
    same(fresh(jax.device_put(single, NamedSharding(grid(8, 1), P()))), value)


@check
def memory_kinds():
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    value = np.arange(32, dtype=np.float32)
    for kind in kinds:
        array = jax.device_put(value, SingleDeviceSharding(jax.devices()[1], memory_kind=kind))
        assert array.sharding.memory_kind == kind
        same(array, value)
        sharded = jax.device_put(value, NamedSharding(grid(8, 1), P("x"), memory_kind=kind))
        same(sharded, value)
        moved = jax.device_put(sharded, NamedSharding(grid(8, 1), P("x")))
        same(fresh(moved), value)
    assert "pinned_host" in kinds or NATIVE or len(kinds) >= 1


@check
def deleted_arrays_are_gone():
    array = jax.device_put(np.arange(8.0), jax.devices()[4])
    array.block_until_ready()
    array.delete()
    assert array.is_deleted()
    raises(RuntimeError, lambda: np.asarray(array), "deleted")
    sharded = jax.device_put(np.arange(8.0), NamedSharding(grid(8, 1), P("x")))
    keep = sharded.addressable_shards[2].data
    sharded.delete()
    assert sharded.is_deleted()
    del keep


@check
def readiness():
    array = jax.device_put(np.arange(1 << 20, dtype=np.float32), jax.devices()[2])
    array.block_until_ready()
    assert array.is_ready()
    many = [jax.device_put(np.full(10, i), jax.devices()[i]) for i in range(8)]
    jax.block_until_ready(many)
    # The client asks the server in the background and says no meanwhile.
    deadline = time.monotonic() + 5
    while not all(one.is_ready() for one in many):
        assert time.monotonic() < deadline, [one.is_ready() for one in many]
        time.sleep(0.01)


@check
def many_small_arrays():
    arrays = [jax.device_put(np.array([i, i * i]), jax.devices()[i % 8]) for i in range(2000)]
    for i, array in enumerate(arrays):
        if i % 37 == 0:
            same(array, np.array([i, i * i]))


@check
@server_only
def dropped_arrays_free_the_workers_memory():
    def accounted():
        return status()["totals"]["array_bytes"]

    gc.collect()
    time.sleep(0.5)
    before = accounted()
    array = jax.device_put(np.ones((8, 1 << 20), np.float32), NamedSharding(grid(8, 1), P("x")))
    array.block_until_ready()
    held = accounted()
    assert held >= before + (32 << 20), (before, held)
    del array
    gc.collect()
    jax.device_put(np.ones(3)).block_until_ready()
    deadline = time.monotonic() + 5
    while accounted() > before + 4096 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert accounted() <= before + 4096, (before, held, accounted())


@check
def string_arrays():
    if not hasattr(np.dtypes, "StringDType"):
        raise Skip("this NumPy has no StringDType")
    value = np.array([["waystation", ""], ["zürich", "a\0b"]], dtype=np.dtypes.StringDType())
    mesh = grid(4, 2)
    single = SingleDeviceSharding(jax.devices()[3])
    shardings = [single, NamedSharding(grid(2, 2), P("x", "y"))]
    if not NATIVE:  # native JAX makes one buffer of a replicated array of strings, and then wants eight
        shardings.append(NamedSharding(mesh, P()))
    for sharding in shardings:
        array = jax.device_put(value, sharding)
        array.block_until_ready()
        assert np.asarray(array).tolist() == value.tolist()
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tolist() == value[shard.index].tolist()
    moved = jax.device_put(jax.device_put(value, single), jax.devices()[5])
    assert moved.devices() == {jax.devices()[5]}
    assert np.asarray(moved).tolist() == value.tolist()
    pieces = [jax.device_put(value, device) for device in jax.devices()]
    array = jax.make_array_from_single_device_arrays((16, 2), NamedSharding(grid(8, 1), P("x")), pieces)
    assert np.asarray(array).tolist() == value.tolist() * 8
    long = np.array(["x" * 3_000_000, "y"], dtype=np.dtypes.StringDType())
    assert np.asarray(jax.device_put(long, single)).tolist() == long.tolist()
    array.delete()
    assert array.is_deleted()


if __name__ == "__main__":
    sys.exit(main())
