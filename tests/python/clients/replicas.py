"""Programs of several replicas of one partition or several: who acts with whom is written in each of XLA's four ways. JAX made
such programs of `pmap` once and makes them no more, so they are written by hand. Each device has a row of numbers."""

import sys

import jax
import numpy as np
from harness import Skip, check, main, server_only
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

DEVICES = np.array(jax.devices())
TURNED = DEVICES[[0, 4, 1, 5, 2, 6, 3, 7]]
ELEMENTS = {"float32": "f32", "int32": "i32", "int8": "i8"}
COUNT = 16

REDUCER = """({
      ^bb0(%a: tensor<ELEMENT>, %b: tensor<ELEMENT>):
        %s = stablehlo.add %a, %b : tensor<ELEMENT>
        stablehlo.return %s : tensor<ELEMENT>
    })"""
CHANNEL = ", channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>"
# What the numbers in groups are, and what says so.
SAID = {"replicas": "", "partitions": CHANNEL, "whole": CHANNEL, "flat": CHANNEL + ", use_global_device_ids"}


def members(groups, mode, replicas, partitions):
    """Groups of devices, numbered replica by replica."""
    each = range(partitions)
    match mode:
        case "replicas":
            return [[r * partitions + p for r in group] for group in groups for p in each]
        case "partitions":
            return [[r * partitions + p for p in group] for group in groups for r in range(replicas)]
        case "whole":
            return [[r * partitions + p for r in group for p in each] for group in groups]
    return groups


def dense(rows):
    return f"dense<{rows}> : tensor<{len(rows)}x{len(rows[0])}xi64>"


def operations(groups, mode, replicas, partitions):
    """Every operation of these groups: (name, text, function of all rows)."""
    acting = members(groups, mode, replicas, partitions)
    size = len(acting[0])
    written = f"replica_groups = {dense(groups)}{SAID[mode]}"

    def of_groups(give):
        def results(rows):
            found = [None] * len(rows)
            for group in acting:
                for member, result in zip(group, give(rows[group])):
                    found[member] = result
            return found

        return results

    reduce, gather = of_groups(lambda rows: [rows.sum(0, dtype=rows.dtype)] * size), of_groups(lambda rows: [rows.reshape(-1)] * size)
    scatter = of_groups(lambda rows: np.split(rows.sum(0, dtype=rows.dtype), size))
    exchange = of_groups(lambda rows: [np.concatenate([np.split(row, size)[i] for row in rows]) for i in range(size)])
    if mode != "partitions":
        # These cannot say that they are among partitions, nor the others that they are not.
        yield "all_reduce", f"{written}", COUNT, True, reduce
        yield "all_gather", f"all_gather_dim = 0 : i64, {written}", COUNT * size, False, gather
        yield "reduce_scatter", f"scatter_dimension = 0 : i64, {written}", COUNT // size, True, scatter
    if mode in ("replicas", "partitions"):
        split = f"split_dimension = 0 : i64, concat_dimension = 0 : i64, split_count = {size} : i64"
        yield "all_to_all", f"{split}, {written}", COUNT, False, exchange
        pairs = [[group[i], group[(i + 1) % size]] for group in groups for i in range(size)][1:]

        def permute(rows):
            found = np.zeros_like(rows)
            for source, target in members(pairs, mode, replicas, partitions):
                found[target] = rows[source]
            return list(found)

        yield "collective_permute", f"source_target_pairs = {dense(pairs)}{SAID[mode]}", COUNT, False, permute


def load(text, replicas, devices):
    with mlir.make_ir_context():
        program = mlir.module_to_bytecode(ir.Module.parse(text))
    assignment = np.array([device.id for device in devices]).reshape(replicas, -1)
    options = compiler.get_compile_options(
        num_replicas=replicas, num_partitions=assignment.shape[1], device_assignment=assignment
    )
    options.executable_build_options.use_spmd_partitioning = True
    options.executable_build_options.use_shardy_partitioner = False
    return devices[0].client.compile_and_load(program, jax._src.lib.xla_client.DeviceList(tuple(devices)), options)


def execute(loaded, rows, devices):
    """What each device makes of its row; a list of results, by device."""
    x = jax.device_put(rows.reshape(-1), NamedSharding(Mesh(devices, ("x",)), P("x")))
    results = loaded.execute_sharded([x]).disassemble_into_single_device_arrays()
    return [[np.asarray(array) for array in result] for result in results]


def program(replicas, partitions, lines, results, cut=False):
    """A program of these lines on %x, by hand for each device. `results`: (name, size, element)."""
    manual, sharding = "", ""
    if partitions > 1:
        manual = 'mhlo.sharding = "{manual}"'
        sharding = f'mhlo.sharding = "{{devices=[{partitions}]<=[{partitions}]}}"' if cut else 'mhlo.sharding = "{replicated}"'
    pieces = partitions if cut else 1
    body = []

    def call(to, target, operand, type_in, type_out, attributes):
        if partitions == 1:
            target = f'"stablehlo.reshape"(%{operand})'
        else:
            target = f'"stablehlo.custom_call"(%{operand}) <{{call_target_name = "{target}"}}>'
        body.append(f"    %{to} = {target} {{{attributes}}} : ({type_in}) -> {type_out}")

    _, count, element = results[0]
    x, x_whole = f"tensor<{COUNT}x{element}>", f"tensor<{COUNT * pieces}x{element}>"
    call("w", "Sharding", "arg", x_whole, x_whole, sharding)
    call("x", "SPMDFullToShardShape", "w", x_whole, x, manual)
    body += [line.replace("MANUAL", manual).replace("ELEMENT", element) for line in lines]
    types = []
    for name, count, element in results:
        own, whole = f"tensor<{count}x{element}>", f"tensor<{count * pieces}x{element}>"
        call(f"{name}s", "Sharding", name, own, own, manual)
        call(f"{name}o", "SPMDShardToFullShape", f"{name}s", own, whole, sharding)
        types.append(whole)
    outs = ", ".join(f"{type} {{{sharding}}}" for type in types)
    names = ", ".join(f"%{name}o" for name, _, _ in results)
    return (
        f"module @replicas attributes {{mhlo.num_partitions = {partitions} : i32, mhlo.num_replicas = {replicas} : i32}} {{\n"
        f"  func.func public @main(%arg: {x_whole} {{{sharding}}}) -> ({outs}) {{\n"
        + "\n".join(body)
        + f"\n    return {names} : {', '.join(types)}\n  }}\n}}\n"
    )


def try_all(replicas, partitions, groups, mode, devices=DEVICES, dtype="float32"):
    element = ELEMENTS[dtype]
    lines, results, wanted = [], [], []
    rows = np.random.default_rng(0).integers(-4, 5, size=(8, COUNT)).astype(dtype)
    for opcode, said, count, reduces, give in operations(groups, mode, replicas, partitions):
        name = f"r{len(results)}"
        region = REDUCER if reduces else ""
        kind = f"(tensor<{COUNT}xELEMENT>) -> tensor<{count}xELEMENT>"
        lines.append(f'    %{name} = "stablehlo.{opcode}"(%x) <{{{said}}}> {region} {{MANUAL}} : {kind}')
        results.append((name, count, element))
        wanted.append((opcode, give(rows)))
    found = execute(load(program(replicas, partitions, lines, results), replicas, devices), rows, devices)
    for (opcode, wanted), found in zip(wanted, found, strict=True):
        for place, (a, b) in enumerate(zip(wanted, found, strict=True)):
            assert a.dtype == b.dtype and np.array_equal(a, b), (opcode, mode, place, a, b)


@check
def replicas_of_one_partition():
    for groups in [[[0, 1, 2, 3, 4, 5, 6, 7]], [[0, 5], [4, 1], [7, 2], [3, 6]], [[6, 4, 2, 0], [1, 3, 5, 7]]]:
        for dtype in ELEMENTS:
            try_all(8, 1, groups, "replicas", dtype=dtype)
    try_all(8, 1, [[0, 5], [4, 1], [7, 2], [3, 6]], "replicas", TURNED)
    try_all(8, 1, [[0, 5], [4, 1], [7, 2], [3, 6]], "flat")


@check
def replicas_of_several_partitions():
    for devices in [DEVICES, TURNED]:
        for replicas, partitions in [(4, 2), (2, 4)]:
            turned = [list(range(replicas))[::-1]]
            try_all(replicas, partitions, turned, "replicas", devices)
            try_all(replicas, partitions, [list(range(partitions))[::-1]], "partitions", devices)
            try_all(replicas, partitions, turned, "whole", devices)
            try_all(replicas, partitions, [[0, 5], [4, 1], [7, 2], [3, 6]], "flat", devices)
        try_all(4, 2, [[3, 0], [1, 2]], "replicas", devices)
        try_all(4, 2, [[3, 0], [1, 2]], "whole", devices)
        try_all(2, 4, [[3, 0], [1, 2]], "partitions", devices)


@check
def each_device_knows_replica_and_partition():
    lines = []
    for name, opcode in [("r0", "replica_id"), ("r1", "partition_id")]:
        lines.append(f"    %n{name} = stablehlo.{opcode} {{MANUAL}} : tensor<ui32>")
        lines.append(f"    %{name} = stablehlo.reshape %n{name} {{MANUAL}} : (tensor<ui32>) -> tensor<1xui32>")
    lines.append("    %r2 = stablehlo.add %x, %x {MANUAL} : tensor<16xi32>")
    results = [("r2", COUNT, "i32"), ("r0", 1, "ui32"), ("r1", 1, "ui32")]
    rows = np.arange(8 * COUNT, dtype=np.int32).reshape(8, COUNT)
    for replicas, partitions in [(8, 1), (4, 2), (2, 4), (1, 8)]:
        for devices in [DEVICES, TURNED]:
            twice, replica, partition = execute(
                load(program(replicas, partitions, lines, results), replicas, devices), rows, devices
            )
            assert np.array_equal(twice, rows * 2)
            assert [int(n[0]) for n in replica] == [place // partitions for place in range(8)], (replicas, replica)
            assert [int(n[0]) for n in partition] == [place % partitions for place in range(8)], (partitions, partition)


@check
def inside_of_a_loop():
    lines = """    %zero = stablehlo.constant {MANUAL} dense<0> : tensor<i32>
    %one = stablehlo.constant {MANUAL} dense<1> : tensor<i32>
    %end = stablehlo.constant {MANUAL} dense<3> : tensor<i32>
    %l:2 = "stablehlo.while"(%zero, %x) ({
      ^bb0(%i: tensor<i32>, %v: tensor<16xi32>):
        %more = stablehlo.compare LT, %i, %end {MANUAL} : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %more : tensor<i1>
    }, {
      ^bb0(%i: tensor<i32>, %v: tensor<16xi32>):
        %j = stablehlo.add %i, %one {MANUAL} : tensor<i32>
        %m = "stablehlo.collective_permute"(%v) <{source_target_pairs = PAIRS}> {MANUAL} : (tensor<16xi32>) -> tensor<16xi32>
        %u = stablehlo.add %v, %m {MANUAL} : tensor<16xi32>
        stablehlo.return %j, %u : tensor<i32>, tensor<16xi32>
    }) {MANUALS} : (tensor<i32>, tensor<16xi32>) -> (tensor<i32>, tensor<16xi32>)
    %r0 = stablehlo.add %l#1, %x {MANUAL} : tensor<16xi32>"""
    rows = np.random.default_rng(1).integers(0, 9, size=(8, COUNT)).astype(np.int32)
    for replicas, partitions in [(8, 1), (4, 2)]:
        pairs = [[r, (r + 1) % replicas] for r in range(replicas)]
        both = 'mhlo.sharding = "{{manual}, {manual}}"' if partitions > 1 else ""
        text = lines.replace("PAIRS", dense(pairs)).replace("MANUALS", both)
        found = execute(load(program(replicas, partitions, [text], [("r0", COUNT, "i32")]), replicas, DEVICES), rows, DEVICES)[0]
        wanted = rows
        for _ in range(3):
            wanted = wanted + np.roll(wanted, partitions, 0)
        assert np.array_equal(found, wanted + rows), (replicas, found)


@check
@server_only
def results_may_be_cut_over_the_partitions():
    # Natively the process ends here: jaxlib takes the pieces of one replica for those of all devices.
    lines = ["    %r0 = stablehlo.add %x, %x {MANUAL} : tensor<16xi32>"]
    rows = np.arange(8 * COUNT, dtype=np.int32).reshape(8, COUNT)
    for replicas, partitions in [(4, 2), (2, 4)]:
        text = program(replicas, partitions, lines, [("r0", COUNT, "i32")], cut=True)
        found = execute(load(text, replicas, DEVICES), rows, DEVICES)[0]
        assert np.array_equal(found, rows * 2), found


@check
def mapped_in_parallel_as_replicas():
    if jax.version.__version_info__ >= (0, 10):
        raise Skip("JAX 0.10 and newer make no replicas")
    jax.config.update("jax_pmap_shmap_merge", False)
    value = np.arange(24, dtype=np.float32).reshape(8, 3)
    f = jax.pmap(lambda a: jax.lax.psum(a, "x") + jax.lax.axis_index("x"), axis_name="x")
    assert np.array_equal(np.asarray(f(value)), value.sum(0) + np.arange(8, dtype=np.float32)[:, None])
    g = jax.pmap(jax.pmap(lambda a: jax.lax.psum(a, "y"), axis_name="y"), axis_name="x")
    value = value.reshape(4, 2, 3)
    assert np.array_equal(np.asarray(g(value)), np.broadcast_to(value.sum(1, keepdims=True), value.shape))


if __name__ == "__main__":
    sys.exit(main())
