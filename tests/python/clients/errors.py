"""What goes wrong in a program reaches Python with XLA's own words, and only what depends on it."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pathwaysutils
from harness import check, main, raises, server_only
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

# Before the first use of a device, as pathwaysutils wants it.
pathwaysutils.initialize()


def works():
    assert float(jax.jit(lambda x: x.sum() * 2)(np.arange(5.0))) == 20


def unknown_custom_call(x):
    return jax.ffi.ffi_call("waystation_no_such_target", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


# More bytes than any address space has, so that the allocation fails at once wherever it is tried.
TOO_MANY = 1 << 47


@check
def a_program_that_does_not_compile():
    text = raises(JaxRuntimeError, lambda: jax.jit(unknown_custom_call)(jnp.ones(3)), "waystation_no_such_target")
    assert "custom call" in text.lower() or "custom-call" in text.lower() or "handler" in text.lower(), text
    works()


@check
def a_program_that_does_not_compile_fails_each_time():
    for _ in range(3):
        raises(JaxRuntimeError, lambda: jax.jit(unknown_custom_call)(jnp.ones(3)), "waystation_no_such_target")
    works()


@check
def a_shape_beyond_64_bits_ends_nobody():
    raises(Exception, lambda: jnp.zeros((1 << 62, 1 << 10)))
    works()


@check
def a_program_that_fails_when_run():
    def run():
        jax.block_until_ready(jax.jit(lambda x: jnp.broadcast_to(x, (TOO_MANY,)) + jnp.arange(TOO_MANY, dtype=jnp.float32))(1.0))

    text = raises(JaxRuntimeError, run)
    assert "emory" in text or "RESOURCE_EXHAUSTED" in text or "alloc" in text, text
    works()


@check
def an_error_poisons_what_depends_on_it_and_nothing_else():
    bad_program = jax.jit(lambda x: jnp.broadcast_to(x, (TOO_MANY,)) + jnp.arange(TOO_MANY, dtype=jnp.float32))
    good = jax.jit(lambda x: x + 1)
    consume = jax.jit(lambda b: b[:1] * 2)
    fine = good(jnp.ones(4))
    for _ in range(4):
        try:
            bad = bad_program(1.0)
        except JaxRuntimeError:
            # Natively, and at the first execution of a program, the failure may come at the call. From the second on the
            # server is not waited for, and only the results can tell.
            continue
        try:
            dependent = consume(bad)
        except JaxRuntimeError:
            pass  # a program that is called for the first time reports its argument's error at the call
        else:
            raises(JaxRuntimeError, lambda: jax.block_until_ready(dependent), "Out of memory")
            raises(JaxRuntimeError, lambda: np.asarray(dependent), "Out of memory")
        raises(JaxRuntimeError, lambda: jax.block_until_ready(bad), "Out of memory")
        assert np.array_equal(np.asarray(good(fine)), np.full(4, 3))
    assert np.array_equal(np.asarray(fine), np.full(4, 2))
    works()


@check
def mixed_arguments_fail_if_one_does():
    bad_program = jax.jit(lambda x: jnp.broadcast_to(x, (TOO_MANY,)) + jnp.arange(TOO_MANY, dtype=jnp.float32))
    add = jax.jit(lambda a, b: a + b[0])
    for _ in range(3):
        try:
            raises(JaxRuntimeError, lambda: jax.block_until_ready(add(jnp.ones(2), bad_program(1.0))))
        except JaxRuntimeError:
            pass
    assert np.array_equal(np.asarray(add(jnp.ones(2), jnp.ones(1))), [2, 2])


@check
def wrong_uses_are_refused_in_words():
    mesh = Mesh(np.array(jax.devices()), ("x",))
    raises(ValueError, lambda: jax.device_put(np.ones(7), NamedSharding(mesh, P("x"))))
    works()


@check
@server_only
def colocated_python_is_refused_by_name():
    # What jax.experimental.colocated_python sends, without its pickled function (which needs the package cloudpickle).
    from jax.extend import ifrt_programs

    programs = ifrt_programs.ifrt_programs
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("x",)), P())
    specs = (jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding),)
    program = programs.make_colocated_python_program(
        "double", b"pickle", sharding._internal_device_list, specs, specs  # pylint: disable=protected-access
    )
    options = programs.make_colocated_python_compile_options()
    client = jax.devices()[0].client
    raises(Exception, lambda: client.compile_ifrt_program(program, options), "UNIMPLEMENTED", "CustomCallProgram")
    works()


@check
@server_only
def unknown_plugin_programs_are_refused():
    from pathwaysutils import plugin_executable

    for body in ['{"profileRequest": {"traceLocation": "gs://bucket/x"}}', '{"reshardRequest": {}}', "not json", "{}"]:

        def run():
            _, done = plugin_executable.PluginExecutable(body).call()
            done.result()

        raises(Exception, run, "Bad PluginProgram")
    works()


@check
@server_only
def profiler_start_fails_with_a_clear_message():
    raises(Exception, lambda: jax.profiler.start_trace("gs://bucket/profile"), "")
    works()


@check
@server_only
def callbacks_are_refused_in_the_client():
    raises(Exception, lambda: jax.jit(lambda x: jax.pure_callback(lambda a: a, x, x))(np.float32(1)).block_until_ready(), "allback")
    works()


@check
def the_server_goes_on_after_all_this():
    works()
    x = jax.device_put(np.arange(8.0), NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x")))
    assert float(jax.jit(jnp.sum)(x)) == 28


if __name__ == "__main__":
    sys.exit(main())
