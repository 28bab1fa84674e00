"""Programs over all devices of one worker."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from harness import Skip, check, main, raises, server_only, status
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

shard_map = getattr(jax, "shard_map", None)


def grid(rows, columns, devices=None):
    devices = jax.devices() if devices is None else devices
    return Mesh(np.array(devices[: rows * columns]).reshape(rows, columns), ("x", "y"))


def put(value, spec, mesh=None):
    return jax.device_put(value, NamedSharding(mesh or grid(4, 2), spec))


def close(array, expected, tolerance=1e-5):
    np.testing.assert_allclose(np.asarray(array, np.float64), np.asarray(expected, np.float64), rtol=tolerance, atol=tolerance)


@check
def jit_on_one_device():
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    close(jax.jit(lambda x: jnp.sin(x) @ jnp.cos(x).T)(x), np.sin(x) @ np.cos(x).T)


@check
def jit_runs_again_and_again():
    step = jax.jit(lambda x: x * 1.5 + 1)
    x, expected = jnp.float32(1), np.float32(1)
    for _ in range(50):
        x, expected = step(x), np.float32(expected * np.float32(1.5) + 1)
    close(x, expected)


@check
def eager_operations():
    x = jnp.arange(10)
    assert (x + 1)[3] == 4 and int(x.sum()) == 45
    close(jnp.linspace(0, 1, 5)[::-1], np.linspace(0, 1, 5)[::-1])
    assert np.array_equal(x.at[2].set(9), [0, 1, 9, 3, 4, 5, 6, 7, 8, 9])
    assert np.array_equal(x.copy(), np.arange(10))


@check
def gradients():
    f = lambda x: jnp.sum(jnp.tanh(x) ** 3)
    x = np.linspace(-1, 1, 8).astype(np.float32)
    close(jax.grad(f)(x), 3 * np.tanh(x) ** 2 * (1 - np.tanh(x) ** 2))
    value, gradient = jax.value_and_grad(f)(x)
    close(value, np.sum(np.tanh(x) ** 3))
    assert gradient.shape == (8,)
    close(jax.jit(jax.hessian(f))(x).shape, (8, 8))


@check
def scan_and_loops():
    carry, outputs = jax.jit(lambda xs: jax.lax.scan(lambda c, x: (c + x, c * x), 0.0, xs))(jnp.arange(6.0))
    close(carry, 15)
    close(outputs, [0, 0, 2, 9, 24, 50])
    close(jax.jit(lambda n: jax.lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] * 2), (0, 1))[1])(10), 1024)
    close(jax.jit(lambda p: jax.lax.cond(p, lambda: 1.0, lambda: 2.0))(False), 2)
    close(jax.vmap(lambda a, b: a @ b)(np.ones((3, 4)), np.full((3, 4), 2.0)), [8, 8, 8])


@check
def sharded_program_over_all_devices():
    a = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
    b = np.random.default_rng(1).normal(size=(32, 8)).astype(np.float32)
    product = jax.jit(jnp.matmul)(put(a, P("x", "y")), put(b, P("y", None)))
    close(product, a @ b, 1e-4)
    assert len(product.sharding.device_set) == 8
    assert len(product.addressable_shards) == 8
    for shard in product.addressable_shards:
        close(shard.data, (a @ b)[shard.index], 1e-4)


@check
def wanted_output_shardings_are_kept():
    mesh = grid(4, 2)
    x = put(np.arange(64, dtype=np.float32).reshape(8, 8), P("x", "y"))
    for spec in [P("y", "x"), P(), P(None, "y"), P(("x", "y"))]:
        y = jax.jit(lambda x: x + 1, out_shardings=NamedSharding(mesh, spec))(x)
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
        close(y, np.asarray(x) + 1)


@check
def unwanted_output_shardings_are_reported():
    x = put(np.arange(64, dtype=np.float32).reshape(8, 8), P("x", "y"))
    doubled, total = jax.jit(lambda x: (x * 2, x.sum()))(x)
    assert doubled.sharding.is_equivalent_to(x.sharding, 2)
    assert total.sharding.is_fully_replicated
    close(total, 2016)


@check
def uneven_shardings_inside_and_out():
    mesh = grid(8, 1)
    x = put(np.arange(10, dtype=np.float32), P(), mesh)
    constrained = jax.jit(
        lambda x: jax.lax.with_sharding_constraint(x * 2, NamedSharding(mesh, P("x"))).sum()
    )
    close(constrained(x), 90)
    # Whatever sharding the compiler gives to a result that the mesh does not divide, its shape is the program's.
    y = jax.jit(lambda x: jnp.concatenate([x, x[:3]]))(put(np.arange(16, dtype=np.float32), P("x"), mesh))
    assert y.shape == (19,), y.shape
    close(y, np.concatenate([np.arange(16), np.arange(3)]))


@check
def psum_in_shard_map():
    mesh = grid(4, 2)
    x = np.arange(8 * 4, dtype=np.float32).reshape(8, 4)
    f = jax.jit(shard_map(lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=P("x", "y"), out_specs=P(None, "y")))
    close(f(x), x.reshape(4, 2, 4).sum(0))
    text = f.lower(x).compile().as_text()
    # Of a program over several workers, what stands in for it.
    assert "all-reduce" in text or "waystation_collective" in text, text[:500]
    assert "ENTRY" in text and "HloModule" in text, text[:500]


@check
def other_collectives_in_shard_map():
    mesh = grid(8, 1)
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    run = lambda f, out: jax.jit(shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=out, check_vma=False))(x)
    close(run(lambda x: jax.lax.all_gather(x, "x", tiled=True), P()), x)
    close(run(lambda x: jax.lax.ppermute(x, "x", [(i, (i + 1) % 8) for i in range(8)]), P("x")), np.roll(x, 1, 0))
    close(run(lambda x: jax.lax.all_to_all(x, "x", 1, 0, tiled=True), P(None, "x")), x)
    close(run(lambda x: jax.lax.psum_scatter(x, "x", scatter_dimension=1, tiled=True), P(None, "x")), x.sum(0)[None])
    close(run(lambda x: x * 0 + jax.lax.axis_index("x"), P("x")), np.repeat(np.arange(8), 8).reshape(8, 8))


@check
def parts_of_sums_stay_apart_until_they_are_wanted():
    if jax.version.__version_info__ < (0, 10):
        raise Skip("before JAX 0.10 shard_map gives no unreduced results")
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    a, b = np.arange(64.0, dtype=np.float32).reshape(4, 16), np.arange(48.0, dtype=np.float32).reshape(16, 3) - 20
    with jax.set_mesh(mesh):
        specs = {"in_specs": (P("x", "y"), P("y", None)), "out_specs": P("x", None, unreduced={"y"})}
        f = jax.jit(shard_map(lambda a, b: jax.lax.pcast(a @ b, "y", to="unreduced"), **specs))
        parts = f(jax.device_put(a, P("x", "y")), jax.device_put(b, P("y", None)))
        for place, shard in enumerate(parts.addressable_shards):
            rows, columns = slice(2 * (place // 4), 2 * (place // 4) + 2), slice(4 * (place % 4), 4 * (place % 4) + 4)
            assert np.array_equal(np.asarray(shard.data), a[rows, columns] @ b[columns])
        whole = jax.sharding.reshard(parts, P("x", None))
        assert np.array_equal(np.asarray(whole), a @ b)


@check
def pmap_over_all_devices():
    x = np.arange(16, dtype=np.float32).reshape(8, 2)
    y = jax.pmap(lambda x: jax.lax.psum(x, "i") + x, axis_name="i")(x)
    close(y, x.sum(0) + x)
    close(jax.pmap(lambda x: x * 2)(y), 2 * (x.sum(0) + x))


@check
def subset_and_permuted_devices():
    value = np.arange(16, dtype=np.float32).reshape(4, 4)
    for devices in [jax.devices()[4:], jax.devices()[3::-1], [jax.devices()[i] for i in (6, 1, 3, 4)]]:
        mesh = grid(2, 2, devices)
        y = jax.jit(lambda x: x @ x)(put(value, P("x", "y"), mesh))
        close(y, value @ value)
        assert y.sharding.device_set == set(devices)
    single = jax.device_put(value, jax.devices()[5])
    assert jax.jit(lambda x: x + 1)(single).devices() == {jax.devices()[5]}


@check
def donation():
    step = jax.jit(lambda x, y: x + y, donate_argnums=0)
    for spec in [P("x", "y"), P()]:
        x = put(np.ones((8, 8), np.float32), spec)
        y = put(np.full((8, 8), 2, np.float32), spec)
        z = step(x, y)
        assert x.is_deleted() and not y.is_deleted()
        close(z, np.full((8, 8), 3))
        raises(RuntimeError, lambda: np.asarray(x), "deleted")
        for _ in range(5):
            z = step(z, y)
        close(z, np.full((8, 8), 13))


@check
def donating_what_is_held_elsewhere_harms_nobody():
    step = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    value = np.arange(64, dtype=np.float32).reshape(8, 8)
    x = put(value, P("x", "y"))
    x.block_until_ready()
    held = [shard.data for shard in x.addressable_shards]
    whole = jax.make_array_from_single_device_arrays(x.shape, x.sharding, held)
    z = step(whole)
    close(z, np.full((8, 8), -1))
    # `x` shares its buffers with what was donated. Either it still has its own value, or it says that it is gone.
    try:
        assert np.array_equal(np.asarray(x), value), "a donated buffer was overwritten under a live array"
    except (RuntimeError, ValueError) as error:
        assert "delet" in str(error) or "donat" in str(error), error


@check
def fetch_races_with_donation():
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = put(np.zeros((256, 256), np.float32), P("x", "y"))
    for i in range(20):
        copy = x + 0
        x = step(x)
        assert float(copy[0, 0]) == i, i


@check
def random_numbers():
    key = jax.random.key(42)
    a, b = jax.random.split(key)
    x = jax.random.normal(a, (1000,))
    assert abs(float(x.mean())) < 0.2 and 0.8 < float(x.std()) < 1.2
    close(jax.random.normal(a, (1000,)), x)
    assert not np.array_equal(np.asarray(jax.random.normal(b, (1000,))), np.asarray(x))
    assert np.array_equal(jax.random.key_data(key), [0, 42])
    sharded = jax.jit(lambda k: jax.random.uniform(k, (16, 16)), out_shardings=NamedSharding(grid(4, 2), P("x", "y")))(key)
    close(sharded, jax.random.uniform(key, (16, 16)))
    legacy = jax.random.PRNGKey(0)
    assert legacy.shape == (2,) and jax.random.permutation(legacy, 5).shape == (5,)


@check
def bfloat16():
    a = np.random.default_rng(0).normal(size=(64, 64)).astype(jnp.bfloat16)
    y = jax.jit(jnp.matmul)(put(a, P("x", None)), put(a, P(None, "y")))
    assert y.dtype == jnp.bfloat16
    close(y, a.astype(np.float32) @ a.astype(np.float32), 0.15)
    close(jax.jit(lambda x: x.astype(jnp.float32).sum())(a), a.astype(np.float32).sum(), 1e-3)


@check
def many_dtypes_in_programs():
    for dtype in ["bool", "int8", "uint8", "int16", "uint32", "int32", "float16", "bfloat16", "float32", "complex64",
                  "float8_e4m3fn", "float8_e5m2", "int4", "uint4"]:  # fmt: skip
        value = np.array([0, 1, 1, 0, 1, 1, 0, 1]).astype(jnp.dtype(dtype))
        y = jax.jit(lambda x: x[::-1])(put(value, P("x"), grid(8, 1)))
        assert y.dtype == value.dtype
        assert np.array_equal(np.asarray(y).astype(np.complex64), value[::-1].astype(np.complex64)), dtype


@check
def zero_size_and_rank_zero_in_programs():
    assert jax.jit(lambda x: x * 2)(np.zeros((0, 3), np.float32)).shape == (0, 3)
    assert float(jax.jit(lambda x: x.sum())(np.zeros((0, 3), np.float32))) == 0
    a, b = jax.jit(lambda x: (x, jnp.zeros((4, 0))))(3.0)
    assert float(a) == 3 and b.shape == (4, 0)
    assert jax.jit(lambda: ())() == ()


@check
def no_arguments_and_constants():
    big = np.random.default_rng(3).normal(size=(512, 512)).astype(np.float32)
    close(jax.jit(lambda: jnp.asarray(big) * 2)(), big * 2)
    close(jax.jit(lambda: jnp.arange(4), out_shardings=NamedSharding(grid(4, 2), P("x")))(), np.arange(4))


@check
def unused_and_repeated_arguments():
    x = put(np.ones((8,), np.float32), P("x"))
    close(jax.jit(lambda a, b, c: a + c)(x, x * 5, x), np.full(8, 2))
    close(jax.jit(lambda a, b: b, keep_unused=True)(x, x * 3), np.full(8, 3))


@check
def custom_derivatives_and_control():
    @jax.custom_vjp
    def f(x):
        return x**2

    f.defvjp(lambda x: (x**2, x), lambda x, g: (g * 10 * x,))
    close(jax.jit(jax.grad(f))(3.0), 30)
    close(jax.jit(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x))))(1.0), np.sin(np.sin(1.0)))
    from jax.experimental import checkify

    error, _ = jax.jit(checkify.checkify(lambda x: checkify.check(x > 0, "not positive") or x))(-1.0)
    assert "not positive" in str(error.get())


@check
def compiled_program_tells_about_itself():
    compiled = jax.jit(lambda x: jnp.sin(x) @ x).lower(jax.ShapeDtypeStruct((64, 64), jnp.float32)).compile()
    analysis = compiled.memory_analysis()
    assert analysis.argument_size_in_bytes == 64 * 64 * 4, analysis
    assert analysis.output_size_in_bytes == 64 * 64 * 4, analysis
    assert "HloModule" in compiled.as_text()
    assert "dot" in compiled.as_text() or "custom-call" in compiled.as_text() or "fusion" in compiled.as_text()
    assert compiled(np.eye(64, dtype=np.float32)).shape == (64, 64)


@check
def cost_analysis_counts_as_xla_does():
    def cost(function, *shapes):
        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        return jax.jit(function).lower(*shapes).compile().cost_analysis()

    assert cost(lambda x, y: x @ y, (64, 32), (32, 16))["flops"] == 2 * 64 * 32 * 16
    cost_of_sum = cost(lambda x, y: jnp.tanh(x @ y).sum(), (64, 32), (32, 16))
    assert cost_of_sum["flops"] == 2 * 64 * 32 * 16 + 64 * 16 - 1, cost_of_sum
    assert cost_of_sum["transcendentals"] == 64 * 16, cost_of_sum
    assert cost_of_sum["bytes accessed"] > 4 * (64 * 32 + 32 * 16), cost_of_sum
    # A loop's body counts once. Its counter is worked out and compared, too.
    cost_of_loop = cost(lambda x: jax.lax.scan(lambda c, _: (c @ x, None), x, None, length=7)[0], (64, 64))
    assert 2 * 64**3 <= cost_of_loop["flops"] < 2 * 64**3 + 100, cost_of_loop


@check
def compiler_options():
    lowered = jax.jit(lambda x: x + 1).lower(np.float32(1))
    close(lowered.compile(compiler_options={"xla_cpu_enable_fast_math": True})(np.float32(1)), 2)
    raises(jax.errors.JaxRuntimeError, lambda: lowered.compile(compiler_options={"xla_no_such_option": True}), "xla_no_such_option")
    close(jax.jit(lambda x: x + 1)(np.float32(2)), 3)


@check
def out_of_order_results():
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda i, x: x @ x / 256, x))
    x = jax.device_put(np.ones((256, 256), np.float32), jax.devices()[0])
    y = jax.device_put(np.ones(4, np.float32), jax.devices()[1])
    slow(x).block_until_ready()
    waiting = slow(x)
    quick = jax.jit(lambda y: y + 1)(y)
    close(quick, np.full(4, 2))
    assert waiting.shape == (256, 256)
    waiting.block_until_ready()
    assert waiting.is_ready()


@check
def remapped_arrays():
    value = np.arange(64, dtype=np.float32).reshape(8, 8)
    source = put(value, P("x", "y"))
    target = NamedSharding(grid(4, 2, jax.devices()[::-1]), P("x", "y"))
    moved = jax.device_put(source, target)
    assert moved.sharding.is_equivalent_to(target, 2)
    close(jax.jit(lambda x: x + 1)(moved), value + 1)


@check
@server_only
def a_program_is_compiled_once_for_all_clients_and_calls():
    before = status()["totals"]["compiles"]
    f = lambda x: jnp.cos(x) * 17.125 + jnp.sin(x * 3.0625)
    x = np.arange(5, dtype=np.float32)
    close(jax.jit(f)(x), np.cos(x) * 17.125 + np.sin(x * 3.0625))
    once = status()["totals"]["compiles"]
    jax.clear_caches()
    close(jax.jit(f)(x), np.cos(x) * 17.125 + np.sin(x * 3.0625))
    assert status()["totals"]["compiles"] == once, (before, once, status()["totals"])


if __name__ == "__main__":
    sys.exit(main())
