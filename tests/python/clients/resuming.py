"""Trains for ever as one does: resumes from the last good step of a CheckpointManager, and saves every few steps without
waiting. `resuming.py FOLDER LAST`; tells what it does, a line of JSON each.

The state after step n is known (n in every element, beside what the first state had), so a restore can be checked.
"""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pathwaysutils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

pathwaysutils.initialize()

EVERY, KEPT = 3, 2
DEVICES = jax.devices()
# Arrays on the devices of each worker: programs run where their arrays are.
HALVES = [Mesh(np.array(half).reshape(2, -1), ("x", "y")) for half in np.split(np.array(DEVICES), 2)]


def tell(**what):
    print("@@" + json.dumps(what), flush=True)


def expected(step):
    """The state after a step, on the host."""
    random = np.random.default_rng(3)
    weights = {f"w{i}": random.integers(-99, 99, (32, 16)).astype(np.float32) + step for i in range(4)}
    return {**weights, "step": np.full((), step, np.int32)}


def shardings():
    return {
        **{f"w{i}": NamedSharding(HALVES[i % 2], P("x", "y")) for i in range(4)},
        "step": NamedSharding(HALVES[0], P()),
    }


@functools.partial(jax.jit, donate_argnums=0)
def train(array):
    return array + jnp.ones((), array.dtype)


def same(state, step):
    for name, wanted in expected(step).items():
        assert np.array_equal(np.asarray(state[name]), wanted), (name, step)


def main():
    folder, last = sys.argv[1], int(sys.argv[2])
    options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, save_interval_steps=EVERY)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    with ocp.CheckpointManager(folder, options=options, item_handlers=handler) as manager:
        step = manager.latest_step()
        if step is None:
            step = 0
            state = jax.tree.map(jax.device_put, expected(0), shardings())
        else:
            arguments = jax.tree.map(
                lambda leaf, sharding: ocp.ArrayRestoreArgs(sharding=sharding, global_shape=leaf.shape, dtype=leaf.dtype),
                expected(0), shardings(),
            )  # fmt: skip
            state = manager.restore(step, args=ocp.args.PyTreeRestore(restore_args=arguments))
            same(state, step)
        tell(begins=step, steps=list(manager.all_steps()))
        try:
            while step < last:
                step += 1
                state = jax.tree.map(train, state)
                if manager.save(step, args=ocp.args.PyTreeSave(state)):
                    tell(saving=step)
            manager.wait_until_finished()
            same(state, step)
        except Exception as error:  # the test wants its text
            tell(failed=step, error=str(error))
            raise
        tell(ends=step, steps=list(manager.all_steps()))


if __name__ == "__main__":
    main()
