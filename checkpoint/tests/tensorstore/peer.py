"""The other side of the format tests: TensorStore and Orbax, as they are on PyPI.

    peer.py read FOLDER    reads what Waystation wrote and holds it against the raw elements beside it
    peer.py write FOLDER   writes what Waystation is to read, and the raw elements beside it

FOLDER/list.json says what Waystation wrote: [{"name", "dtype", "dims"}]; FOLDER/raw/NAME.bin are the elements of array
NAME, dense and row-major, one byte an element for types narrower than that. `write` makes the same files.
"""

import json
import os
import pathlib
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_ENABLE_X64"] = "1"

import ml_dtypes
import numpy as np
import tensorstore as ts

# XLA's name of a type -> NumPy's. What Waystation says it can store must be here.
DTYPES = {
    "PRED": np.bool_,
    "S2": ml_dtypes.int2,
    "S4": ml_dtypes.int4,
    "S8": np.int8,
    "S16": np.int16,
    "S32": np.int32,
    "S64": np.int64,
    "U8": np.uint8,
    "U16": np.uint16,
    "U32": np.uint32,
    "U64": np.uint64,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "BF16": ml_dtypes.bfloat16,
    "F4E2M1FN": ml_dtypes.float4_e2m1fn,
    "F8E3M4": ml_dtypes.float8_e3m4,
    "F8E4M3FN": ml_dtypes.float8_e4m3fn,
    "F8E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8E4M3B11FNUZ": ml_dtypes.float8_e4m3b11fnuz,
    "F8E5M2": ml_dtypes.float8_e5m2,
    "F8E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "F8E8M0FNU": ml_dtypes.float8_e8m0fnu,
    "C64": np.complex64,
    "C128": np.complex128,
}
MASKS = {"S2": 0x03, "S4": 0x0F, "F4E2M1FN": 0x0F}


def raw(array: np.ndarray, dtype: str) -> bytes:
    """The elements as the raw files hold them: the bits of narrow types without what NumPy keeps beside them."""
    data = np.ascontiguousarray(array).tobytes()
    if dtype in MASKS:
        data = (np.frombuffer(data, np.uint8) & MASKS[dtype]).tobytes()
    return data


def elements(rng: np.random.Generator, dtype: str, dims) -> np.ndarray:
    """Any bits that are an element of the type."""
    if dtype == "PRED":
        return rng.integers(0, 2, dims).astype(np.bool_)
    numpy = np.dtype(DTYPES[dtype])
    data = rng.integers(0, 256, (*dims, numpy.itemsize), dtype=np.uint8)
    if dtype in ("S2", "S4"):
        # NumPy's integers narrower than a byte keep it sign-extended.
        low, high = {"S2": (-2, 2), "S4": (-8, 8)}[dtype]
        return rng.integers(low, high, dims).astype(np.int8).astype(numpy)
    if dtype in MASKS:
        data &= MASKS[dtype]
    return data.view(numpy).reshape(dims)


def open_zarr(path: pathlib.Path, **more):
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(path)}, "fill_missing_data_reads": False}
    return ts.open(spec | more.pop("spec", {}), **more).result()


def read(folder: pathlib.Path) -> None:
    listed = json.loads((folder / "list.json").read_text())
    for item in listed:
        store = open_zarr(folder / "arrays" / item["name"], open=True)
        assert store.dtype.numpy_dtype == np.dtype(DTYPES[item["dtype"]]), (item, store.dtype)
        assert list(store.shape) == item["dims"], (item, store.shape)
        found = raw(store.read().result(), item["dtype"])
        assert found == (folder / "raw" / f"{item['name']}.bin").read_bytes(), item
    read_orbax(folder, [item for item in listed if item["name"].startswith("orbax.")])
    print(f"read {len(listed)} arrays")


def read_orbax(folder: pathlib.Path, listed) -> None:
    """Waystation's arrays as the leaves of a checkpoint, as the Pathways handler leaves them: no `_sharding` beside."""
    import jax
    import orbax.checkpoint as ocp

    step = folder / "orbax_step"
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=False)
    tree = {item["name"].removeprefix("orbax."): np.zeros(item["dims"], DTYPES[item["dtype"]]) for item in listed}
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(step, {name: jax.numpy.asarray(value) for name, value in tree.items()})
        for item in listed:
            name = item["name"].removeprefix("orbax.")
            assert (step / name / ".zarray").is_file()
            for file in (step / name).iterdir():
                file.unlink()
            for file in (folder / "arrays" / item["name"]).iterdir():
                (step / name / file.name).write_bytes(file.read_bytes())
        mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
        spec = jax.sharding.PartitionSpec("y", "x")
        sharding = jax.sharding.NamedSharding(mesh, spec)
        args = {name: ocp.ArrayRestoreArgs(sharding=sharding, global_shape=value.shape) for name, value in tree.items()}
        restored = checkpointer.restore(step, item=tree, restore_args=args)
    for item in listed:
        found = restored[item["name"].removeprefix("orbax.")]
        assert found.sharding == sharding
        assert raw(np.asarray(found), item["dtype"]) == (folder / "raw" / f"{item['name']}.bin").read_bytes(), item


def write(folder: pathlib.Path) -> None:
    rng = np.random.default_rng(7)
    (folder / "raw").mkdir()
    listed = []

    def keep(name, dtype, array, location="arrays"):
        (folder / "raw" / f"{name}.bin").write_bytes(raw(array, dtype))
        listed.append({"name": name, "dtype": dtype, "dims": list(array.shape), "location": location})

    def store(name, dtype, dims, metadata):
        array = elements(rng, dtype, dims)
        target = open_zarr(
            folder / "arrays" / name,
            spec={"metadata": metadata, "store_data_equal_to_fill_value": True},
            create=True,
            dtype=ts.dtype(DTYPES[dtype]) if not metadata.get("dtype") else None,
            shape=dims,
        )
        target.write(array).result()
        keep(name, dtype, array)

    for dtype in DTYPES:
        store(f"{dtype}.raw", dtype, [5, 7], {"chunks": [2, 3], "compressor": None})
        store(f"{dtype}.zstd", dtype, [5, 7], {"chunks": [5, 7], "compressor": {"id": "zstd", "level": 3}})
        store(f"{dtype}.scalar", dtype, [], {"chunks": [], "compressor": {"id": "zstd"}})
    for dtype, name in (("F32", ">f4"), ("C64", ">c8"), ("U16", ">u2")):
        store(f"{dtype}.big", dtype, [4, 3], {"chunks": [3, 2], "compressor": None, "dtype": name})
    store("column", "S32", [4, 5, 3], {"chunks": [3, 2, 2], "compressor": None, "order": "F"})
    store("slash", "S32", [4, 5], {"chunks": [3, 2], "compressor": None, "dimension_separator": "/"})
    store("large_chunk", "BF16", [3, 2], {"chunks": [8, 9], "compressor": {"id": "zstd"}})
    store("empty", "F32", [0, 3], {"chunks": [1, 3], "compressor": {"id": "zstd"}})
    write_orbax(folder, rng, keep)
    (folder / "list.json").write_text(json.dumps(listed))
    print(f"wrote {len(listed)} arrays")


def write_orbax(folder: pathlib.Path, rng: np.random.Generator, keep) -> None:
    import jax
    import orbax.checkpoint as ocp

    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
    tree = {}
    for dtype in ("F32", "BF16", "S32", "PRED", "F8E4M3FN"):
        for number, spec in enumerate([(), ("x", "y"), ("y",), (None, ("y", "x"))]):
            sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
            array = elements(rng, dtype, [8, 12])
            name = f"orbax.{dtype}.{number}"
            tree[name] = jax.device_put(array, sharding)
            keep(name, dtype, array, "orbax")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=False)) as checkpointer:
        checkpointer.save(folder / "orbax", tree)


if __name__ == "__main__":
    {"read": read, "write": write}[sys.argv[1]](pathlib.Path(sys.argv[2]).resolve())
