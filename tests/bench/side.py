"""One side of the bench: a JAX process that does what it is told on stdin, a line at a time, and answers with seconds."""

import json
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

WIDTH = 512
MEGABYTES = 64


def train_step():
    """A step of about 20 ms on two cores: three matrices, adam, parameters replicated over four devices, rows split."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    replicated, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    random = np.random.default_rng(0)
    matrices = [random.normal(size=(WIDTH, WIDTH)).astype(np.float32) * 0.04 for _ in range(3)]
    optimiser = optax.adam(1e-3)
    parameters = jax.device_put(matrices, replicated)
    state = jax.jit(optimiser.init, out_shardings=replicated)(parameters)
    x = jax.device_put(random.normal(size=(256, WIDTH)).astype(np.float32), rows)

    def loss_of(parameters, x):
        for matrix in parameters:
            x = jnp.tanh(x @ matrix)
        return jnp.mean(x**2)

    @jax.jit
    def step(parameters, state, x):
        loss, gradients = jax.value_and_grad(loss_of)(parameters, x)
        updates, state = optimiser.update(gradients, state)
        return optax.apply_updates(parameters, updates), state, loss

    held = [parameters, state]

    def run(count):
        parameters, state = held
        start = time.perf_counter()
        for _ in range(count):
            parameters, state, loss = step(parameters, state, x)
            # A loss is looked at now and then, as in real training; it also keeps few steps in flight.
        jax.block_until_ready(loss)
        seconds = time.perf_counter() - start
        held[:] = [parameters, state]
        return seconds

    run(3)
    return run


def dispatch():
    """A program that does next to nothing: what is left is the cost of a call."""
    program = jax.jit(lambda x: x + 1)
    held = [program(jax.device_put(np.zeros((), np.int32), jax.devices()[0]))]

    def run(count):
        x = held[0]
        start = time.perf_counter()
        for _ in range(count):
            x = program(x)
        x.block_until_ready()
        held[0] = x
        return time.perf_counter() - start

    run(10)
    return run


def put():
    value = np.random.default_rng(0).integers(0, 1 << 30, (MEGABYTES << 18,), dtype=np.int32)

    def run(count):
        start = time.perf_counter()
        for _ in range(count):
            jax.device_put(value, jax.devices()[0]).block_until_ready()
        return time.perf_counter() - start

    run(1)
    return run


def fetch():
    make = jax.jit(lambda i: jnp.full((MEGABYTES << 18,), i, jnp.int32))

    def run(count):
        arrays = [make(i) for i in range(count)]
        jax.block_until_ready(arrays)
        start = time.perf_counter()
        for array in arrays:
            np.array(array)
        return time.perf_counter() - start

    run(1)
    return run


PARTS = {"train_step": train_step, "dispatch": dispatch, "put": put, "fetch": fetch}


def main():
    parts = {}
    print(json.dumps({"pid": os.getpid(), "platform": jax.devices()[0].client.runtime_type}), flush=True)
    for line in sys.stdin:
        name, count = line.split()
        if name not in parts:
            parts[name] = PARTS[name]()
        print(json.dumps({"seconds": parts[name](int(count))}), flush=True)


if __name__ == "__main__":
    main()
