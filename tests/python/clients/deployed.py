"""What a user's container runs in a deployment: trains over all devices, saves, restores, and tells what it saw.

    deployed.py LOCATION
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pathwaysutils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

WIDTH, BATCH, STEPS = 16, 32, 40


def main(location):
    pathwaysutils.initialize()
    handler = type(ocp.type_handlers.get_type_handler(jax.Array)).__name__
    assert handler == "CloudPathwaysArrayHandler", handler
    mesh = Mesh(np.array(jax.devices()), ("data",))
    by_rows, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    optimiser = optax.adam(0.05)
    random = np.random.default_rng(0)
    wanted = random.normal(size=(WIDTH, WIDTH)).astype(np.float32)

    def loss_of(weights, x, y):
        return jnp.mean((x @ weights - y) ** 2)

    @jax.jit
    def step(weights, moments, x, y):
        loss, gradients = jax.value_and_grad(loss_of)(weights, x, y)
        updates, moments = optimiser.update(gradients, moments, weights)
        return optax.apply_updates(weights, updates), moments, loss

    weights = jax.device_put(np.zeros((WIDTH, WIDTH), np.float32), everywhere)
    moments = jax.jit(optimiser.init, out_shardings=everywhere)(weights)
    losses = []
    for _ in range(STEPS):
        x = random.normal(size=(BATCH, WIDTH)).astype(np.float32)
        weights, moments, loss = step(
            weights, moments, jax.device_put(x, by_rows), jax.device_put(x @ wanted, by_rows)
        )
        losses.append(loss)
    losses = [float(loss) for loss in losses]
    assert losses[-1] < 0.5 * losses[0], losses

    state = {"rows": jax.device_put(weights, by_rows), "weights": weights, "moments": moments}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(f"{location}/state", args=ocp.args.PyTreeSave(state))
        restore_args = jax.tree.map(
            lambda leaf: ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype), state
        )
        restored = checkpointer.restore(
            f"{location}/state", args=ocp.args.PyTreeRestore(item=state, restore_args=restore_args)
        )
    for saved, again in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
        assert again.sharding == saved.sharding
        np.testing.assert_array_equal(np.asarray(again), np.asarray(saved))
    told = {
        "losses": [losses[0], losses[-1]],
        "devices": [[d.slice_index, d.virtual_task_index, list(d.coords), repr(d)] for d in jax.devices()],
    }
    print("@@" + json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1])
