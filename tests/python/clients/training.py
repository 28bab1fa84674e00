"""200 steps of training of a small network, parameters sharded over a mesh, optimiser state donated."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from harness import check, main
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(64)(x))
        x = nn.LayerNorm()(x)
        return nn.Dense(8)(x)


@check
def two_hundred_steps():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    network, optimiser = Network(), optax.adam(1e-2)
    rows = NamedSharding(mesh, P("data"))

    def place(path, leaf):
        spec = P(None, "model") if leaf.ndim == 2 else P("model") if leaf.ndim == 1 else P()
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    parameters = network.init(jax.random.key(0), jnp.zeros((1, 16)))
    parameters = jax.tree_util.tree_map_with_path(place, parameters)
    state = optimiser.init(parameters)

    def loss_of(parameters, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(network.apply(parameters, x), y).mean()

    def step(parameters, state, x, y):
        loss, gradients = jax.value_and_grad(loss_of)(parameters, x, y)
        updates, state = optimiser.update(gradients, state)
        return optax.apply_updates(parameters, updates), state, loss

    step = jax.jit(step, donate_argnums=(0, 1))
    random = np.random.default_rng(0)
    truth = random.normal(size=(16, 8))
    losses = []
    for _ in range(200):
        x = random.normal(size=(64, 16)).astype(np.float32)
        y = (x @ truth).argmax(1).astype(np.int32)
        parameters, state, loss = step(parameters, state, jax.device_put(x, rows), jax.device_put(y, rows))
        losses.append(loss)
    losses = [float(loss) for loss in losses]
    assert all(np.isfinite(losses)), losses
    assert np.mean(losses[-20:]) < 0.5 * np.mean(losses[:10]), (losses[:10], losses[-20:])
    for leaf in jax.tree.leaves(parameters):
        assert np.all(np.isfinite(np.asarray(leaf)))
    print("@@losses " + json.dumps(losses), flush=True)


if __name__ == "__main__":
    sys.exit(main())
