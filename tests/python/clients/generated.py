"""Programs made at random, each with collectives that cross workers; their results go to a file.

Usage: generated.py COUNT HOSTS RESULTS [PLACEMENT]. The devices are taken as HOSTS workers, one after the other. PLACEMENT is
the seed of an order of the devices; without it they are in their own order. What is computed depends on COUNT and the number
of devices alone, so the files of a native run, of a cluster, and of another placement can be compared (test_generated.py).

A program has a mesh and an element type of its own. Inside it, at the top, in a loop whose length it is told at run time,
and in a branch that it is told at run time, are collectives of kinds and over groups that have not had their turn yet. The
values are small whole numbers, and stay so: each result is exact, in whatever order it was added up. Programs of
floating-point numbers have a second part, of any positive numbers, whose results are rounded. Every fourth program has no
collective of its own: XLA's partitioner makes them.
"""

import itertools
import math
import pickle
import sys

import jax
import jax.numpy as jnp
import numpy as np
from harness import NATIVE
from jax import lax
from jax._src.interpreters import mlir
from jax._src.lax import parallel
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

try:
    from jax import shard_map
except ImportError:
    from jax.experimental.shard_map import shard_map

jax.config.update("jax_enable_x64", True)
# JAX itself has it for GPUs only; XLA's CPU backend has none, so the native run does it otherwise.
mlir.register_lowering(parallel.pbroadcast_p, parallel._pbroadcast_lowering, platform="cpu")

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
DTYPES = ("float32", "bfloat16", "float16", "float64", "int8", "int32", "uint8", "complex64")
INSIDE = ("top", "while", "conditional")
# Collectives in each part of a program.
EACH = 2
# Sums of 8 of them are exact in every type.
SMALL = 7
ROWS, COLUMNS = 2, 3


def small(value):
    """Whole numbers of any size made small again, exactly."""
    if jnp.iscomplexobj(value):
        return lax.complex(small(value.real), small(value.imag))
    return jnp.mod(value, jnp.asarray(SMALL, value.dtype))


def meshes(count):
    """Shapes of up to three dimensions for that many devices."""
    found = {(count,)}
    for first in range(2, count):
        if count % first == 0:
            found.add((first, count // first))
            for second in range(2, count // first):
                if (count // first) % second == 0:
                    found.add((first, second, count // first // second))
    return sorted(found)


def crossing_axes(shape, hosts, size):
    """The sets of axes of a mesh over which groups of that size have members on several workers."""
    places = np.arange(math.prod(shape)).reshape(shape) * hosts // math.prod(shape)
    found = []
    for count in range(1, len(shape) + 1):
        for axes in itertools.combinations(range(len(shape)), count):
            groups = np.moveaxis(places, axes, range(-count, 0)).reshape(-1, math.prod(shape[a] for a in axes))
            if groups.shape[1] == size and (groups != groups[:, :1]).any():
                found.append(axes)
    return found


class Turns:
    """Which kinds, types, groups and places have had how many turns; the next is one of the fewest."""

    def __init__(self, groups, random):
        self.random = random
        self.counts = {cell: 0 for cell in itertools.product(KINDS, DTYPES, groups, INSIDE)}

    def dtype(self):
        least = min(self.counts.values())
        left = [sum(c == least for cell, c in self.counts.items() if cell[1] == dtype) for dtype in DTYPES]
        return DTYPES[int(np.argmax(np.array(left) + self.random.random(len(DTYPES))))]

    def take(self, dtype, inside, possible):
        cells = [(kind, dtype, group, inside) for kind in KINDS for group in possible]
        least = min(self.counts[cell] for cell in cells)
        cells = [cell for cell in cells if self.counts[cell] == least]
        cell = cells[self.random.integers(len(cells))]
        self.counts[cell] += 1
        return cell


def collective(kind, axes, size, shape, random):
    """A function from a partition's small values to others of the same shape."""
    rows, columns = shape
    if kind == "all-reduce":
        reduce = [lax.psum, lax.pmax, lax.pmin][random.integers(3)]
        if reduce is not lax.psum:
            # Not defined for complex numbers: of their parts then.
            def extreme(a):
                if jnp.iscomplexobj(a):
                    return lax.complex(reduce(a.real, axes), reduce(a.imag, axes))
                return reduce(a, axes)

            return extreme
        return lambda a: small(lax.psum(a, axes))
    if kind == "all-gather":
        along = int(random.integers(2))
        order = random.permutation(size * shape[along])[: shape[along]]
        return lambda a: jnp.take(lax.all_gather(a, axes, axis=along, tiled=True), order, axis=along)
    if kind == "reduce-scatter":
        along = int(random.integers(2))
        times = [size if dimension == along else 1 for dimension in range(2)]
        return lambda a: jnp.tile(small(lax.psum_scatter(a, axes, scatter_dimension=along, tiled=True)), times)
    if kind == "all-to-all":
        split, concat = [(0, 1), (1, 0), (0, 0), (1, 1)][random.integers(4)]
        return lambda a: lax.all_to_all(a, axes, split, concat, tiled=True).reshape(rows, columns)
    if kind == "collective-permute":
        # Not everyone sends, so not everyone gets something.
        sources, targets = random.permutation(size), random.permutation(size)
        pairs = [(int(s), int(t)) for s, t in zip(sources, targets)][: max(2, size - int(random.integers(2)))]
        return lambda a: lax.ppermute(a, axes, pairs)
    source = int(random.integers(size))
    if NATIVE:
        return lambda a: lax.all_gather(a, axes)[source]
    return lambda a: lax.pbroadcast(a, axes, source)


def manual(index, devices, hosts, groups, turns, random):
    """A program with its collectives written by hand: (function, arguments, shardings of the results)."""
    dtype = turns.dtype()
    choices = [(m, {g: crossing_axes(m, hosts, g) for g in groups}) for m in meshes(devices.size)]
    # A mesh that has at least two kinds of groups, where there is one.
    choices = [c for c in choices if sum(map(bool, c[1].values())) > 1] or choices
    shape, over = choices[random.integers(len(choices))]
    names = tuple("abc"[: len(shape)])
    mesh = Mesh(devices.reshape(shape), names)
    possible = [g for g in groups if over[g]]
    local = (ROWS * math.lcm(*groups), COLUMNS * math.lcm(*groups))
    steps, told = {}, []
    for inside in INSIDE:
        steps[inside] = []
        for _ in range(EACH):
            cell = turns.take(dtype, inside, possible)
            axes = over[cell[2]][random.integers(len(over[cell[2]]))]
            # JAX wants the mesh's order for permutations.
            order = tuple(names[a] for a in (axes if cell[0] == "collective-permute" else random.permutation(axes)))
            steps[inside].append(collective(cell[0], order, cell[2], local, random))
            told.append(cell)

    def run(steps, a):
        for step in steps:
            # Not the same for all, lest XLA sees that nothing need be sent.
            a = step(small(a + sum(lax.axis_index(n) for n in names).astype(a.dtype)))
        return a

    def body(a, rounds, branch):
        top = run(steps["top"], a)
        looped = lax.fori_loop(0, rounds, lambda _, b: run(steps["while"], b), a)
        chosen = lax.cond(branch > 0, lambda b: run(steps["conditional"], b), lambda b: run(steps["top"], b)[::-1], a)
        return top, looped, chosen

    every = P(names)
    total = (local[0] * devices.size, local[1])
    values = random.integers(0, SMALL, total)
    if dtype.startswith("complex"):
        values = values + 1j * random.integers(0, SMALL, total)
    args = [
        jax.device_put(np.asarray(values).astype(jnp.dtype(dtype)), NamedSharding(mesh, every)),
        jax.device_put(np.int32(random.integers(1, 4)), NamedSharding(mesh, P())),
        jax.device_put(np.int32(random.integers(2)), NamedSharding(mesh, P())),
    ]
    exact = shard_map(body, mesh=mesh, in_specs=(every, P(), P()), out_specs=(every,) * 3, check_vma=False)
    rounded, more = None, []
    if jnp.issubdtype(dtype, jnp.floating):
        axes = [over[g][0] for g in possible]

        def sums(a):
            return tuple(lax.psum(a, tuple(names[i] for i in along)) for along in axes)

        rounded = shard_map(sums, mesh=mesh, in_specs=(every,), out_specs=(every,) * len(axes), check_vma=False)
        positive = random.uniform(0.5, 1.5, (devices.size * 2, 65)).astype(jnp.dtype(dtype))
        more = [jax.device_put(positive, NamedSharding(mesh, every))]
    return exact, args, rounded, more, told, possible


def automatic(devices, random):
    """A program that XLA's partitioner makes collectives for."""
    count = devices.size
    # Of other numbers of devices, XLA's partitioner breaks off at some meshes of two dimensions.
    most = 2 if count & (count - 1) == 0 else 1
    shapes = [shape for shape in meshes(count) if len(shape) <= most]
    shape = shapes[random.integers(len(shapes))]
    names = tuple("ab"[: len(shape)])
    mesh = Mesh(devices.reshape(shape), names)
    n = 4 * count
    specs = [P(names), P(None, names), P(names[0], names[-1] if len(names) > 1 else None), P(None, names[0]), P(names[-1])]

    def pick():
        return NamedSharding(mesh, specs[random.integers(len(specs))])

    dtype = ["float32", "int32", "float64", "int16"][random.integers(4)]
    kinds = random.permutation(8)[:3]
    shift = int(random.integers(1, n))
    held = [pick() for _ in kinds]

    def body(a, b):
        for kind, sharding in zip(kinds, held):
            match kind:
                case 0:
                    a = small(a @ b)
                case 1:
                    a = small(a + a.sum(axis=0, keepdims=True))
                case 2:
                    a = small(jnp.roll(a, shift, axis=1) + a.T)
                case 3:
                    a = jnp.sort(a, axis=0)
                case 4:
                    a = small(jnp.cumsum(a, axis=1).astype(a.dtype))
                case 5:
                    a = small(a + a.max(axis=1, keepdims=True) + jnp.argmax(a, axis=0).astype(a.dtype))
                case 6:
                    a = a.reshape(count, n // count, n).transpose(1, 0, 2).reshape(n, n)
                case 7:
                    a = jnp.where(a > b.T, jnp.concatenate([a[n // 2 :], a[: n // 2]]), small(a * b.min()))
            a = lax.with_sharding_constraint(a, sharding)
        return a, small(a.sum())

    args = [jax.device_put(random.integers(0, SMALL, (n, n)).astype(dtype), pick()) for _ in range(2)]
    # The sum needs all that any device holds.
    return jax.jit(body, out_shardings=(pick(), NamedSharding(mesh, P()))), args


def whole(values):
    return [np.asarray(value) for value in values]


def main():
    count, hosts, path, *placement = sys.argv[1:]
    devices = np.array(jax.devices())
    if placement:
        devices = devices[np.random.default_rng(int(placement[0])).permutation(devices.size)]
    groups = [g for g in range(2, devices.size + 1) if devices.size % g == 0]
    turns = Turns(groups, np.random.default_rng(0))
    results = {}
    for index in range(int(count)):
        random = np.random.default_rng([index, devices.size])
        if index % 4 == 3:
            function, args = automatic(devices, random)
            results[index] = {"exact": whole(function(*args)), "rounded": [], "groups": []}
            continue
        exact, args, rounded, more, told, possible = manual(index, devices, int(hosts), groups, turns, random)
        results[index] = {
            "exact": whole(jax.jit(exact)(*args)),
            "rounded": whole(jax.jit(rounded)(*more)) if rounded else [],
            "groups": possible,
            "cells": told,
        }
    with open(path, "wb") as file:
        pickle.dump({"results": results, "counts": turns.counts}, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
