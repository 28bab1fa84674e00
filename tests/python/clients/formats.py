"""What workers write in each `--checkpoint_format`, as TensorStore reads it: requests as clients of Orbax send them, in bulk and
one an array; scalars, arrays without elements, every dtype. FORMAT names the workers' format, WORKERS their number.
"""

import asyncio
import datetime
import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import tensorstore as ts
from etils import epath
from harness import check, main, raises, server_only
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from orbax.checkpoint._src.serialization import ocdbt_utils, tensorstore_utils
from pathwaysutils import plugin_executable
from pathwaysutils.persistence import helper

SCRATCH = pathlib.Path(os.environ["SCRATCH"])
FORMAT = os.environ["FORMAT"]
ZARR3 = FORMAT in ("zarr3", "ocdbt_zarr3")
OCDBT = FORMAT.startswith("ocdbt")
TIMEOUT = datetime.timedelta(seconds=60)
# Not in NumPy's own list, and not what JAX calls them.
STORED = [
    np.bool_, ml_dtypes.int2, ml_dtypes.int4, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64,
    np.float16, np.float32, np.float64, ml_dtypes.bfloat16, np.complex64, np.complex128, ml_dtypes.float4_e2m1fn,
    ml_dtypes.float8_e3m4, ml_dtypes.float8_e4m3b11fnuz, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz,
    ml_dtypes.float8_e5m2, ml_dtypes.float8_e5m2fnuz, ml_dtypes.float8_e8m0fnu,
]  # fmt: skip
ASKED_FOR = ("bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def mesh(rows, columns, devices=None):
    devices = jax.devices() if devices is None else devices
    return Mesh(np.array(devices[: rows * columns]).reshape(rows, columns), ("x", "y"))


def arrays():
    """Names, what they hold, and how it lies."""
    random = np.random.default_rng(11)
    return {
        "params.layers_0.kernel": (random.normal(size=(64, 48)).astype(np.float32), P("x", "y")),
        "params.layers_1.kernel": (random.normal(size=(32, 16)).astype(jnp.bfloat16), P("y")),
        "params.replicated": (random.normal(size=(8, 8)).astype(np.float32), P()),
        "odd/na me": (random.integers(-9, 9, (16,)).astype(np.int32), P(("x", "y"))),
        "step": (np.int32(17), P()),
        "empty": (np.zeros((0, 4), np.float32), P()),
    }


def put(where):
    return {name: jax.device_put(data, NamedSharding(where, spec)) for name, (data, spec) in arrays().items()}


def write_each(location, values):
    """As pathwaysutils up to 0.1.11: one program an array, all at once."""
    futures = []
    for name, value in values.items():
        program = plugin_executable.PluginExecutable(helper.get_write_request(str(location), name, value, TIMEOUT))
        futures.append(program.call([value])[1])
    for future in futures:
        future.result()


def write(location, values):
    helper.write_arrays(str(location), list(values), list(values.values()), TIMEOUT).result()


def read(location, like, shardings):
    names = list(like)
    dtypes, shapes = [like[name].dtype for name in names], [like[name].shape for name in names]
    devices = shardings[0]._device_assignment
    values, future = helper.read_arrays(str(location), names, dtypes, shapes, shardings, devices, TIMEOUT)
    future.result()
    return dict(zip(names, values, strict=True))


def merge(location):
    """As Orbax does when it finishes a save; with its checks."""
    context = tensorstore_utils.get_ts_context(use_ocdbt=True)
    asyncio.run(ocdbt_utils.merge_ocdbt_per_process_files(epath.Path(location), context, ZARR3))


def by_tensorstore(location, name):
    base = f"file://{location}/"
    kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"} if OCDBT else f"{base}{name}/"
    spec = {"driver": "zarr3" if ZARR3 else "zarr", "kvstore": kvstore, "fill_missing_data_reads": False}
    return ts.open(spec, open=True).result().read().result()


def same(found, expected, name):
    found, expected = np.asarray(found), np.asarray(expected)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), (name, found.dtype, found.shape)
    assert found.tobytes() == expected.tobytes(), name


def through(writes, folder):
    expected = {name: data for name, (data, _) in arrays().items()}
    location = SCRATCH / folder
    writes(location, put(mesh(4, 2)))
    other = mesh(2, 4, jax.devices()[::-1])
    specs = [P("y", "x"), P("x"), P("y"), P(), P(), P()]
    shardings = [NamedSharding(other, spec) for spec in specs]
    for merged in (False, True) if OCDBT else (False,):
        if merged:
            merge(location)
        for name, value in read(location, expected, shardings).items():
            same(value, expected[name], name)
    for name, data in expected.items():
        same(by_tensorstore(location, name), data, name)
    return location


@check
@server_only
def a_bulk_request_is_written_and_read():
    location = through(write, "bulk")
    names = {path.name for path in location.glob("ocdbt.process_*")}
    workers = {f"ocdbt.process_w{number}" for number in range(int(os.environ["WORKERS"]))}
    assert names == (workers if OCDBT else set()), names
    leaves = {path.name for path in location.iterdir()}
    expected = {"manifest.ocdbt", "d", *names} if OCDBT else {name.split("/")[0] for name in arrays()}
    assert leaves == expected, leaves


@check
@server_only
def a_request_for_each_array_is_written_and_read():
    location = through(write_each, "each")
    # Each request has made a database of its own.
    children = len(list(location.glob("ocdbt.process_w0*")))
    assert children == (len(arrays()) if OCDBT else 0), children


@check
@server_only
def every_type_that_tensorstore_knows_is_stored():
    random = np.random.default_rng(3)
    values, expected = {}, {}
    for dtype in STORED:
        dtype = np.dtype(dtype)
        data = random.integers(0, 2, (8, 6)).astype(dtype)
        expected[dtype.name] = data
        values[dtype.name] = jax.device_put(data, NamedSharding(mesh(4, 2), P("x", "y")))
        assert values[dtype.name].dtype == dtype
    location = SCRATCH / "types"
    write(location, values)
    if OCDBT:
        merge(location)
    for name, data in expected.items():
        same(by_tensorstore(location, name), data, name)
    asked_for = {name: data for name, data in expected.items() if name in ASKED_FOR}
    assert len(asked_for) == len(ASKED_FOR)
    found = read(location, asked_for, [NamedSharding(mesh(2, 2), P("y", "x"))] * len(asked_for))
    for name, value in found.items():
        same(value, asked_for[name], name)
    # What the client itself has no name for in a read request.
    for name in expected.keys() - asked_for.keys():
        raises(Exception, lambda: helper.dtype_to_xla_primitive_type_str(expected[name].dtype), "nsupported dtype")


@check
@server_only
def other_types_are_refused_before_anything_is_written():
    location = SCRATCH / "refused"
    location.mkdir()
    for dtype, name in [(ml_dtypes.uint4, "U4"), (ml_dtypes.uint2, "U2"), (ml_dtypes.float8_e4m3, "F8E4M3")]:
        sharding = NamedSharding(mesh(4, 2), P("x"))
        values = {
            "good": jax.device_put(np.ones((8, 8), np.float32), sharding),
            "bad.one": jax.device_put(np.ones((8, 8), dtype), sharding),
        }
        raises(Exception, lambda: write(location, values), "INVALID_ARGUMENT", '"bad.one"', f" {name} ", "TensorStore")
        assert list(location.iterdir()) == []


if __name__ == "__main__":
    sys.exit(main())
