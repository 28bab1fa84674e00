"""Writes programs as JAX's client sends them, and beside each JAX's own hash of it, which leaves debug info out.

python oracle.py FOLDER: NAME.mlirbc and NAME.hash for every program below.
"""

import hashlib
import os
import pathlib
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import cache_key
from jax.sharding import Mesh, NamedSharding, PartitionSpec

try:
    from jaxlib import _jax

    serialize = _jax.mlir.serialize_portable_artifact
except (ImportError, AttributeError):
    from jax._src.lib import xla_client

    serialize = xla_client._xla.mlir.serialize_portable_artifact

folder = pathlib.Path(sys.argv[1])
mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
x = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def on(*spec):
    return jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


def write(name, function, *arguments, platform="cpu", **options):
    traced = jax.jit(function, **options).trace(*arguments)
    module = traced.lower(lowering_platforms=(platform,)).compiler_ir("stablehlo")
    (folder / f"{name}.mlirbc").write_bytes(serialize(module, "1.10.0", True))
    digest = hashlib.sha256()
    cache_key._hash_computation(digest, module, False)
    (folder / f"{name}.hash").write_text(digest.hexdigest())


def affine(factor):
    def f(x):
        with jax.named_scope("scope"):
            return x * factor + 1

    return f


def table(change):
    values = np.arange(4096, dtype=np.float32)
    values[100] += change

    def f(x):
        return x + values[:64].reshape(8, 8) + values.sum()

    return f


def loop(times):
    def f(x):
        return lax.scan(lambda c, _: (jnp.sin(c) @ c, None), x, None, length=times)[0]

    return f


def train(parameters, batch):
    def loss(parameters):
        h = batch
        for w, b in parameters:
            h = jnp.tanh(h @ w + b)
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(parameters)
    return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, grads), value


def named(x):
    return {"a": x, "b": x + 1}


def renamed(x):
    return {"a": x, "c": x + 1}


renamed.__name__ = "named"
layers = [(x, jax.ShapeDtypeStruct((8,), jnp.float32))] * 2

for factor in (2, 3, -0.0, 0.0):
    write(f"affine_{factor}", affine(factor), x)
write("affine_bf16", affine(2), jax.ShapeDtypeStruct((8, 8), jnp.bfloat16))
write("affine_kept", lambda x, y: x, x, x, keep_unused=True)
write("affine_unused", lambda x, y: x, x, x)
for change in (0, 1):
    write(f"table_{change}", table(change), x)
for times in (3, 4):
    write(f"loop_{times}", loop(times), x)
write("while", lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, x), x)
write("cond", lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x), x)
write("branches", lambda x: lax.cond(x.sum() > 0, jnp.cos, jnp.sin, x), x)
write("sort", lambda x: jnp.sort(x, stable=True), x)
write("sort_unstable", lambda x: jnp.sort(x, stable=False), x)
write("top", lambda x: lax.top_k(x, 3), x)
write("random", lambda: jax.random.normal(jax.random.key(0), (8,)))
write("random_1", lambda: jax.random.normal(jax.random.key(1), (8,)))
write("bits", lambda: jax.random.bits(jax.random.key(0, impl="rbg"), (8,)))
write("conv", lambda x: lax.conv(x[None, None], x[None, None, :3, :3], (1, 1), "SAME"), x)
write("gather", lambda x, i: x[i], x, jax.ShapeDtypeStruct((3,), jnp.int32))
write("scatter", lambda x, i: x.at[i].add(1.0), x, jax.ShapeDtypeStruct((3,), jnp.int32))
write("unique", lambda x, i: x.at[i].add(1.0, unique_indices=True), x, jax.ShapeDtypeStruct((3,), jnp.int32))
write("precise", lambda x: jnp.dot(x, x, precision="highest"), x)
write("product", lambda x: jnp.dot(x, x), x)
write("fft", lambda x: jnp.fft.fft(x).real, x)
write("mask", lambda x: jnp.where(np.arange(64).reshape(8, 8) % 3 == 0, x, 0), x)
write("mask_1", lambda x: jnp.where(np.arange(64).reshape(8, 8) % 3 == 1, x, 0), x)
write("checkpointed", lambda x: jax.grad(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)).sum()))(x), x)
write("solve", lambda x: jnp.linalg.solve(x, x), x)
write("small", lambda x: x.astype(jnp.int4).astype(jnp.float8_e4m3fn), x)
write("complex", lambda x: jnp.abs(x + 1j), x)
write("train", train, layers, x)
write("train_donated", train, layers, x, donate_argnums=0)
write("step", lambda x, y: (x + y, y), x, x)
write("step_donated", lambda x, y: (x + y, y), x, x, donate_argnums=0)
write("step_donated_1", lambda x, y: (x + y, y), x, x, donate_argnums=1)
write("named", named, x)
write("renamed", renamed, x)
for axes in ((), ("x",), ("y",), ("x", "y"), ("y", "x"), (None, "x"), (("x", "y"),)):
    write("sharded_" + repr(axes).replace("'", ""), lambda x: x @ x, on(*axes))
for axis in ("x", "y"):
    constraint = NamedSharding(mesh, PartitionSpec(axis))
    write(f"constrained_{axis}", lambda x, c=constraint: lax.with_sharding_constraint(x * 2, c), on())
    summed = jax.shard_map if hasattr(jax, "shard_map") else jax.experimental.shard_map.shard_map
    spec = PartitionSpec(axis)
    body = summed(lambda x, a=axis: lax.psum(x, a), mesh=mesh, in_specs=spec, out_specs=PartitionSpec())
    write(f"mapped_{axis}", body, on(axis))


def scaled(factor):
    def kernel(x_ref, o_ref):
        result = lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) * factor + 1.0, x_ref[...])
        o_ref[...] = result.astype(o_ref.dtype)

    return kernel


def first(x_ref, o_ref):
    @pl.when(pl.program_id(0) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += jnp.dot(x_ref[...], x_ref[...].T, preferred_element_type=jnp.float32)


def masked(x_ref, o_ref):
    columns = lax.broadcasted_iota(jnp.int32, x_ref.shape, 1)
    o_ref[...] = jnp.where(columns < 100, x_ref[...], -jnp.inf).max(axis=1, keepdims=True) + jnp.zeros_like(x_ref)


def copied(x_ref, o_ref):
    def body(scratch, semaphore):
        copy = pltpu.make_async_copy(x_ref, scratch, semaphore)
        copy.start()
        copy.wait()
        o_ref[...] = scratch[...] * 2

    pl.run_scoped(body, pltpu.VMEM(x_ref.shape, x_ref.dtype), pltpu.SemaphoreType.DMA)


# JAX leaves the locations of kernels out of its hash since 0.12.
if hasattr(cache_key, "_strip_mosaic_debug_info"):
    from jax._src import config
    from jax._src.mesh import AbstractDevice, AbstractMesh
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    wide = jax.ShapeDtypeStruct((256, 128), jnp.float32)

    def call(kernel, rows, dtype=jnp.float32):
        block = pl.BlockSpec((rows, 128), lambda i: (i, 0))
        shape = jax.ShapeDtypeStruct(wide.shape, dtype)
        return pl.pallas_call(kernel, out_shape=shape, grid=(256 // rows,), in_specs=[block], out_specs=block)

    chip = AbstractMesh((), (), abstract_device=AbstractDevice("TPU v5", num_cores=1, platform="tpu"))

    # With the locations beside the kernel, and in it.
    for apart in (True, False):
        with config.jax_mosaic_unzip_debug_locations(apart), jax.sharding.use_abstract_mesh(chip):
            for factor in (2.0, 3.0):
                write(f"kernel_scaled_{factor}_{apart}", call(scaled(factor), 128), wide, platform="tpu")
            write(f"kernel_rows_{apart}", call(scaled(2.0), 64), wide, platform="tpu")
            write(f"kernel_bf16_{apart}", call(scaled(2.0), 64, jnp.bfloat16), wide, platform="tpu")
            write(f"kernel_first_{apart}", call(first, 128), wide, platform="tpu")
            write(f"kernel_masked_{apart}", call(masked, 128), wide, platform="tpu")
            write(f"kernel_copied_{apart}", call(copied, 128), wide, platform="tpu")
