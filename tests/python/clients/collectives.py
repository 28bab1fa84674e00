"""Programs whose devices lie on several workers: every collective, in loops and branches, with donation, on odd meshes."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from harness import check, main, raises, server_only
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

DEVICES = np.array(jax.devices())
# Integers, and floats that are small integers, are the same bits whatever the order.
TYPES = ["int32", "uint8", "float32", "bfloat16", "complex64", "bool"]


def mesh(*shape, names=("x", "y"), devices=DEVICES):
    count = int(np.prod(shape))
    return Mesh(devices[:count].reshape(shape), names[: len(shape)])


def values(shape, dtype, seed=0):
    drawn = np.random.default_rng(seed).integers(-4, 5, size=shape)
    return (drawn > 0) if dtype == "bool" else np.asarray(jnp.asarray(drawn).astype(dtype))


def put(value, mesh, *spec):
    return jax.device_put(value, NamedSharding(mesh, P(*spec)))


def mapped(function, mesh, ins, outs):
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False))


def equal(array, wanted):
    found = np.asarray(array)
    assert found.dtype == wanted.dtype and np.array_equal(found, wanted), (found, wanted)


@check
def sums_over_all_and_over_groups():
    m = mesh(2, 4)
    for dtype in TYPES[:5]:
        value = values((2, 4, 3), dtype)
        x = put(value, m, "x", "y")
        for names, axes in [(("x", "y"), (0, 1)), (("x",), (0,)), (("y",), (1,))]:
            spec = P(*(None if name in names else name for name in ("x", "y")))
            found = mapped(lambda a: lax.psum(a, names), m, P("x", "y"), spec)(x)
            equal(found, np.asarray(value.sum(axes, keepdims=True), value.dtype))


@check
def other_reductions():
    m = mesh(8)
    for dtype in ["int32", "float32"]:
        value = values((8, 5), dtype)
        x = put(value, m, "x")
        equal(mapped(lambda a: lax.pmax(a, "x"), m, P("x"), P())(x), value.max(0, keepdims=True))
        equal(mapped(lambda a: lax.pmin(a, "x"), m, P("x"), P())(x), value.min(0, keepdims=True))
    truths = values((8, 5), "bool")
    x = put(truths, m, "x")
    equal(jax.jit(lambda a: a.all(0))(x), truths.all(0))
    equal(jax.jit(lambda a: a.any(0))(x), truths.any(0))
    product = np.where(values((8, 5), "int32") > 0, 2, 1).astype(np.int32)
    equal(jax.jit(lambda a: a.prod(0))(put(product, m, "x")), product.prod(0, dtype=np.int32))


@check
def gathers_scatters_and_exchanges():
    m = mesh(8)
    for dtype in TYPES:
        value = values((16, 8, 3), dtype)
        x = put(value, m, "x")
        equal(mapped(lambda a: lax.all_gather(a, "x", tiled=True), m, P("x"), P())(x), value)
        gathered = mapped(lambda a: lax.all_gather(a, "x", axis=1), m, P("x"), P(None, "x"))(x)
        # Every device has all, of which the sharding takes each one's eighth as its own.
        assert gathered.shape == (2, 64, 8, 3)
        exchange = mapped(lambda a: lax.all_to_all(a, "x", 1, 0, tiled=True), m, P("x"), P(None, "x"))
        equal(exchange(x), value)
        moved = mapped(lambda a: lax.ppermute(a, "x", [(i, (i + 3) % 8) for i in range(8)]), m, P("x"), P("x"))
        equal(moved(x), np.roll(value.reshape(8, 2, 8, 3), 3, 0).reshape(value.shape))
        some = mapped(lambda a: lax.ppermute(a, "x", [(0, 7), (5, 2)]), m, P("x"), P("x"))
        wanted = np.zeros_like(value).reshape(8, 2, 8, 3)
        wanted[7], wanted[2] = value.reshape(wanted.shape)[0], value.reshape(wanted.shape)[5]
        equal(some(x), wanted.reshape(value.shape))
        if dtype != "bool":
            scattered = mapped(
                lambda a: lax.psum_scatter(a[0], "x", scatter_dimension=0, tiled=True), m, P("x"), P("x")
            )
            parts = value.reshape(8, 2, 8, 3)[:, 0]
            equal(scattered(x), np.asarray(parts.sum(0), value.dtype))


@check
@server_only
def elements_of_two_bits_move():
    # XLA's own collectives, within one process, write beyond their memory for these.
    m = mesh(8)
    for dtype in ["int2", "uint2"]:
        value = values((16, 8, 4), dtype)
        x = put(value, m, "x")
        exchange = mapped(lambda a: lax.all_to_all(a, "x", 1, 0, tiled=True), m, P("x"), P(None, "x"))
        equal(exchange(x), value)
        equal(mapped(lambda a: lax.all_gather(a, "x", tiled=True), m, P("x"), P())(x), value)
        moved = mapped(lambda a: lax.ppermute(a, "x", [(i, (i + 3) % 8) for i in range(8)]), m, P("x"), P("x"))
        equal(moved(x), np.roll(value.reshape(8, 2, 8, 4), 3, 0).reshape(value.shape))
        # As XLA has no such reductions on CPU.
        total = mapped(lambda a: lax.psum(a, "x"), m, P("x"), P())
        raises(Exception, lambda x=x: jax.block_until_ready(total(x)), "UNIMPLEMENTED")


@check
def each_partition_knows_its_place():
    m = mesh(4, 2)
    place = mapped(lambda a: a + lax.axis_index("x") * 10 + lax.axis_index("y"), m, P("x", "y"), P("x", "y"))
    found = place(put(np.zeros((4, 2), np.int32), m, "x", "y"))
    equal(found, np.asarray([[10 * x + y for y in range(2)] for x in range(4)], np.int32))


@check
def mapped_in_parallel():
    value = values((8, 3), "float32")
    f = jax.pmap(lambda a: lax.psum(a, "x") + lax.axis_index("x"), axis_name="x")
    equal(f(value), value.sum(0) + np.arange(8, dtype=np.float32)[:, None])


@check
def inside_of_loops_and_branches():
    m = mesh(8)
    value = values((8, 4), "float32")
    x = put(value, m, "x")

    def loop(a):
        def body(state):
            count, a = state
            return count + 1, a + lax.pmax(a, "x") * 0 + lax.ppermute(a, "x", [(i, (i + 1) % 8) for i in range(8)])

        # How often depends on data of all.
        return lax.while_loop(lambda state: lax.psum(state[0], "x") < 8 * 5, body, (0, a))[1]

    wanted = value
    for _ in range(5):
        wanted = wanted + np.roll(wanted, 1, 0)
    equal(mapped(loop, m, P("x"), P("x"))(x), wanted)

    def branch(a):
        return lax.cond(lax.psum(a[0, 0], "x") > 1e6, lambda a: a * 0, lambda a: a + lax.psum(a, "x"), a)

    equal(mapped(branch, m, P("x"), P("x"))(x), value + value.sum(0))

    def steps(a):
        return lax.scan(lambda carry, i: (carry + lax.psum(carry, "x") * i, carry.sum()), a, jnp.arange(3.0))[0]

    wanted = value
    for i in range(3):
        wanted = wanted + wanted.sum(0) * i
    equal(mapped(steps, m, P("x"), P("x"))(x), wanted)


@check
def partitioned_by_the_compiler():
    m = mesh(2, 4)
    a, b = values((16, 32), "float32"), values((32, 24), "float32", 1)
    for left, right, out in [
        (("x", "y"), ("y", None), ("x", None)),
        ((None, "y"), ("y", "x"), (None, "x")),
        (("y", "x"), (None, "y"), ("x", "y")),
    ]:
        f = jax.jit(lambda a, b: a @ b, out_shardings=NamedSharding(m, P(*out)))
        found = f(put(a, m, *left), put(b, m, *right))
        equal(found, a @ b)
        assert found.sharding.is_equivalent_to(NamedSharding(m, P(*out)), 2)
    x = put(values((64,), "float32"), m, ("x", "y"))
    equal(jax.jit(jnp.sort)(x), np.sort(np.asarray(x)))
    equal(jax.jit(lambda x: jnp.cumsum(x)[::-1])(x), np.cumsum(np.asarray(x))[::-1])


@check
def without_any_collective():
    m = mesh(8)
    value = values((8, 4), "float32")
    equal(jax.jit(lambda x: x * 2 + 1)(put(value, m, "x")), value * 2 + 1)
    equal(jax.jit(lambda: jnp.arange(8.0), out_shardings=NamedSharding(m, P("x")))(), np.arange(8, dtype=np.float32))


@check
def results_in_the_hosts_memory():
    m = mesh(8)
    value = values((8, 4), "float32")
    there = NamedSharding(m, P("x"), memory_kind="pinned_host")
    found = jax.jit(lambda x: x + x.sum(), out_shardings=there)(put(value, m, "x"))
    assert found.sharding.memory_kind == "pinned_host"
    equal(found, value + value.sum(dtype=np.float32))
    back = jax.jit(lambda x: jax.device_put(x, NamedSharding(m, P())) * 2)(found)
    equal(back, (value + value.sum(dtype=np.float32)) * 2)


@check
def linear_algebra_and_random_numbers():
    m = mesh(8)
    square = np.eye(8, dtype=np.float32) * 3 + 1
    found = jax.jit(jnp.linalg.cholesky)(put(square, m, "x"))
    np.testing.assert_allclose(np.asarray(found), np.linalg.cholesky(square), rtol=1e-5)
    key = jax.device_put(jax.random.key(3), NamedSharding(m, P()))
    drawn = jax.jit(lambda key: jax.random.bits(key, (64,)), out_shardings=NamedSharding(m, P("x")))(key)
    equal(drawn, np.asarray(jax.random.bits(jax.random.key(3), (64,))))


@check
def on_any_order_and_number_of_devices():
    value = values((24, 2), "float32")
    for order in [DEVICES[::-1], DEVICES[[0, 4, 1, 5, 2, 6, 3, 7]], DEVICES[[6, 3, 1, 4]], DEVICES[[7, 0, 5]], DEVICES[2:]]:
        m = Mesh(order, ("x",))
        if 24 % len(order):
            continue
        x = put(value, m, "x")
        f = jax.jit(lambda x: (x - x.sum(0), jnp.roll(x, 5, 0)))
        first, second = f(x)
        equal(first, value - value.sum(0))
        equal(second, np.roll(value, 5, 0))


@check
def arrays_go_from_mesh_to_mesh():
    value = values((16, 16), "float32")
    meshes = [Mesh(DEVICES, ("x",)), Mesh(DEVICES[::-1], ("x",)), Mesh(DEVICES[:4], ("x",)), Mesh(DEVICES[3:5], ("x",))]
    x, wanted = put(value, meshes[0], "x"), value
    step = jax.jit(lambda x: x + x.sum(0) * 0 + 1)
    for i in range(8):
        x, wanted = step(jax.device_put(x, NamedSharding(meshes[i % 4], P("x")))), wanted + 1
    equal(x, wanted)


@check
def donated_arrays_are_gone_on_all_workers():
    m = mesh(8)
    value = values((8, 1024), "float32")
    step = jax.jit(lambda x: x + x.sum(), donate_argnums=0)
    x = put(value, m, "x")
    first, wanted = x, value
    for _ in range(10):
        x = step(x)
        wanted = wanted + wanted.sum(dtype=np.float32)
    np.testing.assert_allclose(np.asarray(x), wanted, rtol=1e-5)
    assert first.is_deleted()
    raises(RuntimeError, lambda: np.asarray(first), "deleted")
    # An array that a read holds.
    y = put(value, m, "x")
    kept = y.addressable_shards[5].data
    z = step(y)
    equal(z, value + value.sum(dtype=np.float32))
    assert kept is not None


@check
def a_training_step():
    m = mesh(4, 2, names=("data", "model"))
    rng = np.random.default_rng(0)
    weights = {
        "in": rng.normal(size=(16, 32)).astype(np.float32) * 0.1,
        "out": rng.normal(size=(32, 4)).astype(np.float32) * 0.1,
    }
    inputs, wanted = rng.normal(size=(32, 16)).astype(np.float32), rng.normal(size=(32, 4)).astype(np.float32)

    def loss(weights, inputs, wanted):
        return jnp.mean((jnp.tanh(inputs @ weights["in"]) @ weights["out"] - wanted) ** 2)

    def step(weights, inputs, wanted):
        value, slope = jax.value_and_grad(loss)(weights, inputs, wanted)
        return jax.tree.map(lambda w, g: w - 0.5 * g, weights, slope), value

    def losses(put):
        state = {"in": put(weights["in"], None, "model"), "out": put(weights["out"], "model", None)}
        x, y = put(inputs, "data"), put(wanted, "data")
        run = jax.jit(step, donate_argnums=0)
        found = []
        for _ in range(20):
            state, value = run(state, x, y)
            found.append(value)
        return [float(value) for value in found]

    spread = losses(lambda value, *spec: put(value, m, *spec))
    alone = losses(lambda value, *spec: jax.device_put(value, DEVICES[0]))
    assert spread[-1] < spread[0] * 0.9
    np.testing.assert_allclose(spread, alone, rtol=1e-5)


@check
def many_launches_without_waiting():
    m = mesh(8)
    x = put(np.ones((8, 4), np.float32), m, "x")
    f = jax.jit(lambda x: x + x.sum() * 0 + 1)
    local = jax.jit(lambda x: x * 2)
    own = jax.device_put(np.float32(1), DEVICES[6])
    for _ in range(300):
        x, own = f(x), local(own) / 2
    equal(x, np.full((8, 4), 301, np.float32))
    assert float(own) == 1


@check
def same_bits_in_every_run_and_order():
    value = np.random.default_rng(1).normal(size=(8, 1000)).astype(np.float32)
    f = functools.partial(jax.jit, static_argnums=())(lambda x: x.sum(0))
    found = []
    for order in [DEVICES, DEVICES, DEVICES[[0, 4, 1, 5, 2, 6, 3, 7]]]:
        found.append(np.asarray(f(put(value, Mesh(order, ("x",)), "x"))))
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


@check
def programs_tell_of_themselves():
    m = mesh(8)
    x = put(np.ones((8, 64), np.float32), m, "x")
    compiled = jax.jit(lambda x: x @ x.T, out_shardings=NamedSharding(m, P())).lower(x).compile()
    text = compiled.as_text()
    assert "HloModule" in text, text[:200]
    cost = compiled.cost_analysis()
    assert cost["flops"] > 0, cost
    assert compiled.memory_analysis().argument_size_in_bytes == 64 * 4
    equal(compiled(x), np.full((8, 8), 64, np.float32))


@check
@server_only
def a_failure_on_one_worker_fails_the_launch():
    m = mesh(8)
    too_many = 1 << 47
    bad = jax.jit(lambda x: jnp.broadcast_to(x, (too_many,)) + jnp.arange(too_many, dtype=jnp.float32))
    pick = jax.jit(lambda x: x[:1] + 0)
    pieces = [jax.device_put(np.ones(1, np.float32), device) for device in DEVICES]
    try:
        pieces[6] = pick(bad(jax.device_put(np.float32(1), DEVICES[6])))
        whole = jax.make_array_from_single_device_arrays((8,), NamedSharding(m, P("x")), pieces)
        result = jax.jit(lambda x: x + x.sum())(whole)
        raises(jax.errors.JaxRuntimeError, lambda: jax.block_until_ready(result), "Out of memory")
    except jax.errors.JaxRuntimeError as error:
        assert "Out of memory" in str(error), error
    equal(jax.jit(lambda x: x + x.sum())(put(np.ones(8, np.float32), m, "x")), np.full(8, 9, np.float32))


if __name__ == "__main__":
    sys.exit(main())
