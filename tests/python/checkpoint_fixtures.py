#!/usr/bin/env python3
"""Checkpoints that real Orbax writes, with what they hold: `checkpoint_fixtures.py FOLDER` makes them all in a new folder.

`FOLDER/expected.json` is `{checkpoint: {array name: {"shape", "dtype", "hex"}}}`: the checkpoint by its path under FOLDER, the
array by the name it has on disk, its elements in C order as little-endian hex (one byte an element below eight bits). A typed
PRNG key is there as its key data, with "prng" naming the implementation. Python scalars are arrays on disk; strings are not.

  zarr2 zarr2_ocdbt zarr3 zarr3_ocdbt   every dtype that TensorStore stores, shardings of all kinds, odd names, leaves of all
                                        kinds
  chunked/LAYOUT                        chunks smaller than the shards, by bytes and by axes
  raw/LAYOUT                            no compression
  two_processes/{zarr2,zarr2_ocdbt}     written by two processes of JAX; the databases of both are merged
  manager                               two steps of a CheckpointManager: composite items, StandardSave, JSON, metrics
  v1                                    Orbax's newer API with its defaults
"""

import json
import os
import pathlib
import socket
import subprocess
import sys

LAYOUTS = {
    "zarr2": {"use_ocdbt": False, "use_zarr3": False},
    "zarr2_ocdbt": {"use_ocdbt": True, "use_zarr3": False},
    "zarr3": {"use_ocdbt": False, "use_zarr3": True},
    "zarr3_ocdbt": {"use_ocdbt": True, "use_zarr3": True},
}

# Where dtypes are tried, in the order of XLA's list; what TensorStore does not know is left out.
DTYPES = (
    "bool", "int2", "int4", "int8", "int16", "int32", "int64", "uint2", "uint4", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "bfloat16", "complex64", "complex128", "float4_e2m1fn", "float8_e3m4", "float8_e4m3",
    "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip


def generate(folder):
    """Makes the fixtures in processes of their own, since JAX's devices are set once a process; gives what is expected."""
    folder = pathlib.Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = [run(folder, "single"), run(folder, "pair", port, "0"), run(folder, "pair", port, "1")]
    try:
        for process in started:
            output, _ = process.communicate(timeout=600)
            if process.returncode != 0:
                raise RuntimeError(f"{process.args} ended with {process.returncode}:\n{output[-4000:]}")
    finally:
        for process in started:
            process.kill()
            process.wait()
    expected = {}
    for file in sorted(folder.glob("expected-*.json")):
        expected |= json.loads(file.read_text())
        file.unlink()
    (folder / "expected.json").write_text(json.dumps(expected, indent=0, sort_keys=True))
    return expected


def run(folder, *role):
    dropped = ("JAX_", "XLA_", "IFRT_PROXY", "ENABLE_PATHWAYS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1", "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-W", "ignore", __file__, str(folder), *role]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def data_of(leaf):
    """(array with the bytes on disk, PRNG implementation or None)."""
    import jax
    import numpy as np

    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(leaf)), str(jax.random.key_impl(leaf))
    return np.asarray(leaf), None


def name_of(path):
    return ".".join(str(getattr(key, "key", getattr(key, "idx", None))) for key in path)


def described(tree):
    """What is expected of a tree's arrays."""
    import jax

    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, str):
            continue
        array, prng = data_of(leaf)
        found[name_of(path)] = {"shape": list(array.shape), "dtype": array.dtype.name, "hex": array.tobytes().hex()}
        if prng:
            found[name_of(path)]["prng"] = prng
    return found


def storable():
    import tensorstore

    def known(name):
        try:
            return tensorstore.dtype(name)
        except ValueError:
            return None

    return [name for name in DTYPES if known(name)]


def values(dtype, count=8):
    """Small values of a dtype, none of them the same where it has that many."""
    import ml_dtypes  # noqa: F401 (numpy knows its names by it)
    import numpy as np

    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    numbers = np.arange(count)
    if dtype == np.bool_:
        return numbers % 3 == 0
    if dtype.kind == "c":
        return (numbers - 2j * numbers[::-1]).astype(dtype)
    if dtype.name == "int2":
        return (numbers % 4 - 2).astype(dtype)
    unsigned = dtype.kind == "u" or dtype.name == "float8_e8m0fnu"
    return (numbers - (0 if unsigned else count // 2)).astype(np.float32).astype(dtype)


def main_tree():
    """Leaves of all kinds, for four or eight devices."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

    devices = np.array(jax.devices())
    line, square = Mesh(devices, ("x",)), Mesh(devices.reshape(-1, 2), ("a", "b"))
    random = np.random.default_rng(7)

    def on(mesh, array, *spec):
        return jax.device_put(array, NamedSharding(mesh, P(*spec)))

    def normal(*shape):
        return random.standard_normal(shape).astype(np.float32)

    return {
        "dtypes": {name: jax.device_put(values(name), devices[0]) for name in storable()},
        "by": {
            "rows": on(line, normal(16, 6), "x"),
            "columns": on(line, normal(6, 16), None, "x"),
            "both": on(square, normal(12, 8).astype(jnp.bfloat16), "a", "b"),
            "turned": on(square, normal(12, 8), "b", "a"),
            "two_axes": on(square, normal(24, 2), ("a", "b")),
            "half": on(square, np.arange(24, dtype=np.int32).reshape(8, 3), "a"),
            "none": on(line, normal(4, 3)),
            "none_odd": on(line, normal(5, 3)),
            "cube": on(square, normal(4, 2, 6), "a", None, "b"),
        },
        # Over what OCDBT keeps within its tree, and not to be compressed.
        "large": on(line, random.integers(0, 2**32, (8, 700), dtype=np.uint32), "x"),
        "zeros": on(line, np.zeros((8, 4), np.float32), "x"),
        "scalars": {"f32": jnp.float32(2.5), "i32": jnp.int32(-7), "bf16": jnp.bfloat16(1.5)},
        "keys": {
            "one": jax.random.key(42),
            "eight": on(line, jax.random.split(jax.random.key(7), 8), "x"),
            "rbg": jax.random.key(3, impl="rbg"),
        },
        "layers": [{"w": on(line, normal(8, 2), "x"), "b": jnp.asarray(normal(3))} for _ in range(3)],
        "odd/na me": {"a.b": jnp.float32([7]), "c%2Fé": jnp.float32([8])},
        "tuple": (jnp.int32([9]), jnp.int32([10])),
        "none": None,
        "empty": {"dict": {}, "list": []},
        "python": {"int": 5, "float": 0.25, "str": "hello"},
        "numpy": {"array": np.arange(3, dtype=np.int16), "scalar": np.float32(1.25)},
    }


def single(folder):
    """All that one process writes."""
    import jax

    jax.config.update("jax_num_cpu_devices", 4)
    import numpy as np
    import orbax.checkpoint as ocp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
    numbers = jax.device_put(np.arange(16 * 12, dtype=np.float32).reshape(16, 12), sharding)
    expected = {}

    def save(name, tree, save_args=None, **options):
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)).save(
            folder / name, args=ocp.args.PyTreeSave(tree, save_args=save_args)
        )
        expected[name] = described(tree)

    tree = main_tree()
    for layout, options in LAYOUTS.items():
        save(layout, tree, **options)
        save(
            f"chunked/{layout}",
            {"by_bytes": numbers, "by_axes": numbers},
            {"by_bytes": ocp.SaveArgs(chunk_byte_size=48), "by_axes": ocp.SaveArgs(shard_axes=(1,))},
            **options,
        )
        save(f"raw/{layout}", {"w": numbers}, use_compression=False, **options)

    options = ocp.CheckpointManagerOptions(
        enable_async_checkpointing=False, best_fn=lambda metrics: metrics["loss"], best_mode="min"
    )
    with ocp.CheckpointManager(folder / "manager", options=options) as manager:
        for step in (0, 10):
            state = {"w": numbers + step, "step": jax.numpy.int32(step)}
            note = ocp.args.JsonSave({"step": step})
            args = ocp.args.Composite(state=ocp.args.StandardSave(state), note=note)
            manager.save(step, args=args, metrics={"loss": 1 / (step + 1)})
            expected[f"manager/{step}/state"] = described(state)

    import orbax.checkpoint.experimental.v1 as v1

    tree = {"w": numbers, "n": [jax.numpy.int32(3)], "key": jax.random.key(1)}
    v1.save(folder / "v1", tree)
    expected["v1/state"] = described(tree)
    return expected


def pair(folder, port, process):
    """What two processes write together."""
    import jax

    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(process))
    import numpy as np
    import orbax.checkpoint as ocp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

    mesh = Mesh(np.array(jax.devices()), ("x",))
    random = np.random.default_rng(5)
    tree = {
        "w": (np.arange(64, dtype=np.float32).reshape(8, 8), P("x")),
        "replicated": (np.arange(12, dtype=np.float32).reshape(4, 3), P()),
        "large": (random.integers(0, 2**32, (4, 700), dtype=np.uint32), P("x")),
    }
    placed = {
        name: jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index, array=array: array[index])
        for name, (array, spec) in tree.items()
    }
    expected = {}
    for layout in ("zarr2", "zarr2_ocdbt"):
        name = f"two_processes/{layout}"
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**LAYOUTS[layout])).save(folder / name, placed)
        expected[name] = described({name: array for name, (array, _) in tree.items()})
    return expected if process == "0" else {}


def main():
    folder, *role = sys.argv[1:]
    if not role:
        return generate(folder)
    found = {"single": single, "pair": pair}[role[0]](pathlib.Path(folder), *role[1:])
    pathlib.Path(folder, f"expected-{'-'.join(role[:1] + role[2:])}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
