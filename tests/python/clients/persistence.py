"""Checkpoints that the worker writes and reads: Orbax through pathwaysutils, and plain Orbax on the other side."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pathwaysutils
from harness import check, main, raises, server_only, status
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

pathwaysutils.initialize()

SCRATCH = pathlib.Path(os.environ["SCRATCH"])
MEGABYTE = 1 << 20


def grid(rows, columns, devices=None):
    devices = jax.devices() if devices is None else devices
    return Mesh(np.array(devices[: rows * columns]).reshape(rows, columns), ("x", "y"))


def values():
    random = np.random.default_rng(5)
    return {
        "matrix": random.normal(size=(64, 32)).astype(np.float32),
        "half": random.normal(size=(32, 16)).astype(jnp.bfloat16),
        "counts": random.integers(-1000, 1000, (16,)).astype(np.int32),
        "nested": {"deep": random.normal(size=(8, 4, 8)).astype(np.float32), "step": np.int32(17)},
        "uneven": random.normal(size=(24, 40)).astype(np.float32),
    }


def specs():
    return {
        "matrix": P("x", "y"),
        "half": P("y"),
        "counts": P(),
        "nested": {"deep": P(None, "x", "y"), "step": P()},
        "uneven": P(None, ("x", "y")),
    }


def other_specs():
    return {
        "matrix": P("y", None),
        "half": P(("x", "y")),
        "counts": P("x"),
        "nested": {"deep": P("y"), "step": P()},
        "uneven": P("x", "y"),
    }


def place(tree, specs, mesh):
    return jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), tree, specs)


def restore_arguments(tree, specs, mesh):
    return jax.tree.map(
        lambda leaf, spec: ocp.ArrayRestoreArgs(
            sharding=NamedSharding(mesh, spec), global_shape=np.shape(leaf), dtype=np.asarray(leaf).dtype
        ),
        tree,
        specs,
    )


def same(restored, expected):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(restored), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype and a.shape == b.shape, (path, a.dtype, b.dtype, a.shape, b.shape)
        assert a.tobytes() == b.tobytes(), path


def handler():
    return ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=False)


def stock_orbax(code, *arguments):
    """Runs a piece of Python with plain JAX on CPU and plain Orbax."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "IFRT_PROXY", "ENABLE_PATHWAYS"))}
    environment["JAX_PLATFORMS"] = "cpu"
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], env=environment, text=True, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@check
@server_only
def the_pathways_handler_is_registered():
    registered = ocp.type_handlers.get_type_handler(jax.Array)
    assert type(registered).__name__ == "CloudPathwaysArrayHandler", registered


@check
def save_and_restore_with_other_shardings():
    tree = place(values(), specs(), grid(4, 2))
    checkpointer = ocp.Checkpointer(handler())
    checkpointer.save(SCRATCH / "plain", args=ocp.args.PyTreeSave(tree))
    restored = checkpointer.restore(
        SCRATCH / "plain",
        args=ocp.args.PyTreeRestore(restore_args=restore_arguments(values(), other_specs(), grid(2, 4))),
    )
    same(restored, values())
    assert restored["matrix"].sharding.is_equivalent_to(NamedSharding(grid(2, 4), P("y", None)), 2)
    # Some on devices of the second half alone (the second worker, where there are two).
    half = grid(2, 2, jax.devices()[4:])
    same(checkpointer.restore(SCRATCH / "plain", args=ocp.args.PyTreeRestore(restore_args=restore_arguments(values(), specs(), half))), values())


@check
@server_only
def the_bytes_do_not_pass_through_the_client():
    mesh = grid(4, 2)
    make = jax.jit(
        lambda: jnp.arange(4 * MEGABYTE, dtype=jnp.float32).reshape(2048, 2048) * 3,
        out_shardings=NamedSharding(grid(2, 2), P("x", "y")),
    )
    array = make()  # 16 MiB, made on the devices of one worker
    jax.block_until_ready(array)
    before = status()
    checkpointer = ocp.Checkpointer(handler())
    checkpointer.save(SCRATCH / "big", args=ocp.args.PyTreeSave({"big": array}))
    arguments = {"big": ocp.ArrayRestoreArgs(sharding=NamedSharding(mesh, P("y", "x")), global_shape=array.shape, dtype=array.dtype)}
    restored = checkpointer.restore(SCRATCH / "big", args=ocp.args.PyTreeRestore(restore_args=arguments))
    jax.block_until_ready(restored)
    after = status()
    for counter in ("stored_bytes", "fetched_bytes"):
        assert after[counter] - before[counter] < MEGABYTE, (counter, before[counter], after[counter])
    assert after["totals"]["saved_bytes"] - before["totals"]["saved_bytes"] >= 16 * MEGABYTE
    assert after["totals"]["restored_bytes"] - before["totals"]["restored_bytes"] >= 16 * MEGABYTE
    same(restored, {"big": np.arange(4 * MEGABYTE, dtype=np.float32).reshape(2048, 2048) * 3})


@check
def asynchronous_checkpointer():
    tree = place(values(), specs(), grid(4, 2))
    with ocp.AsyncCheckpointer(handler()) as checkpointer:
        checkpointer.save(SCRATCH / "later", args=ocp.args.PyTreeSave(tree))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(
            SCRATCH / "later", args=ocp.args.PyTreeRestore(restore_args=restore_arguments(values(), specs(), grid(4, 2)))
        )
    same(restored, values())


@check
def checkpoint_manager_over_steps():
    mesh = grid(4, 2)
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=True)
    with ocp.CheckpointManager(SCRATCH / "manager", options=options, item_handlers=handler()) as manager:
        for step in range(3):
            tree = place(jax.tree.map(lambda leaf: leaf + leaf.dtype.type(step), values()), specs(), mesh)
            manager.save(step, args=ocp.args.PyTreeSave(tree))
        manager.wait_until_finished()
        assert list(manager.all_steps()) == [1, 2]
        restored = manager.restore(
            2, args=ocp.args.PyTreeRestore(restore_args=restore_arguments(values(), other_specs(), mesh))
        )
    same(restored, jax.tree.map(lambda leaf: leaf + leaf.dtype.type(2), values()))


@check
def saving_while_training_goes_on():
    """The values saved are those at the moment of the save, though the next step donates the arrays."""
    mesh = grid(2, 2)
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jax.device_put(np.zeros((64, 64), np.float32), NamedSharding(mesh, P("x", "y")))
    with ocp.AsyncCheckpointer(handler()) as checkpointer:
        for i in range(3):
            x = step(x)
        checkpointer.save(SCRATCH / "moving", args=ocp.args.PyTreeSave({"x": x}))
        for i in range(10):
            x = step(x)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(
            SCRATCH / "moving",
            args=ocp.args.PyTreeRestore(
                restore_args={"x": ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=(64, 64), dtype=np.float32)}
            ),
        )
    assert np.array_equal(np.asarray(restored["x"]), np.full((64, 64), 3)), np.asarray(restored["x"])[0, 0]
    assert np.array_equal(np.asarray(x), np.full((64, 64), 13))


@check
def plain_orbax_reads_what_the_worker_wrote():
    tree = place(values(), specs(), grid(4, 2))
    ocp.Checkpointer(handler()).save(SCRATCH / "forward", args=ocp.args.PyTreeSave(tree))
    np.savez(SCRATCH / "forward.npz", **flat(values()))
    stock_orbax(
        """if 1:
        import sys, numpy as np, jax, orbax.checkpoint as ocp
        sys.path.insert(0, sys.argv[3])
        from persistence import flat, values
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), values())
        restored = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)).restore(
            sys.argv[1], args=ocp.args.PyTreeRestore(restore_args=as_numpy))
        expected = np.load(sys.argv[2])
        found = flat(restored)
        assert set(found) == set(expected.files), (set(found), expected.files)
        for name in expected.files:
            a, b = np.asarray(found[name]), expected[name]
            assert a.shape == b.shape and a.tobytes() == b.tobytes(), name
        """,
        SCRATCH / "forward",
        SCRATCH / "forward.npz",
        pathlib.Path(__file__).parent,
    )


@check
def the_worker_reads_what_plain_orbax_wrote():
    for zarr3 in (False, True):
        folder = SCRATCH / f"backward{2 + zarr3}"
        stock_orbax(
            """if 1:
            import sys, numpy as np, jax, orbax.checkpoint as ocp
            sys.path.insert(0, sys.argv[2])
            from persistence import values
            tree = jax.tree.map(jax.numpy.asarray, values())
            handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=sys.argv[3] == "True")
            # Chunks far smaller than what is asked for.
            small = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=256), tree)
            ocp.Checkpointer(handler).save(sys.argv[1], args=ocp.args.PyTreeSave(tree, save_args=small))
            """,
            folder,
            pathlib.Path(__file__).parent,
            zarr3,
        )
        assert (folder / "matrix" / ("zarr.json" if zarr3 else ".zarray")).is_file()
        restored = ocp.Checkpointer(handler()).restore(
            folder, args=ocp.args.PyTreeRestore(restore_args=restore_arguments(values(), specs(), grid(4, 2)))
        )
        same(restored, values())


def flat(tree):
    return {
        jax.tree_util.keystr(path): np.asarray(leaf).view(np.uint16) if np.asarray(leaf).dtype == jnp.bfloat16 else np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


@check
@server_only
def restoring_what_is_not_there_says_what():
    arguments = {"x": ocp.ArrayRestoreArgs(sharding=NamedSharding(grid(2, 2), P("x")), global_shape=(64, 32), dtype=np.float32)}
    checkpointer = ocp.Checkpointer(handler())
    tree = place({"x": values()["matrix"]}, {"x": P()}, grid(2, 2))
    checkpointer.save(SCRATCH / "broken", args=ocp.args.PyTreeSave(tree))
    for file in (SCRATCH / "broken" / "x").iterdir():
        file.unlink()
    text = raises(
        Exception,
        lambda: jax.block_until_ready(checkpointer.restore(SCRATCH / "broken", args=ocp.args.PyTreeRestore(restore_args=arguments))),
    )
    assert "FAILED_PRECONDITION" in text, text
    assert "NOT_FOUND" not in text and "INTERNAL" not in text, text
    assert float(jax.jit(jnp.sum)(np.ones(3))) == 3


@check
@server_only
def restoring_another_shape_says_which():
    checkpointer = ocp.Checkpointer(handler())
    tree = place({"x": values()["matrix"]}, {"x": P("x")}, grid(2, 2))
    checkpointer.save(SCRATCH / "shape", args=ocp.args.PyTreeSave(tree))
    for shape, dtype in [((64, 16), np.float32), ((64, 32), np.int32)]:
        arguments = {"x": ocp.ArrayRestoreArgs(sharding=NamedSharding(grid(2, 2), P("x")), global_shape=shape, dtype=dtype, strict=False)}
        raises(
            Exception,
            lambda: jax.block_until_ready(checkpointer.restore(SCRATCH / "shape", args=ocp.args.PyTreeRestore(restore_args=arguments))),
            "FAILED_PRECONDITION",
        )


if __name__ == "__main__":
    sys.exit(main())
