"""Trains on all slices of a cluster, loses one, goes on with the others from the last checkpoint, and takes it back.

An ordinary JAX program for pathwaysutils' elastic training: nothing in it knows Waystation. Run it with

    target/release/waystation run --slices 2 --devices_per_worker 2 --num_elastic_slices 1 -- \
        .venv/bin/python examples/elastic.py --steps 200

and kill one of the workers (`pkill -KILL -f 'worker .*--slice=1'`): `run` starts it again.

The batch of a step depends on the step alone, so the losses do not depend on how many slices there were.
"""

import argparse
import logging
import pathlib
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pathwaysutils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from pathwaysutils.elastic import manager

WIDTH, BATCH = 64, 48


def batch(step):
    """Points and what a fixed function makes of them."""
    points = np.random.default_rng(step).normal(size=(BATCH, WIDTH)).astype(np.float32)
    return points, np.tanh(points.sum(axis=1, keepdims=True) / 4)


def initial_state():
    first, second = jax.random.split(jax.random.key(0))
    return {
        "first": jax.random.normal(first, (WIDTH, WIDTH)) / WIDTH**0.5,
        "second": jax.random.normal(second, (WIDTH, 1)) / WIDTH**0.5,
    }


def train_step(state, points, wanted):
    def loss_of(state):
        found = jnp.tanh(points @ state["first"]) @ state["second"]
        return jnp.mean((found - wanted) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda leaf, gradient: leaf - 0.05 * gradient, state, gradients), loss


class Training:
    def __init__(self, options, elastic):
        self.options, self.elastic = options, elastic
        self.losses = {}
        self.interrupted = None

    def checkpoints(self):
        return ocp.CheckpointManager(
            self.options.checkpoints,
            item_handlers=ocp.PyTreeCheckpointHandler(use_ocdbt=False),
            options=ocp.CheckpointManagerOptions(max_to_keep=3, enable_async_checkpointing=False),
        )

    def note_event(self):
        """An attempt has ended: a slice is lost, or one is back."""
        self.interrupted = time.monotonic()

    def restored(self, checkpoints, everywhere):
        """The state of the last checkpoint, or a new one, on every device of the mesh; and the step that comes next."""
        last = checkpoints.latest_step()
        if last is None:
            return jax.jit(initial_state, out_shardings=everywhere)(), 0
        shapes = jax.eval_shape(initial_state)
        wanted = jax.tree.map(
            lambda leaf: ocp.ArrayRestoreArgs(sharding=everywhere, global_shape=leaf.shape, dtype=leaf.dtype), shapes
        )
        return checkpoints.restore(last, args=ocp.args.PyTreeRestore(item=shapes, restore_args=wanted)), last + 1

    def attempt(self):
        """Trains until the last step, or until a slice is lost or back."""
        slices = sorted(self.elastic.active_slice_indices)
        devices = [self.elastic.slice_to_devices[index] for index in slices]
        mesh = Mesh(np.array(devices), ("slice", "device"))
        everywhere, by_batch = NamedSharding(mesh, P()), NamedSharding(mesh, P(("slice", "device")))
        step_of = jax.jit(train_step, donate_argnums=0, out_shardings=(everywhere, everywhere))
        checkpoints = self.checkpoints()
        state, first = self.restored(checkpoints, everywhere)
        print(f"training on slices {slices} from step {first}", flush=True)
        for step in range(first, self.options.steps):
            if self.elastic.available_inactive_slices:
                raise manager.ScaleUpSignalError
            state, loss = step_of(state, *(jax.device_put(part, by_batch) for part in batch(step)))
            loss = float(loss)
            # What was trained before an interruption is trained again, to the same losses.
            before = self.losses.setdefault(step, loss)
            assert np.isclose(loss, before, rtol=1e-3), f"step {step}: {loss} and before {before}"
            if self.interrupted:
                seconds = time.monotonic() - self.interrupted
                print(f"going on after {seconds:.2f} s", flush=True)
                self.interrupted = None
            print(f"step {step} loss {loss:.5f} slices {len(slices)}", flush=True)
            if (step + 1) % self.options.save_every == 0:
                checkpoints.save(step, args=ocp.args.PyTreeSave(state))
            time.sleep(self.options.pause)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save_every", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.1, help="seconds between two steps")
    parser.add_argument("--poll", type=float, default=1.0, help="seconds between two looks for slices")
    parser.add_argument("--checkpoints", type=pathlib.Path, help="folder to save under; default: a temporary one")
    options = parser.parse_args()
    if options.checkpoints is None:
        options.checkpoints = pathlib.Path(tempfile.mkdtemp(prefix="waystation-elastic-"))
    logging.getLogger("absl").setLevel(logging.ERROR)
    pathwaysutils.initialize()
    elastic = manager.Manager()
    training = Training(options, elastic)
    retried = elastic.elastic_retry(
        minimum_slice_count=1, poll_interval=options.poll, timeout=300, on_elastic_event_callback=training.note_event
    )
    retried(training.attempt)()
    losses = [training.losses[step] for step in range(options.steps)]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]), losses
    print(f"done: {options.steps} steps, loss {losses[0]:.5f} to {losses[-1]:.5f}", flush=True)


if __name__ == "__main__":
    main()
