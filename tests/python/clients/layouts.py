"""Element types below a byte, layouts on the device and strides on the host, against NumPy. Runs on one worker."""

import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from harness import Skip, check, main
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding
from values import grid, same

NARROW = [
    name
    for name in [
        "int4", "uint4", "int2", "uint2", "float8_e3m4", "float8_e4m3", "float8_e8m0fnu", "float4_e2m1fn",
        "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz", "bfloat16",
    ]
    if hasattr(ml_dtypes, name) and hasattr(jnp, name)
]  # fmt: skip


def narrow(name, shape):
    dtype = np.dtype(getattr(ml_dtypes, name))
    low, high = {"int4": (-8, 8), "uint4": (0, 16), "int2": (-2, 2), "uint2": (0, 4), "float8_e8m0fnu": (0, 5)}.get(name, (-4, 5))
    values = np.random.default_rng(5).integers(low, high, shape)
    if name == "float8_e8m0fnu":
        values = 2.0 ** values
    return values.astype(dtype)


def each(names, function):
    wrong = []
    for name in names:
        try:
            function(name)
        except Exception as error:  # pylint: disable=broad-exception-caught
            wrong.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
    assert not wrong, "\n".join(wrong)


@check
def narrow_types_come_back():
    def one(name):
        for shape in [(), (1,), (7,), (3, 5), (16, 8), (0, 3)]:
            value = narrow(name, shape)
            same(jax.device_put(value, jax.devices()[2]), value)
            strided = np.asfortranarray(value) if len(shape) == 2 else value
            same(jax.device_put(strided, jax.devices()[2]), value)
        value = narrow(name, (16, 8))
        same(jax.device_put(value, NamedSharding(grid(4, 2), P("x", "y"))), value)
        same(jax.device_put(value[::2, 1:], NamedSharding(grid(4, 1), P("x"))), value[::2, 1:])

    each(NARROW, one)


@check
def narrow_types_go_through_programs():
    def one(name):
        value = narrow(name, (16, 8))
        sharding = NamedSharding(grid(4, 2), P("x", "y"))
        array = jax.device_put(value, sharding)
        same(jax.jit(lambda x: x.T)(array), value.T)
        wide = jax.jit(lambda x: x.astype(jnp.float32))(array)
        same(wide, value.astype(np.float32))
        same(jax.jit(lambda x: x.astype(value.dtype))(wide), value)
        moved = jax.device_put(jax.device_put(value, jax.devices()[1]), jax.devices()[6])
        same(moved, value)

    each(NARROW, one)


def layout_of(array):
    return array.format.layout.major_to_minor


@check
def a_layout_is_asked_for_by_device_put():
    value = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)
    for sharding in [SingleDeviceSharding(jax.devices()[3]), NamedSharding(grid(4, 2), P("x", "y"))]:
        for order in [(0, 1), (1, 0)]:
            array = jax.device_put(value, Format(Layout(order), sharding))
            assert layout_of(array) == order, (array.format, order)
            same(array, value)
            other = jax.device_put(array, Format(Layout(order[::-1]), sharding))
            assert layout_of(other) == order[::-1]
            same(other, value)
            same(jax.jit(lambda x: x + 1)(array), value + 1)
    for order in [(0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0)]:
        cube = np.arange(2 * 3 * 4, dtype=np.int32).reshape(2, 3, 4)
        array = jax.device_put(cube, Format(Layout(order), SingleDeviceSharding(jax.devices()[0])))
        assert layout_of(array) == order
        same(array, cube)


@check
def programs_with_layouts():
    value = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)
    for sharding in [SingleDeviceSharding(jax.devices()[0]), NamedSharding(grid(4, 2), P("x", "y"))]:
        column = Format(Layout((1, 0)), sharding)
        array = jax.device_put(value, column)
        double = jax.jit(lambda x: x * 2, in_shardings=column, out_shardings=column)
        result = double(array)
        assert layout_of(result) == (1, 0), result.format
        same(result, value * 2)
        same(double(result), value * 4)
        for shard in result.addressable_shards:
            same(shard.data, (value * 2)[shard.index])
        donating = jax.jit(lambda x: x + 1, in_shardings=column, out_shardings=column, donate_argnums=0)
        same(donating(result), value * 2 + 1)


@check
def layouts_left_to_the_compiler():
    value = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)
    auto = Format(Layout.AUTO)
    function = jax.jit(lambda x, y: x @ y.T, in_shardings=auto, out_shardings=auto)
    shape = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=SingleDeviceSharding(jax.devices()[0]))
    compiled = function.lower(shape, shape).compile()
    (first, second), _ = compiled.input_formats
    result = compiled(jax.device_put(value, first), jax.device_put(value, second))
    assert result.format == compiled.output_formats
    same(result, value @ value.T)


@check
def nothing_has_a_layout():
    column = Format(Layout((1, 0)), SingleDeviceSharding(jax.devices()[1]))
    for shape in [(0, 4), (4, 0), (0, 0)]:
        value = np.zeros(shape, np.float32)
        array = jax.device_put(value, column)
        same(array, value)
        same(jax.jit(lambda x: x + 1, in_shardings=column, out_shardings=column)(array), value)
        same(jax.device_put(np.asfortranarray(value), jax.devices()[1]), value)
    cube = Format(Layout((2, 1, 0)), SingleDeviceSharding(jax.devices()[1]))
    same(jax.device_put(np.zeros((2, 0, 3), np.int8), cube), np.zeros((2, 0, 3), np.int8))


@check
def a_layout_is_kept_in_other_memories():
    if jax.version.__version_info__ < (0, 9):
        raise Skip("JAX 0.8.3 takes a copy in unpinned_host for one with the layout of its source, natively too")
    value = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)
    sharding = NamedSharding(grid(4, 2), P("x", "y"))
    array = jax.device_put(value, Format(Layout((1, 0)), sharding))
    for kind in [memory.kind for memory in jax.devices()[0].addressable_memories()]:
        moved = jax.device_put(array, NamedSharding(grid(4, 2), P("x", "y"), memory_kind=kind))
        same(moved, value)
        same(jax.jit(lambda x: x + 1)(jax.device_put(moved, sharding)), value + 1)


@check
def narrow_types_with_layouts():
    def one(name):
        value = narrow(name, (6, 10))
        column = Format(Layout((1, 0)), SingleDeviceSharding(jax.devices()[1]))
        array = jax.device_put(value, column)
        same(array, value)
        same(jax.jit(lambda x: x.T)(array), value.T)

    each([name for name in NARROW if "4" in name or "2" in name], one)


@check
def host_strides():
    base = np.arange(4 * 6 * 5, dtype=np.float32).reshape(4, 6, 5)
    views = {
        "fortran": np.asfortranarray(base),
        "swapped": base.swapaxes(0, 1),
        "rolled": base.transpose(2, 0, 1),
        "stepped": base[::2, 1::3, ::4],
        "stepped and swapped": base[1::2, :, ::2].T,
        "one row": base[2:3],
        "one column": base[:, :, 3:4],
        "ones": base[2:3, 4:5, 1:2],
        "a new axis": base[:, None, ::2],
        "empty": base[:, 3:3],
        "empty fortran": np.asfortranarray(base[2:2]),
        "empty stepped": base[::2, ::-1][:, 9:],
        "diagonal": np.lib.stride_tricks.as_strided(base, (4,), (base.strides[0] + 4,)),
        "a field": np.zeros((3, 4), [("a", "f4"), ("b", "f8"), ("c", "f4")])["c"],
        "windows": np.lib.stride_tricks.sliding_window_view(np.arange(40.0, dtype=np.float32), 8)[::8],
        "real parts": (base + 1j * base).real,
    }
    mesh = grid(2, 1)
    wrong = []
    for name, view in views.items():
        try:
            same(jax.device_put(view, jax.devices()[2]), view)
            same(jax.jit(lambda x: x + 1)(view), view + 1)
            if view.ndim and view.shape[0] % 2 == 0:
                same(jax.device_put(view, NamedSharding(mesh, P("x"))), view)
        except Exception as error:  # pylint: disable=broad-exception-caught
            wrong.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
    assert not wrong, "\n".join(wrong)


if __name__ == "__main__":
    sys.exit(main())
