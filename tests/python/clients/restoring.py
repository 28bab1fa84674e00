"""Restores the checkpoints that real Orbax wrote (checkpoint_fixtures.py) through the workers: one check for each of them.

The folder comes in CHECKPOINTS. Natively it shows that the checks themselves are right.
"""

import itertools
import json
import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pathwaysutils
from etils import epath
from harness import NATIVE, check, main, raises, status
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

pathwaysutils.initialize()
sys.path.append(str(pathlib.Path(__file__).parents[1]))
from checkpoint_fixtures import data_of, name_of  # noqa: E402

CHECKPOINTS = epath.Path(os.environ["CHECKPOINTS"])
EXPECTED = json.loads((CHECKPOINTS / "expected.json").read_text())
# What the client's request to read can name.
NAMED = {"bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
DEVICES = np.array(jax.devices())
MESHES = [
    Mesh(DEVICES.reshape(-1, 2), ("x", "y")),
    Mesh(DEVICES.reshape(2, -1), ("x", "y")),
    # Another order.
    Mesh(DEVICES[::-1].reshape(2, -1).T, ("x", "y")),
    # Half of them, here and there.
    Mesh(DEVICES[-2::-2].reshape(-1, 2), ("x", "y")),
]
TURNS = 5
MEGABYTE = 1 << 20
# Of the client's bytes, by direction.
COUNTERS = ("stored_bytes", "fetched_bytes")


def shardings(shape, typed_key):
    """Every NamedSharding that cuts an array of this shape evenly, of those that a test may be interested in."""
    dims = len(shape) - 1 if typed_key else len(shape)
    for mesh in MESHES:
        size = {None: 1, "x": mesh.shape["x"], "y": mesh.shape["y"], ("x", "y"): mesh.size, ("y", "x"): mesh.size}
        for axes in itertools.product(size, repeat=dims):
            flat = [axis for entry in axes if entry for axis in ([entry] if isinstance(entry, str) else entry)]
            if len(flat) == len(set(flat)) and all(n % size[axis] == 0 for n, axis in zip(shape, axes)):
                yield NamedSharding(mesh, P(*axes))


def is_array(leaf):
    return type(leaf).__name__ == "ArrayMetadata"


def restore(folder, wanted, turn):
    """(arrays by name, bytes that the client moved): arrays are those for which `wanted` holds, and other leaves none."""
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    about = checkpointer.metadata(folder).item_metadata.tree
    expected = EXPECTED[str(folder.relative_to(CHECKPOINTS))]
    keys = {name for name, about in expected.items() if "prng" in about}

    def arguments(path, leaf):
        if not (is_array(leaf) and wanted(leaf)):
            return ocp.RestoreArgs()
        possible = list(shardings(leaf.shape, name_of(path) in keys))
        # A typed key's sharding is asked for with the trailing dimension of its data.
        sharding = possible[(turn * len(possible) // TURNS + len(name_of(path))) % len(possible)]
        return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=leaf.shape, dtype=leaf.dtype)

    # Three dots stand for what is not to be restored.
    item = jax.tree.map(lambda leaf: leaf if is_array(leaf) and wanted(leaf) else ..., about)
    restore_args = jax.tree_util.tree_map_with_path(arguments, about)
    before = None if NATIVE else status()
    restored = checkpointer.restore(folder, args=ocp.args.PyTreeRestore(item=item, restore_args=restore_args))
    found = {name_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(restored) if leaf is not ...}
    jax.block_until_ready(found)
    after = None if NATIVE else status()
    moved = {} if NATIVE else {counter: after[counter] - before[counter] for counter in COUNTERS}
    for path, asked in jax.tree_util.tree_leaves_with_path(restore_args):
        if isinstance(asked, ocp.ArrayRestoreArgs) and name_of(path) not in keys:
            array = found[name_of(path)]
            assert array.sharding.is_equivalent_to(asked.sharding, array.ndim), (name_of(path), array.sharding, asked)
    return found, moved


def make(checkpoint):
    expected = EXPECTED[checkpoint]
    folder = CHECKPOINTS / checkpoint

    def named_dtypes_are_equal():
        for turn in range(TURNS):
            found, moved = restore(folder, lambda leaf: leaf.dtype.name in NAMED, turn)
            for name, array in found.items():
                data, prng = data_of(array)
                about = expected[name]
                assert (list(data.shape), data.dtype.name) == (about["shape"], about["dtype"]), (name, data.shape, data.dtype)
                assert data.tobytes().hex() == about["hex"], name
                assert prng == about.get("prng"), (name, prng)
            # JAX itself puts nothing there for a restore, nor fetches.
            assert all(bytes < MEGABYTE for bytes in moved.values()), moved
        return set(found)

    def the_client_refuses_the_rest(found):
        about = ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).metadata(folder).item_metadata.tree
        others = {name_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(about) if is_array(leaf)}
        for name in others.keys() - found:
            dtype = others[name].dtype.name
            assert dtype not in NAMED, name
            one = lambda: restore_one(folder, name)
            if NATIVE:
                one()
            else:
                raises(ValueError, one, f"Unsupported dtype: {dtype}")

    def function():
        the_client_refuses_the_rest(named_dtypes_are_equal())

    function.__name__ = checkpoint
    check(function)


def restore_one(folder, name):
    handler = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    about = handler.metadata(folder).item_metadata.tree
    mine = lambda path, leaf: is_array(leaf) and name_of(path) == name
    sharding = NamedSharding(MESHES[0], P())
    handler.restore(
        folder,
        args=ocp.args.PyTreeRestore(
            item=jax.tree_util.tree_map_with_path(lambda path, leaf: leaf if mine(path, leaf) else ..., about),
            restore_args=jax.tree_util.tree_map_with_path(
                lambda path, leaf: ocp.ArrayRestoreArgs(sharding=sharding, global_shape=leaf.shape, dtype=leaf.dtype)
                if mine(path, leaf)
                else ocp.RestoreArgs(),
                about,
            ),
        ),
    )


for one in sorted(EXPECTED):
    make(one)

if __name__ == "__main__":
    sys.exit(main())
