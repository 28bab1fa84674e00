"""Makes the artifacts in this folder, as JAX's client makes what it sends.

Run with a Python that has JAX (made with jaxlib 0.12.0.1):  python make.py [FOLDER]
The bytes carry this file's line numbers, so another version of it gives other bytes and the same digests.
"""

import os
import pathlib
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_dump_to=/home/one/dump"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import compiler, config as jax_config
from jax._src.interpreters import mlir as jax_mlir
from jax._src.mesh import AbstractDevice
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxlib import _jax
from jaxlib.mlir import ir

# Keeps the place of this checkout, and of JAX, out of the files.
jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*/(golden|site-packages)/")

FOLDER = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else __file__).resolve()
FOLDER = FOLDER if FOLDER.is_dir() else FOLDER.parent

# Every element type an array may have, by MLIR's name.
ELEMENTS = (
    "i1 i2 i4 i8 i16 i32 i64 ui2 ui4 ui8 ui16 ui32 ui64 f4E2M1FN f6E2M3FN f6E3M2FN f8E3M4 f8E4M3 f8E4M3FN f8E4M3FNUZ "
    "f8E4M3B11FNUZ f8E5M2 f8E5M2FNUZ f8E8M0FNU bf16 f16 f32 f64 complex<f32> complex<f64>"
).split()


def write(name, module):
    data = _jax.mlir.serialize_portable_artifact(module, "1.16.3", True)
    (FOLDER / f"{name}.mlirbc").write_bytes(data)


def text(name, source):
    with jax_mlir.make_ir_context():
        write(name, ir.Module.parse(source))


def program(name, function, *arguments, **options):
    write(name, jax.jit(function, **options).lower(*arguments).compiler_ir("stablehlo"))


def array(*shape, dtype=jnp.float32, sharding=None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto, AxisType.Auto))


def on(*spec):
    return NamedSharding(mesh, PartitionSpec(*spec))


def main():
    arguments = ", ".join(f"%a{i}: tensor<{i}x{t}>" for i, t in enumerate(ELEMENTS))
    text("elements", f"func.func public @main({arguments}) {{ return }}")
    text(
        "odd_types",
        """module @odd {
          func.func private @other(%a: tensor<2xf32>) -> tensor<2xf32> { return %a : tensor<2xf32> }
          func.func public @main(%t: !stablehlo.token, %d: tensor<?x3xf32>, %p: tuple<tensor<f32>, tuple<tensor<2xi32>>>)
              -> (!stablehlo.token, tensor<i1>) {
            %c = stablehlo.constant dense<true> : tensor<i1>
            return %t, %c : !stablehlo.token, tensor<i1>
          }
        }""",
    )
    text("no_main", "func.func public @other() { return }")

    def step(x, y, z):
        return x * 2 + y, z

    program("donated", step, array(4, 8), array(), array(3, dtype=jnp.int8), donate_argnums=(0, 2))
    program("unused", lambda x, y: y, array(3), array(4, dtype=jnp.int8))
    program("kept_unused", lambda x, y: y, array(3), array(4, dtype=jnp.int8), keep_unused=True)
    program("nothing", lambda: ())
    program(
        "sharded",
        lambda x, n: (jnp.sin(x), x[:5]),
        array(8, 12, dtype=jnp.bfloat16, sharding=on("x", "y")),
        array(6, sharding=on(None)),
        out_shardings=(on("x"), None),
        donate_argnums=0,
        keep_unused=True,
    )

    digests()
    kernels()
    # What a client with that XLA_FLAGS sends beside a program for 8 devices and one for device 2; nothing is compiled here.
    for name, ids in ("mesh", [7, 6, 5, 4, 3, 2, 1, 0]), ("single", [2]):
        assignment = np.array([ids])
        options = compiler.get_compile_options(1, len(ids), assignment, {"xla_cpu_enable_fast_math": True})
        (FOLDER / f"{name}.options").write_bytes(options.SerializeAsString())


# One function in two files: what differs is where it was written. The others each change one thing of it.
SOURCE = """
def step(x, w):
    def layer(carry, row):
        with jax.named_scope("{scope}"):
            return jnp.tanh(carry @ w) * {factor} + row, carry.sum()
    return jax.lax.scan(layer, x, jnp.arange(12.0).reshape(3, 4))
"""


def digests():
    def step(path="/home/one/train.py", lines=0, scope="layer", factor=2):
        names = {"jax": jax, "jnp": jnp}
        source = "\n" * lines + SOURCE.format(scope=scope, factor=factor)
        exec(compile(source, path, "exec"), names)
        return names["step"]

    x, w = array(4, sharding=on("x")), array(4, 4, sharding=on())
    program("step", step(), x, w)
    program("step_elsewhere", step("/srv/jobs/7/very/deep/main.py", 300, "block"), x, w)
    program("step_constant", step(factor=3), x, w)
    program("step_sharding", step(), array(4, sharding=on("y")), w)
    program("step_donation", step(), x, w, donate_argnums=0)
    column_major = Format(Layout(major_to_minor=(1, 0)), on())
    program("step_layout", step(), x, w, in_shardings=(on("x"), column_major))
    callback = lambda x: jax.pure_callback(lambda y: y, x, x)
    program("callback", callback, array(3))

    @custom_partitioning
    def partitioned(x):
        return x * 2

    partitioned.def_partition(
        partition=lambda mesh, arguments, result: (mesh, lambda x: x * 2, on("x"), (on("x"),)),
        infer_sharding_from_operands=lambda mesh, arguments, result: arguments[0].sharding,
        sharding_rule="i -> i",
    )
    program("partitioner", partitioned, array(4, sharding=on("x")))


# A kernel, as SOURCE above.
KERNEL = """
def kernel(x_ref, o_ref):
    def body(i, carry):
        return jnp.sin(carry) * {factor} + 1.0
    o_ref[...] = jax.lax.fori_loop(0, 3, body, x_ref[...])

def call(x):
    block = pl.BlockSpec((8, 128), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, out_shape=shape, grid=(2,), in_specs=[block], out_specs=block)(x)
"""


def kernels():
    def write_for(platform, name, path="/home/one/kernel.py", lines=0, factor=2.0):
        names = {"jax": jax, "jnp": jnp, "pl": pl}
        source = "\n" * lines + KERNEL.format(factor=factor)
        exec(compile(source, path, "exec"), names)
        lowered = jax.jit(names["call"]).trace(array(16, 128)).lower(lowering_platforms=(platform,))
        write(name, lowered.compiler_ir("stablehlo"))

    # Mosaic's, with locations beside the kernel; and in it, as before JAX 0.12.
    for apart, suffix in (True, ""), (False, "_old"):
        with jax_config.jax_mosaic_unzip_debug_locations(apart):
            write_for("tpu", f"kernel{suffix}")
            write_for("tpu", f"kernel{suffix}_elsewhere", "/srv/jobs/7/very/deep/kernels.py", 300)
            write_for("tpu", f"kernel{suffix}_constant", factor=3.0)
    # Triton's.
    device = AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        write_for("cuda", "kernel_triton")


if __name__ == "__main__":
    main()
