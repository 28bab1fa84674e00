"""Restores by plain Orbax on plain JAX what saving.py saved, under SCRATCH: one check for each way. Knows nothing of Waystation.

Natively alone, and never with pathwaysutils.
"""

import json
import os
import pathlib
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from harness import check, main
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from checkpoint_fixtures import data_of, name_of  # noqa: E402

SCRATCH = epath.Path(os.environ["SCRATCH"])
EXPECTED = json.loads((SCRATCH / "expected.json").read_text())


def compare(tree, expected):
    found = {name_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    texts = {name: leaf for name, leaf in found.items() if isinstance(leaf, str)}
    assert texts in ({}, {"python.str": "hello"}), texts
    assert found.keys() - texts.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, about in expected.items():
        data, prng = data_of(found[name])
        assert list(data.shape) == about["shape"], (name, data.shape, about)
        assert prng == about.get("prng"), (name, prng)
        # Python's and NumPy's scalars come back as Python's.
        if not isinstance(found[name], (int, float)):
            assert data.dtype.name == about["dtype"], (name, data.dtype, about)
        assert data.astype(about["dtype"]).tobytes().hex() == about["hex"], name


def as_jax_arrays(about):
    """The target of a restore, from what Orbax itself says the checkpoint holds; cut over the devices where it can be."""
    mesh = Mesh(np.array(jax.devices()), ("x",))

    def target(leaf):
        if type(leaf).__name__ == "ScalarMetadata":
            return np.zeros((), leaf.dtype).item()
        if type(leaf).__name__ != "ArrayMetadata":
            return leaf
        # Not a last dimension: that of a typed key, which looks like any other array here, cannot be cut.
        even = len(leaf.shape) > 1 and leaf.shape[0] % mesh.size == 0
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, P("x") if even else P()))

    return jax.tree.map(target, about)


def as_numpy(folder):
    """Read as NumPy arrays, that is, without any word of devices."""
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    about = checkpointer.metadata(folder).item_metadata.tree
    arrays = lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray if type(leaf).__name__ == "ArrayMetadata" else None)
    return checkpointer.restore(folder, args=ocp.args.PyTreeRestore(restore_args=jax.tree.map(arrays, about)))


def pytree(folder):
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    target = as_jax_arrays(checkpointer.metadata(folder).item_metadata.tree)
    arguments = ocp.checkpoint_utils.construct_restore_args(target)
    return checkpointer.restore(folder, args=ocp.args.PyTreeRestore(item=target, restore_args=arguments))


def standard(folder):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder, as_jax_arrays(checkpointer.metadata(folder).item_metadata.tree))


def manager(folder):
    with ocp.CheckpointManager(folder.parents[1], item_handlers=ocp.StandardCheckpointHandler()) as found:
        step = found.latest_step()
        target = as_jax_arrays(found.item_metadata(step).tree)
        return found.restore(step, args=ocp.args.StandardRestore(target))


WAYS = {"standard": standard, "manager": manager}


def make(name):
    def function():
        restore = WAYS.get(name.split("/")[0], pytree)
        compare(restore(SCRATCH / name), EXPECTED[name])
        compare_data(as_numpy(SCRATCH / name), EXPECTED[name])

    function.__name__ = name
    check(function)


def compare_data(tree, expected):
    """As `compare`, of a restore that gives a typed key as its data."""
    compare(tree, {name: {key: about[key] for key in about if key != "prng"} for name, about in expected.items()})


for one in EXPECTED:
    make(one)

if __name__ == "__main__":
    sys.exit(main())
