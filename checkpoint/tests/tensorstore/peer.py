"""The other side of the format tests: TensorStore and Orbax, as they are on PyPI.

    peer.py read FOLDER    reads what Waystation wrote and holds it against the raw elements beside it
    peer.py write FOLDER   writes what Waystation is to read, and the raw elements beside it

FOLDER/list.json says what Waystation wrote: [{"name", "dtype", "dims", "location", "zarr3", "ocdbt"}]; FOLDER/raw/NAME.bin are the elements of array
NAME, dense and row-major, one byte an element for types narrower than that. `write` makes the same files.
"""

import json
import os
import pathlib
import shutil
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


def open_zarr(path: pathlib.Path, zarr3: bool = False, **more):
    spec = {"driver": "zarr3" if zarr3 else "zarr", "kvstore": {"driver": "file", "path": str(path)}}
    spec["fill_missing_data_reads"] = False
    return ts.open(spec | more.pop("spec", {}), **more).result()


def read(folder: pathlib.Path) -> None:
    listed = json.loads((folder / "list.json").read_text())
    layouts = {}
    for item in listed:
        layouts.setdefault((item["location"], item["zarr3"], item["ocdbt"]), []).append(item)
    for (location, zarr3, ocdbt), items in layouts.items():
        if ocdbt and not (folder / location / "manifest.ocdbt").exists():
            read_orbax(folder, location, zarr3, ocdbt, items)
            merge(folder / location, zarr3)
        elif not location.startswith("merged"):
            read_orbax(folder, location, zarr3, ocdbt, items)
        context = ts.Context()
        for item in items:
            kvstore = {"driver": "ocdbt", "base": f"file://{folder / location}/", "path": f"{item['name']}/"}
            spec = {"kvstore": kvstore} if ocdbt else {}
            store = open_zarr(folder / location / item["name"], zarr3, open=True, spec=spec, context=context)
            assert store.dtype.numpy_dtype == np.dtype(DTYPES[item["dtype"]]), (item, store.dtype)
            assert list(store.shape) == item["dims"], (item, store.shape)
            found = raw(store.read().result(), item["dtype"])
            assert found == (folder / "raw" / f"{item['name']}.bin").read_bytes(), item
    print(f"read {len(listed)} arrays")


def merge(location: pathlib.Path, zarr3: bool) -> None:
    """As Orbax does when all processes have saved; with its checks."""
    import asyncio

    from etils import epath
    from orbax.checkpoint._src.serialization import ocdbt_utils, tensorstore_utils

    context = tensorstore_utils.get_ts_context(use_ocdbt=True)
    asyncio.run(ocdbt_utils.merge_ocdbt_per_process_files(epath.Path(location), context, zarr3))


def read_orbax(folder: pathlib.Path, location: str, zarr3: bool, ocdbt: bool, listed) -> None:
    """Waystation's arrays as the leaves of a checkpoint, as the Pathways handler leaves them: no `_sharding` beside."""
    import jax
    import orbax.checkpoint as ocp

    listed = [item for item in listed if item["name"].startswith("orbax.")]
    assert listed
    step = folder / f"step_{location}"
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
    tree = {item["name"]: np.zeros(item["dims"], DTYPES[item["dtype"]]) for item in listed}
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(step, {name: jax.numpy.asarray(value) for name, value in tree.items()})
        if ocdbt:
            for old in [*step.glob("ocdbt.process_*"), step / "d"]:
                shutil.rmtree(old)
            (step / "manifest.ocdbt").unlink()
            for child in (folder / location).glob("ocdbt.process_*"):
                shutil.copytree(child, step / child.name)
            merge(step, zarr3)
        for item in listed:
            name = item["name"]
            if not ocdbt:
                written = {file.relative_to(step / name) for file in (step / name).rglob("*") if file.is_file()}
                assert pathlib.Path("zarr.json" if zarr3 else ".zarray") in written, written
                shutil.rmtree(step / name)
                shutil.copytree(folder / location / name, step / name)
        mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
        spec = jax.sharding.PartitionSpec("y", "x")
        sharding = jax.sharding.NamedSharding(mesh, spec)
        args = {name: ocp.ArrayRestoreArgs(sharding=sharding, global_shape=value.shape) for name, value in tree.items()}
        restored = checkpointer.restore(step, item=tree, restore_args=args)
    for item in listed:
        found = restored[item["name"]]
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

    def store3(name, dtype, dims, chunks, codecs, **more):
        metadata = {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}}, "codecs": codecs}
        array = elements(rng, dtype, dims)
        target = open_zarr(
            folder / "arrays" / name,
            zarr3=True,
            spec={"metadata": metadata | more, "store_data_equal_to_fill_value": True},
            create=True,
            dtype=ts.dtype(DTYPES[dtype]),
            shape=dims,
        )
        target.write(array).result()
        keep(name, dtype, array)

    zstd = {"name": "zstd", "configuration": {"level": 3}}
    for dtype in DTYPES:
        endian = {} if np.dtype(DTYPES[dtype]).itemsize == 1 else {"configuration": {"endian": "little"}}
        plain = [{"name": "bytes"} | endian]
        store3(f"{dtype}.v3.raw", dtype, [5, 7], [2, 3], plain)
        store3(f"{dtype}.v3.zstd", dtype, [5, 7], [5, 7], [*plain, zstd])
        store3(f"{dtype}.v3.scalar", dtype, [], [], [*plain, zstd])
        # One chunk a shard as Orbax has it, and many; at the edge of the array some are absent.
        store3(f"{dtype}.v3.one", dtype, [5, 7], [3, 4], [sharding([3, 4], [*plain, zstd])])
        store3(f"{dtype}.v3.one_raw", dtype, [5, 7], [5, 7], [sharding([5, 7], plain)])
        store3(f"{dtype}.v3.many", dtype, [5, 7], [4, 6], [sharding([2, 2], [*plain, zstd])])
        store3(f"{dtype}.v3.many_raw", dtype, [5, 7], [4, 6], [sharding([1, 3], plain, index_location="start")])
    big = [{"name": "bytes", "configuration": {"endian": "big"}}]
    for dtype in ("F32", "C64", "U16"):
        store3(f"{dtype}.v3.big", dtype, [4, 3], [3, 2], big)
        store3(f"{dtype}.v3.big_sharded", dtype, [4, 3], [4, 4], [sharding([2, 2], [*big, zstd])])
    little = [{"name": "bytes", "configuration": {"endian": "little"}}]
    for number, keys in enumerate(
        [
            {"name": "default", "configuration": {"separator": "."}},
            {"name": "v2"},
            {"name": "v2", "configuration": {"separator": "/"}},
        ]
    ):
        store3(f"keys.v3.{number}", "S32", [4, 5], [3, 2], little, chunk_key_encoding=keys)
    store3("unchecked.v3", "S32", [4, 5], [4, 4], [sharding([2, 2], little, index_codecs=little)])
    store3("long.v3", "BF16", [300, 500], [150, 500], [sharding([10, 25], [*little, zstd])])
    store3("start.v3", "BF16", [300, 500], [300, 250], [sharding([25, 10], [*little, zstd], index_location="start")])
    store3("empty.v3", "F32", [0, 3], [1, 3], [sharding([1, 3], [*little, zstd])])
    named = {"attributes": {"a": [1]}, "dimension_names": ["x", None], "data_type": "float32", "fill_value": "NaN"}
    store3("named.v3", "F32", [2, 3], [1, 3], little, **named)

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
    for zarr3 in (False, True):
        for compressed in (False, True):
            write_orbax(folder, rng, keep, zarr3, compressed)
            write_orbax(folder, rng, keep, zarr3, compressed, ocdbt=True)
        write_children(folder, rng, keep, zarr3)
    (folder / "list.json").write_text(json.dumps(listed))
    print(f"wrote {len(listed)} arrays")


def sharding(inner, codecs, **more):
    index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    configuration = {"chunk_shape": inner, "codecs": codecs, "index_codecs": index} | more
    return {"name": "sharding_indexed", "configuration": configuration}


def write_children(folder: pathlib.Path, rng: np.random.Generator, keep, zarr3: bool) -> None:
    """Every type, in the databases of three processes that nobody merged; one of them with small nodes, one numbered."""
    location = f"children{2 + zarr3}"
    context = ts.Context()
    configs = [{}, {"max_decoded_node_bytes": 2000, "max_inline_value_bytes": 0}, {"manifest_kind": "numbered"}]
    for dtype in DTYPES:
        name, array = f"{location}.{dtype}", elements(rng, dtype, [9, 5])
        for process, config in enumerate(configs):
            base = f"file://{folder / location}/ocdbt.process_{process}/"
            kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/", "config": config}
            spec = {"driver": "zarr3" if zarr3 else "zarr", "kvstore": kvstore, "store_data_equal_to_fill_value": True}
            if not zarr3:
                spec["metadata"] = {"compressor": {"id": "zstd"}}
            options = {"create": True, "dtype": ts.dtype(DTYPES[dtype]), "shape": [9, 5], "context": context}
            options["chunk_layout"] = ts.ChunkLayout(chunk_shape=[3, 5])
            store = ts.open(spec, **options).result()
            store[3 * process : 3 * process + 3].write(array[3 * process : 3 * process + 3]).result()
        keep(name, dtype, array, location)


def write_orbax(folder, rng: np.random.Generator, keep, zarr3: bool, compressed: bool, ocdbt: bool = False) -> None:
    import jax
    import orbax.checkpoint as ocp

    location = f"orbax{2 + zarr3}{'' if compressed else '_raw'}{'_ocdbt' if ocdbt else ''}"
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
    tree = {}
    for dtype in ("F32", "BF16", "S32", "PRED", "F8E4M3FN"):
        for number, spec in enumerate([(), ("x", "y"), ("y",), (None, ("y", "x"))]):
            sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
            array = elements(rng, dtype, [8, 12])
            name = f"{location}.{dtype}.{number}"
            tree[name] = jax.device_put(array, sharding)
            keep(name, dtype, array, location)
    # Of the last of the specs, what a device holds is cut into several chunks.
    save_args = {name: ocp.SaveArgs(chunk_byte_size=8 if name.endswith(".3") else None) for name in tree}
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3, use_compression=compressed)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(folder / location, tree, save_args=save_args)


if __name__ == "__main__":
    {"read": read, "write": write}[sys.argv[1]](pathlib.Path(sys.argv[2]).resolve())
