"""Makes the programs of the tests, as a JAX client sends them: NAME.mlir (portable artifact) and NAME.options.

Run by the tests:  python programs.py FOLDER
"""

import os
import pathlib
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import compiler
from jax.sharding import NamedSharding, PartitionSpec
from jaxlib import _jax

FOLDER = pathlib.Path(sys.argv[1])
MESH = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
ROWS = NamedSharding(MESH, PartitionSpec("x"))


def array(*shape, dtype=jnp.float32, sharding=None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def write(name, function, *arguments, devices=(0,), also=(), **options):
    module = jax.jit(function, **options).lower(*arguments).compiler_ir("stablehlo")
    data = _jax.mlir.serialize_portable_artifact(module, "1.16.3", True)
    # The same program, under another name for other devices.
    for name, devices in [(name, devices), *also]:
        (FOLDER / f"{name}.mlir").write_bytes(data)
        (FOLDER / f"{name}.options").write_bytes(options_for(devices))


def options_for(devices):
    compile_options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=len(devices),
        device_assignment=np.array(devices).reshape(1, -1),
    )
    compile_options.executable_build_options.use_spmd_partitioning = True
    compile_options.executable_build_options.use_shardy_partitioner = True
    return compile_options.SerializeAsString()


def slow(x):
    return jax.lax.fori_loop(0, 50, lambda _, y: jnp.sin(y) + 1.0, x)


write("add_one", lambda x: x + 1.0, array(4), also=[("add_one_on_3", (3,))])
write("take_over", lambda x: x + 1.0, array(1024), donate_argnums=0)
write("take_over_square", lambda x: x + 1.0, array(2, 2), donate_argnums=0)
write("take_over_large", lambda x: x + 1.0, array(1 << 20), donate_argnums=0)
write("two_results", lambda x, y: (x + y, x.astype(jnp.int32)), array(2), array(2))
write("pick_first", lambda x, y: x + y, array(1024), array(1))
write("products", lambda x: jnp.sin(x @ x) @ x, array(64, 64))
write("product", lambda x, y: x @ y, array(64, 32), array(32, 16))
write("slow", slow, array(1 << 18))
write(
    "sum_of_all",
    lambda x: x + x.sum(),
    array(16, 2, sharding=ROWS),
    devices=range(8),
    also=[("sum_of_all_on_8_to_15", range(8, 16))],
    out_shardings=ROWS,
)
# On devices of two workers.
BOTH = (0, 1, 2, 3, 8, 9, 10, 11)
write("sum_over_both", lambda x: x + x.sum(), array(16, 2, sharding=ROWS), devices=BOTH, out_shardings=ROWS)
write(
    "take_over_both",
    lambda x: x + x.min() * 0 + 1,
    array(8, 1024, sharding=ROWS),
    devices=BOTH,
    also=[("take_over_both_turned", BOTH[::-1])],
    out_shardings=ROWS,
    donate_argnums=0,
)
write("too_large", lambda x: jnp.broadcast_to(x, (1 << 40, 16)), array(16))
write("first_of_too_large", lambda x: x[0, :1] * jnp.ones(1024), array(1 << 40, 16))
write("unknown_call", lambda x: jax.ffi.ffi_call("no_such_target", array(4))(x), array(4))
