"""A train loop that saves every five steps without waiting: `stepping.py MEGABYTES SAVES`. Tells how long each step took.

The state is as large as told, and every step takes it over (donation). What the last save wrote is restored at the end.
"""

import functools
import json
import os
import pathlib
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pathwaysutils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

pathwaysutils.initialize()

SCRATCH = pathlib.Path(os.environ["SCRATCH"])
EVERY, ARRAYS = 5, 8


def tell(**what):
    print("@@" + json.dumps(what), flush=True)


@functools.partial(jax.jit, donate_argnums=0)
def train(state):
    return jax.tree.map(lambda array: array + 1, state)


def main():
    megabytes, saves = int(sys.argv[1]), int(sys.argv[2])
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
    rows = (megabytes << 20) // ARRAYS // 4096
    hosts = {f"a{n}": np.random.default_rng(n).integers(0, 1 << 20, (rows, 1024)).astype(np.float32) for n in range(ARRAYS)}
    state = {name: jax.device_put(host, sharding) for name, host in hosts.items()}
    with ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        # What a process does but once, is done before the clock and the scales are looked at.
        state = train(state)
        checkpointer.save(SCRATCH / "first", args=ocp.args.PyTreeSave(state))
        checkpointer.wait_until_finished()
        tell(ready=True)
        milliseconds, steps, last = [], 1, 0
        for number in range(EVERY * saves):
            start = time.perf_counter()
            state = train(state)
            steps += 1
            jax.block_until_ready(state)
            milliseconds.append(round((time.perf_counter() - start) * 1e3, 1))
            if number % EVERY == 0:
                # Waits for the one before, if that is not written yet.
                checkpointer.save(SCRATCH / f"step{steps}", args=ocp.args.PyTreeSave(state))
                last = steps
        checkpointer.wait_until_finished()
        tell(milliseconds=milliseconds)
        arguments = jax.tree.map(
            lambda array: ocp.ArrayRestoreArgs(sharding=sharding, global_shape=array.shape, dtype=array.dtype), state
        )
        restored = checkpointer.restore(SCRATCH / f"step{last}", args=ocp.args.PyTreeRestore(restore_args=arguments))
        equal = all(np.array_equal(np.asarray(restored[name]), host + last) for name, host in hosts.items())
        tell(equal=equal)


if __name__ == "__main__":
    main()
