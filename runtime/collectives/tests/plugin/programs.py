"""Programs for four partitions, with what each partition gets and what JAX makes of it on four devices of one process.

Usage: programs.py FOLDER. Writes FOLDER/NAME.mlir and FOLDER/programs.json.
"""

import json
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.interpreters import mlir
from jax._src.lax import parallel
from jax.sharding import NamedSharding, PartitionSpec as P

try:
    from jax import shard_map
except ImportError:
    from jax.experimental.shard_map import shard_map

# JAX itself has it for GPUs only.
mlir.register_lowering(parallel.pbroadcast_p, parallel._pbroadcast_lowering, platform="cpu")
jax.config.update("jax_enable_x64", True)
DEVICES = np.array(jax.devices()[:4])
MESH = jax.sharding.Mesh(DEVICES.reshape(2, 2), ("x", "y"))
LINE = jax.sharding.Mesh(DEVICES, ("d",))
# Not in the devices' order.
TURNED = jax.sharding.Mesh(DEVICES.reshape(2, 2).T, ("x", "y"))
PROGRAMS = []


def small(shape, dtype, seed=0):
    """Small whole numbers, of which sums are exact."""
    values = np.random.default_rng(seed).integers(0, 5, shape)
    return np.asarray(values).astype(jnp.dtype(dtype))


def add(name, function, args, specs, out_specs, mesh=MESH, exact=True, donate=(), expected=None):
    """`expected` gives the results of what XLA cannot run on CPU."""
    PROGRAMS.append((name, function, args, specs, out_specs, mesh, exact, donate, expected))


def manual(name, function, args, specs, out_specs, mesh=MESH, expected=None):
    """A program with its collectives written by hand."""
    mapped = shard_map(function, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
    add(name, mapped, args, specs, out_specs, mesh, expected=expected)


X = P(("x", "y"))

for dtype in ["float32", "float64", "bfloat16", "float16", "int8", "int16", "int32", "int64", "uint8", "uint32", "complex64"]:
    manual(
        f"psum_{dtype}",
        lambda a: (lax.psum(a, "x"), lax.psum(a, "y"), lax.psum(a, ("x", "y"))),
        [small((8, 3), dtype)],
        (X,),
        (X, X, X),
    )
for dtype in ["float32", "bfloat16", "int32", "uint8"]:
    manual(
        f"extremes_{dtype}",
        lambda a: (lax.pmax(a, "y"), lax.pmin(a, "x")),
        [small((8, 5), dtype)],
        (X,),
        (X, X),
    )
manual(
    "logic",
    lambda a: (
        lax.pmax(a.astype(jnp.int32), "x") > 0,
        lax.psum(a.astype(jnp.int32), ("x", "y")) > 2,
        lax.all_gather(a, "y"),
    ),
    [small((8, 5), "bool")],
    (X,),
    (X, X, X),
)
for dtype in ["float32", "bfloat16", "int8", "bool", "complex128", "int4"]:
    manual(
        f"gather_{dtype}",
        lambda a: (
            lax.all_gather(a, "x", axis=0, tiled=True),
            lax.all_gather(a, "y", axis=1, tiled=True),
            lax.all_gather(a.T, ("x", "y"), axis=1).T,
        ),
        [small((8, 6), dtype)],
        (X,),
        (X, X, X),
    )
for dtype in ["float32", "bfloat16", "int32"]:
    manual(
        f"scatter_{dtype}",
        lambda a: (
            lax.psum_scatter(a, "x", scatter_dimension=0, tiled=True),
            lax.psum_scatter(a, ("x", "y"), scatter_dimension=1, tiled=True),
            lax.psum_scatter(a.T, "y", scatter_dimension=1, tiled=True),
        ),
        [small((16, 8), dtype)],
        (X,),
        (X, X, X),
    )
for dtype in ["float32", "bfloat16", "uint8", "int64"]:
    manual(
        f"exchange_{dtype}",
        lambda a: (
            lax.all_to_all(a, "x", 0, 1, tiled=True),
            lax.all_to_all(a, ("x", "y"), 1, 0, tiled=True),
            lax.all_to_all(a.T, "y", 1, 0, tiled=True),
        ),
        [small((16, 8), dtype)],
        (X,),
        (X, X, X),
    )
for dtype in ["float32", "int16", "bool"]:
    manual(
        f"permute_{dtype}",
        lambda a: (
            lax.ppermute(a, "d", [(0, 1), (1, 2), (2, 3), (3, 0)]),
            lax.ppermute(a, "d", [(0, 3), (2, 2)]),
            lax.ppermute(a, "d", [(3, 0)]),
        ),
        [small((8, 3), dtype)],
        (P("d"),),
        (P("d"), P("d"), P("d")),
        LINE,
    )
for dtype in ["float32", "int8", "bool"]:
    # Of the four parts of an array, the first two are at 0 along x and the others at 1.
    manual(
        f"broadcast_{dtype}",
        lambda a: (lax.pbroadcast(a, "x", 1), lax.pbroadcast(a, ("x", "y"), 2)),
        [small((8, 3), dtype)],
        (X,),
        (X, X),
        expected=lambda a: (np.concatenate([a[4:], a[4:]]), np.concatenate([a[4:6]] * 4)),
    )
manual(
    "number",
    lambda a: a + 10 * lax.axis_index("x") + 100 * lax.axis_index("y"),
    [small((8, 3), "int32")],
    (X,),
    X,
    TURNED,
)
manual(
    "large",
    lambda a: (lax.psum(a, "d"), lax.all_gather(a[:, ::2], "d", axis=1, tiled=True)),
    [small((4, 300_000), "float32")],
    (P("d"),),
    (P("d"), P("d")),
    LINE,
)


def scanned(a):
    def body(carry, row):
        carry = lax.psum(carry + row, "x") % 7
        return lax.ppermute(carry, "y", [(0, 1), (1, 0)]), carry

    carry, rows = lax.scan(body, a[0], jnp.tile(a, (4, 1)))
    return carry[None], rows


manual("scan", scanned, [small((8, 5), "int32")], (X,), (X, X))


def whiled(a):
    """How often it goes round depends on all partitions' data."""

    def more(state):
        value, _ = state
        return lax.psum(value.sum(), ("x", "y")) < 3000

    def body(state):
        value, rounds = state
        return value + lax.psum(value, "x") % 11 + 1, rounds + 1

    value, rounds = lax.while_loop(more, body, (a, jnp.int32(0)))
    return value, rounds[None] + jnp.zeros(a.shape[:1], jnp.int32)


manual("while", whiled, [small((8, 5), "int32")], (X,), (X, X))


def branched(a):
    total = lax.psum(a.sum(), ("x", "y"))
    return lax.cond(
        total % 2 == 0,
        lambda b: lax.psum(b, "x") + 1,
        lambda b: lax.all_gather(b, "y", axis=0, tiled=True)[: b.shape[0]] * 2,
        a,
    )


for seed in [1, 2, 3]:
    manual(f"cond_{seed}", branched, [small((8, 5), "int32", seed)], (X,), X)


def nested(a):
    def body(index, value):
        return lax.cond(
            (index + lax.psum(value.sum(), "y")) % 3 == 0,
            lambda v: lax.fori_loop(0, 3, lambda _, w: lax.psum(w, "y") % 13, v),
            lambda v: lax.ppermute(v, "y", [(0, 1), (1, 0)]) + 1,
            value,
        )

    return lax.fori_loop(0, 7, body, a)


manual("nested", nested, [small((8, 5), "int32")], (X,), X)


def step(params, batch, target):
    """One step of training of two layers, partitioned by XLA."""

    def loss(params):
        hidden = jnp.tanh(batch @ params["a"])
        return jnp.mean((hidden @ params["b"] - target) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def normal(shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


PARAMS = {"a": P("x", "y"), "b": P("y", "x")}
add(
    "train",
    step,
    [{"a": normal((64, 128), 1), "b": normal((128, 32), 2)}, normal((16, 64), 3), normal((16, 32), 4)],
    (PARAMS, P("x"), P("x")),
    (P(), PARAMS),
    exact=False,
    donate=(0,),
)


def shards(array):
    """What each device has of an array, in the devices' order."""
    by_device = {shard.device: np.asarray(shard.data) for shard in array.addressable_shards}
    return [
        {"type": str(part.dtype), "dims": part.shape, "hex": part.tobytes().hex()}
        for part in (by_device[device] for device in DEVICES)
    ]


def main(folder):
    written = []
    for name, function, args, specs, out_specs, mesh, exact, donate, expected in PROGRAMS:
        place = lambda spec: NamedSharding(mesh, spec)
        is_spec = lambda x: isinstance(x, P)
        in_shardings = jax.tree.map(place, specs, is_leaf=is_spec)
        out_shardings = jax.tree.map(place, out_specs, is_leaf=is_spec)
        plain = args
        args = jax.tree.map(jax.device_put, tuple(args), in_shardings)
        inputs = [shards(array) for array in jax.tree.leaves(args)]
        jitted = jax.jit(
            function,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            keep_unused=True,
            donate_argnums=donate,
        )
        # With the devices' order as it is in the mesh, partitions are numbered along it.
        lowered = jitted.lower(*args)
        order = [int(np.where(DEVICES == device)[0][0]) for device in mesh.devices.flat]
        with open(os.path.join(folder, name + ".mlir"), "w") as file:
            file.write(str(lowered.compiler_ir("stablehlo")))
        if expected is None:
            outputs = jitted(*args)
        else:
            outputs = jax.tree.map(jax.device_put, expected(*plain), out_shardings)
        outputs = [shards(array) for array in jax.tree.leaves(outputs)]
        by_partition = lambda arrays: [[array[device] for array in arrays] for device in order]
        written.append(
            {
                "name": name,
                "exact": exact,
                "inputs": by_partition(inputs),
                "outputs": by_partition(outputs),
            }
        )
    with open(os.path.join(folder, "programs.json"), "w") as file:
        json.dump(written, file)


if __name__ == "__main__":
    main(sys.argv[1])
