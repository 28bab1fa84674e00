"""Trains a small transformer, saves it, restores it with another sharding, and checks every bit.

An ordinary JAX program: nothing in it knows Waystation but the lines that read the server's counters. Run it with

    target/release/waystation run --workers 1 --devices_per_worker 4 -- .venv/bin/python examples/train.py

or natively, with JAX_PLATFORMS=cpu and JAX_NUM_CPU_DEVICES=4.
"""

import argparse
import hashlib
import json
import logging
import os
import pathlib
import tempfile
import time
import urllib.request

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pathwaysutils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

WIDTH, HEADS, LAYERS, LENGTH, BATCH = 128, 4, 2, 32, 16
SENTENCES = [
    "the signal at the way station shows a green light. ",
    "a train of small steps goes down the long gradient. ",
    "what was compiled once is kept in the bucket for all. ",
    "every shard of the state is written where it lies. ",
]


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(num_heads=HEADS)(nn.LayerNorm()(x), mask=mask)
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))


class Transformer(nn.Module):
    vocabulary: int

    @nn.compact
    def __call__(self, tokens):
        places = self.param("places", nn.initializers.normal(0.02), (LENGTH, WIDTH))
        x = nn.Embed(self.vocabulary, WIDTH)(tokens) + places
        for _ in range(LAYERS):
            x = Block()(x)
        return nn.Dense(self.vocabulary)(nn.LayerNorm()(x))


def batches(steps):
    """Synthetic text: sentences in random order, as numbers."""
    random = np.random.default_rng(0)
    letters = sorted(set("".join(SENTENCES)))
    text = "".join(SENTENCES[i] for i in random.integers(0, len(SENTENCES), 400))
    numbers = np.array([letters.index(letter) for letter in text], np.int32)
    for _ in range(steps):
        starts = random.integers(0, len(numbers) - LENGTH - 1, BATCH)
        yield np.stack([numbers[start : start + LENGTH + 1] for start in starts])


def vocabulary():
    # Rounded up so that every mesh divides it.
    return -(-len(set("".join(SENTENCES))) // 8) * 8


def shardings(state, mesh, rows, columns):
    """Matrices are split over both axes where these divide them; the rest is replicated."""

    def of(leaf):
        if leaf.ndim >= 2 and leaf.shape[0] % mesh.shape[rows] == 0 and leaf.shape[-1] % mesh.shape[columns] == 0:
            return NamedSharding(mesh, P(rows, *[None] * (leaf.ndim - 2), columns))
        return NamedSharding(mesh, P())

    return jax.tree.map(of, state)


class Job:
    """What is trained, on which devices: the programs of this job and where their arguments lie."""

    def __init__(self, devices, constant=1.0, shape=(2, 2)):
        self.mesh = Mesh(np.array(devices).reshape(shape), ("data", "model"))
        self.by_rows = NamedSharding(self.mesh, P("data"))
        self.everywhere = NamedSharding(self.mesh, P())
        model = Transformer(vocabulary())
        optimiser = optax.adamw(3e-3)

        def initial_state(seed):
            parameters = model.init(jax.random.key(seed), jnp.zeros((1, LENGTH), jnp.int32))["params"]
            return {"parameters": parameters, "optimiser": optimiser.init(parameters), "step": jnp.zeros((), jnp.int32)}

        def train_step(state, tokens):
            def loss_of(parameters):
                logits = model.apply({"params": parameters}, tokens[:, :-1])
                return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

            loss, gradients = jax.value_and_grad(loss_of)(state["parameters"])
            updates, moments = optimiser.update(gradients, state["optimiser"], state["parameters"])
            parameters = optax.apply_updates(state["parameters"], updates)
            return {"parameters": parameters, "optimiser": moments, "step": state["step"] + 1}, loss

        def report(loss):
            return jnp.exp(loss) * constant

        self.shapes = jax.eval_shape(lambda: initial_state(0))
        self.placed = shardings(self.shapes, self.mesh, "data", "model")
        self.initial_state = jax.jit(initial_state, static_argnums=0, out_shardings=self.placed)
        self.step = jax.jit(train_step, donate_argnums=0, out_shardings=(self.placed, self.everywhere))
        self.perplexity = jax.jit(report)
        self.tokens = jax.ShapeDtypeStruct((BATCH, LENGTH + 1), jnp.int32, sharding=self.by_rows)


def programs():
    """What this job compiles, for record_programs.py: names, functions, and arguments without values."""
    job = Job(jax.devices()[:4])
    state = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), job.shapes, job.placed
    )
    yield "initial_state", job.initial_state, (0,)
    yield "train_step", job.step, (state, job.tokens)
    yield "perplexity", job.perplexity, (jax.ShapeDtypeStruct((), jnp.float32, sharding=job.everywhere),)


def server_status():
    """The server's counters, or nothing when there is no server."""
    url = os.environ.get("WAYSTATION_STATUS_URL")
    if not url:
        return {}
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)


def digest(state):
    total = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        value = np.asarray(leaf)
        total.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    return total.hexdigest()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint", type=pathlib.Path, help="folder to save under; default: a temporary one")
    parser.add_argument(
        "--constant", type=float, default=1.0, help="a number in the reporting program, and in no other program"
    )
    parser.add_argument("--mesh", default="2x2", metavar="RxC", help="devices for the batch times devices for the matrices")
    options = parser.parse_args()
    shape = tuple(int(size) for size in options.mesh.split("x"))
    if options.checkpoint is None:
        options.checkpoint = pathlib.Path(tempfile.mkdtemp(prefix="waystation-train-"))

    # pathwaysutils and Orbax warn of what they do on purpose.
    logging.getLogger("absl").setLevel(logging.ERROR)
    # Registers the proxy backend and, if ENABLE_PATHWAYS_PERSISTENCE is set, the handler by which workers do the saving.
    pathwaysutils.initialize()
    on_server = os.environ.get("JAX_PLATFORMS") == "proxy"
    handler = type(ocp.type_handlers.get_type_handler(jax.Array)).__name__
    if on_server:
        assert handler == "CloudPathwaysArrayHandler", f"arrays would be saved through this process, by {handler}"

    devices = jax.devices()[: shape[0] * shape[1]]
    job = Job(devices, options.constant, shape)
    print(
        f"JAX {jax.__version__} on {jax.device_count()} devices ({devices[0].client.runtime_type}), mesh {dict(job.mesh.shape)}"
    )

    start = time.monotonic()
    state = job.initial_state(0)
    step = job.step.lower(state, job.tokens).compile()
    compile_seconds = time.monotonic() - start

    start = time.monotonic()
    losses = []
    for number, tokens in enumerate(batches(options.steps), 1):
        state, loss = step(state, jax.device_put(tokens, job.by_rows))
        losses.append(loss)
        if number % 20 == 0 or number == 1:
            print(f"step {number:4d}  loss {float(loss):.4f}  perplexity {float(job.perplexity(loss)):8.3f}")
    losses = [float(loss) for loss in losses]
    train_seconds = time.monotonic() - start
    assert all(np.isfinite(losses)), losses
    first, last = float(np.mean(losses[:5])), float(np.mean(losses[-5:]))
    assert last < 0.7 * first, f"the loss did not fall: {first:.3f} -> {last:.3f}"

    # Save, and restore into a fresh state whose leaves lie otherwise: the mesh's axes change places and its devices order.
    jax.block_until_ready(state)
    other_mesh = Mesh(np.array(devices[::-1]).reshape(shape), ("data", "model"))
    other = shardings(job.shapes, other_mesh, "model", "data")
    before = server_status()
    start = time.monotonic()
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False))
    checkpointer.save(options.checkpoint / "state", args=ocp.args.PyTreeSave(state))
    save_seconds = time.monotonic() - start
    start = time.monotonic()
    restore_args = jax.tree.map(
        lambda leaf, sharding: ocp.ArrayRestoreArgs(sharding=sharding, global_shape=leaf.shape, dtype=leaf.dtype),
        job.shapes,
        other,
    )
    restored = checkpointer.restore(
        options.checkpoint / "state", args=ocp.args.PyTreeRestore(item=job.shapes, restore_args=restore_args)
    )
    jax.block_until_ready(restored)
    restore_seconds = time.monotonic() - start
    after = server_status()

    for leaf, sharding in zip(jax.tree.leaves(restored), jax.tree.leaves(other), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    saved_hash, restored_hash = digest(state), digest(restored)
    assert saved_hash == restored_hash, "the restored state is not the saved one"

    result = {
        "losses": losses,
        "state_hash": saved_hash,
        "compile_seconds": compile_seconds,
        "train_seconds": train_seconds,
        "save_seconds": save_seconds,
        "restore_seconds": restore_seconds,
        "state_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
        "handler": handler,
    }
    print(f"loss {first:.3f} -> {last:.3f} in {options.steps} steps, {options.steps / train_seconds:.1f} steps/s")
    print(f"saved and restored {result['state_bytes'] / 1e6:.2f} MB, bit for bit equal, in {save_seconds + restore_seconds:.2f} s")
    if on_server:
        totals = after["totals"]
        result["client_bytes"] = sum(after[name] - before[name] for name in ("stored_bytes", "fetched_bytes"))
        result["totals"] = totals
        assert result["client_bytes"] < 1_000_000, f"{result['client_bytes']} bytes passed through this process"
        print(f"bytes through this process meanwhile: {result['client_bytes']}; the worker moved the data")
        origin = "compiled" if totals["bucket_hits"] == 0 else "mixed" if totals["compiles"] else "from the bucket"
        print(
            f"programs ready in {compile_seconds:.2f} s: {origin} "
            f"({totals['compiles']} compiled, {totals['bucket_hits']} from the bucket)"
        )
    else:
        print(f"programs compiled in {compile_seconds:.2f} s, natively")
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
