"""Saves and restores, as a leg of a client; see parts.py."""

import os
import pathlib
import shutil
import zlib

import numpy as np

from parts import now

# The devices whose arrays are saved.
DEVICES = 4
COLUMNS = 1024


def handler(ocdbt, compressed=True):
    import orbax.checkpoint as ocp

    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=False, use_compression=compressed))


def checkpoint(folder, size_bytes):
    """Standard-normal values, half of the bytes as f32 and half as bf16, in eight arrays that are cut over four devices. A leg
    saves them by Orbax as it comes, or restores what one has saved, and waits for the end."""
    import jax
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:DEVICES]), ("x",))
    cuts = {
        "rows": jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")),
        "columns": jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x")),
    }
    tree, sums = {}, {}
    for number, dtype in enumerate([np.float32, jnp.bfloat16] * 4):
        rows = size_bytes // 8 // (COLUMNS * np.dtype(dtype).itemsize)
        host = np.random.default_rng(number).standard_normal((rows, COLUMNS), np.float32).astype(dtype)
        tree[f"a{number}"] = jax.device_put(host, cuts["rows"])
        sums[f"a{number}"] = zlib.crc32(host.view(np.uint8))
    del host
    jax.block_until_ready(tree)
    size = sum(array.nbytes for array in tree.values())

    def leg(action, name, ocdbt=False, compressed=True, cut="rows", check=False):
        checkpointer, path = handler(ocdbt, compressed), pathlib.Path(folder, name)
        if action == "remove":
            shutil.rmtree(path)
            # What is still to be written is written now, and not in the next leg.
            os.sync()
            return {}
        start = now()
        if action == "save":
            checkpointer.save(path, args=ocp.args.PyTreeSave(tree))
            return {"bytes_per_second": size / (now() - start), "megabytes": size / 1e6}
        arguments = {
            key: ocp.ArrayRestoreArgs(sharding=cuts[cut], global_shape=array.shape, dtype=array.dtype)
            for key, array in tree.items()
        }
        restored = checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=arguments))
        jax.block_until_ready(restored)
        seconds = now() - start
        if check:
            found = {key: zlib.crc32(np.asarray(restored[key]).view(np.uint8)) for key in tree}
            assert found == sums, "what was restored differs from what was saved"
        return {"bytes_per_second": size / seconds, "megabytes": size / 1e6}

    return leg


def objects(folder, count):
    """Many small arrays, on one device; a leg saves them to a bucket under a name, or restores them."""
    import jax
    import orbax.checkpoint as ocp

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    random = np.random.default_rng(0)
    tree = {f"a{n}": jax.device_put(random.standard_normal(1024, np.float32), sharding) for n in range(count)}
    jax.block_until_ready(tree)
    one = ocp.ArrayRestoreArgs(sharding=sharding, global_shape=(1024,), dtype=np.float32)

    def leg(action, name, ocdbt=False):
        checkpointer, path = handler(ocdbt), f"{folder}/{name}"
        start = now()
        if action == "save":
            checkpointer.save(path, args=ocp.args.PyTreeSave(tree))
            return {"arrays_per_second": count / (now() - start)}
        restored = checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=jax.tree.map(lambda _: one, tree)))
        jax.block_until_ready(restored)
        seconds = now() - start
        for key in ("a0", f"a{count - 1}"):
            assert np.array_equal(restored[key], tree[key]), "what was restored differs from what was saved"
        return {"arrays_per_second": count / seconds}

    return leg
