"""Saves one tree by each of Orbax's ways that its users have: `saving.py WAY...`, under SCRATCH.

SCRATCH/expected.json then says what there is to be found, as checkpoint_fixtures.py does, earlier runs' included. `saving.py
restored NAME...` restores the arrays of those, with nothing but what a program that has such a tree knows of it, and says
"NAME is equal".
"""

import json
import os
import pathlib
import sys

import jax
import orbax.checkpoint as ocp
import pathwaysutils
from etils import epath
from jax.sharding import NamedSharding

pathwaysutils.initialize()
sys.path.append(str(pathlib.Path(__file__).parents[1]))
from checkpoint_fixtures import data_of, described, main_tree  # noqa: E402

SCRATCH = epath.Path(os.environ["SCRATCH"])


def pytree(folder, tree, **options):
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)).save(folder, args=ocp.args.PyTreeSave(tree))


def standard(folder, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, tree)


def manager(folder, tree):
    with ocp.CheckpointManager(folder) as found:
        found.save(0, args=ocp.args.StandardSave(tree))


# Where a way puts the tree, under its folder, and how it saves.
WAYS = {
    "standard": ("", standard),
    "manager": ("0/default", manager),
    "pytree": ("", pytree),
    "pytree_zarr2": ("", lambda folder, tree: pytree(folder, tree, use_ocdbt=False)),
    "pytree_zarr3": ("", lambda folder, tree: pytree(folder, tree, use_ocdbt=False, use_zarr3=True)),
    "pytree_ocdbt_zarr3": ("", lambda folder, tree: pytree(folder, tree, use_zarr3=True)),
}


def restored(name, tree):
    # All these are of types that the request to read can name. Three dots stand for what is not to be restored.
    wanted = lambda leaf: isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding)
    arguments = lambda leaf: (
        ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)
        if wanted(leaf)
        else ocp.RestoreArgs()
    )
    args = ocp.args.PyTreeRestore(
        item=jax.tree.map(lambda leaf: leaf if wanted(leaf) else ..., tree), restore_args=jax.tree.map(arguments, tree)
    )
    found = ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(SCRATCH / name, args=args)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True)
    compared = [data_of(mine)[0].tobytes() == data_of(leaf)[0].tobytes() for mine, leaf in pairs if mine is not ...]
    print(name, "is equal" if len(compared) > 10 and all(compared) else compared, flush=True)


def main():
    tree = main_tree()
    if sys.argv[1] == "restored":
        for name in sys.argv[2:]:
            restored(name, tree)
        return
    told = SCRATCH / "expected.json"
    expected = json.loads(told.read_text()) if told.exists() else {}
    for way in sys.argv[1:]:
        below, save = WAYS[way]
        # Orbax's standard ones take no strings.
        mine = {**tree, "python": {"int": 5, "float": 0.25}} if save in (standard, manager) else tree
        save(SCRATCH / way, mine)
        expected[f"{way}/{below}".rstrip("/")] = described(mine)
    told.write_text(json.dumps(expected))
    # How the process ends afterwards is another matter: jaxlib sometimes does not survive the interpreter's own end.
    print("saved", flush=True)


if __name__ == "__main__":
    main()
