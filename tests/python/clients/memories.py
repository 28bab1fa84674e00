"""Kinds of memory: arrays in them, moves between them, and programs that take from and put into them. Runs on one worker."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from harness import check, main
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding
from values import fresh, grid, same

KINDS = sorted(memory.kind for memory in jax.devices()[0].addressable_memories())
VALUE = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)


def shardings(kind):
    return [
        SingleDeviceSharding(jax.devices()[3], memory_kind=kind),
        NamedSharding(grid(4, 2), P("x", "y"), memory_kind=kind),
        NamedSharding(grid(4, 2), P(), memory_kind=kind),
    ]


@check
def the_kinds_are_those_of_a_cpu():
    assert KINDS == ["device", "pinned_host", "unpinned_host"], KINDS
    for device in jax.devices():
        assert device.default_memory().kind == "device"
        assert sorted(memory.kind for memory in device.addressable_memories()) == KINDS


@check
def every_kind_to_every_other():
    for kind in KINDS:
        for index, source in enumerate(shardings(kind)):
            array = jax.device_put(VALUE, source)
            assert array.sharding.memory_kind == kind
            same(fresh(array), VALUE)
            for other in KINDS:
                moved = jax.device_put(array, shardings(other)[index])
                assert moved.sharding.memory_kind == other
                assert all(shard.data.sharding.memory_kind == other for shard in moved.addressable_shards)
                same(fresh(moved), VALUE)
            same(fresh(array), VALUE)


@check
def to_another_device_and_kind_at_once():
    array = jax.device_put(VALUE, SingleDeviceSharding(jax.devices()[0]))
    for device in (jax.devices()[1], jax.devices()[-1]):
        for kind in KINDS:
            moved = jax.device_put(array, SingleDeviceSharding(device, memory_kind=kind))
            assert (moved.devices(), moved.sharding.memory_kind) == ({device}, kind)
            same(fresh(moved), VALUE)


@check
def results_of_programs_lie_where_asked():
    for index, source in enumerate(shardings("device")):
        array = jax.device_put(VALUE, source)
        for kind in ("device", "pinned_host"):
            wanted = shardings(kind)[index]
            result = jax.jit(lambda x: x * 2, out_shardings=wanted)(array)
            assert result.sharding.memory_kind == kind, result.sharding
            same(fresh(result), VALUE * 2)
            back = jax.jit(lambda x: x + 1, out_shardings=source)(jax.device_put(result, source))
            same(fresh(back), VALUE * 2 + 1)


@check
def programs_take_from_host_memory():
    for index, source in enumerate(shardings("pinned_host")):
        array = jax.device_put(VALUE, source)
        target = shardings("device")[index]

        @jax.jit
        def function(x):
            return jax.device_put(x, target) * 2

        result = function(array)
        assert result.sharding.memory_kind == "device"
        same(fresh(result), VALUE * 2)
        through = jax.jit(lambda x: x, in_shardings=source, out_shardings=source)(array)
        assert through.sharding.memory_kind == "pinned_host"
        same(fresh(through), VALUE)


@check
def offloaded_residuals_come_back():
    def loss(x):
        def layer(x, _):
            return jnp.sin(x) * 2, None

        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[], names_which_can_be_offloaded=["y"], offload_src="device", offload_dst="pinned_host"
        )
        y, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy), x, None, length=3)
        return jnp.sum(y)

    gradient = np.asarray(jax.jit(jax.grad(loss))(VALUE))
    plain = jax.grad(lambda x: jnp.sum(jnp.sin(jnp.sin(jnp.sin(x) * 2) * 2) * 2))(VALUE)
    np.testing.assert_allclose(gradient, plain, rtol=1e-5)


if __name__ == "__main__":
    sys.exit(main())
