"""What is measured. A part is set up once in a client; the function that it gives is one leg, called as often as there are
pairs, and answers with its figures."""

import contextlib
import gc
import statistics
import time

import numpy as np


def now():
    return time.perf_counter()


@contextlib.contextmanager
def no_garbage_collection():
    """For short times in new processes: what there is to collect depends on what a side has imported."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def dispatch():
    """Calls of a program that does next to nothing: what a call costs."""
    import jax

    add = jax.jit(lambda x: x + 1)
    x = jax.device_put(np.arange(8, dtype=np.float32))
    for _ in range(50):
        add(x).block_until_ready()

    def leg(calls=2000):
        start = now()
        results = [add(x) for _ in range(calls)]
        enqueued = now()
        jax.block_until_ready(results)
        sustained = now()
        del results
        chain_start = now()
        y = x
        for _ in range(calls):
            y = add(y)
        y.block_until_ready()
        chained = now()
        return {
            "enqueued_per_second": calls / (enqueued - start),
            "sustained_per_second": calls / (sustained - start),
            "chained_per_second": calls / (chained - chain_start),
            "calls": 2 * calls,
        }

    return leg


def latency():
    """Calls of the same program, each waited for: until it has run, or until its result is here."""
    import jax

    add = jax.jit(lambda x: x + 1)
    x = jax.device_put(np.arange(8, dtype=np.float32))
    waits = {"block": lambda: add(x).block_until_ready(), "fetch": lambda: np.asarray(add(x))}
    for wait in waits.values():
        for _ in range(50):
            wait()

    def leg(wait, calls=400):
        taken = []
        for _ in range(calls):
            start = now()
            waits[wait]()
            taken.append((now() - start) * 1e6)
        p99 = statistics.quantiles(taken, n=100)[98] if len(taken) > 1 else taken[0]
        return {"p50_us": statistics.median(taken), "mean_us": statistics.fmean(taken), "p99_us": p99, "calls": calls}

    return leg


def transfer(size_bytes, shards=1):
    """Puts an array, whole or cut over devices, and fetches it back; every fetch is of an array never fetched before."""
    import jax

    sharding = None
    if shards > 1:
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:shards]), ("x",))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))

    # Off the 64-byte grid, so that a native client cannot take the memory over instead of copying.
    raw = np.frombuffer(bytearray(size_bytes + 128), np.uint8)
    offset = (1 - raw.ctypes.data) % 64
    host = raw[offset : offset + size_bytes]
    host[:] = np.resize(np.random.default_rng(0).integers(0, 256, 65_537, np.uint8), size_bytes)
    first = jax.device_put(host, sharding)
    assert np.array_equal(np.array(first), host), "fetched bytes differ from those put"
    del first

    def leg(repeats=3):
        put, fetched = [], []
        for _ in range(repeats):
            start = now()
            array = jax.device_put(host, sharding)
            array.block_until_ready()
            put.append(now() - start)
            start = now()
            # A copy, or a native client would hand out its own memory.
            value = np.array(array, copy=True)
            fetched.append(now() - start)
            del array, value
        return {
            "put_bytes_per_second": size_bytes / statistics.median(put),
            "fetched_bytes_per_second": size_bytes / statistics.median(fetched),
            "moved_megabytes": 2 * repeats * size_bytes / 1e6,
        }

    return leg


def all_reduce(size_bytes):
    """The sum over all devices of so many bytes on each."""
    import jax

    whole, cut = over_all_devices()
    array = jax.device_put(np.ones((len(jax.devices()), size_bytes // 4), np.float32), cut)
    add_up = jax.jit(lambda a: a.sum(0), out_shardings=whole)
    add_up(array).block_until_ready()

    def leg():
        start = now()
        add_up(array).block_until_ready()
        return {"seconds": now() - start}

    return leg


def moved(size_bytes):
    """An array moves from the first half of the devices to the second."""
    import jax

    devices = jax.devices()
    half = len(devices) // 2
    here, there = (
        jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(of), ("d",)), jax.sharding.PartitionSpec("d"))
        for of in (devices[:half], devices[half:])
    )
    array = jax.device_put(np.ones(size_bytes // 4, np.float32), here)
    array.block_until_ready()

    def leg():
        start = now()
        jax.device_put(array, there).block_until_ready()
        return {"seconds": now() - start}

    return leg


def train_step(layers, width, batch, sequence=64, vocabulary=512, rate=1e-3):
    """A transformer's train step (Adam, donated state): (init, step), both to be jitted, and batches of tokens."""
    import jax
    import jax.numpy as jnp

    heads, b1, b2 = 4, 0.9, 0.999

    def init(key):
        keys = iter(jax.random.split(key, 4 * layers + 2))
        normal = lambda *shape: 0.02 * jax.random.normal(next(keys), shape)
        block = lambda: {
            "qkv": normal(width, 3 * width), "out": normal(width, width),
            "up": normal(width, 4 * width), "down": normal(4 * width, width),
        }  # fmt: skip
        params = {"embed": normal(vocabulary, width), "head": normal(width, vocabulary), "blocks": [block() for _ in range(layers)]}
        zeros = jax.tree.map(jnp.zeros_like, params)
        return params, zeros, jax.tree.map(jnp.copy, zeros)

    def norm(x):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

    def loss_of(params, tokens):
        x = params["embed"][tokens]
        mask = jnp.tril(jnp.ones((sequence, sequence), bool))
        for block in params["blocks"]:
            parts = (norm(x) @ block["qkv"]).reshape(batch, sequence, heads, 3 * width // heads)
            q, k, v = jnp.split(parts, 3, -1)
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (width // heads) ** 0.5
            weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), -1)
            x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, sequence, width) @ block["out"]
            x = x + jax.nn.gelu(norm(x) @ block["up"]) @ block["down"]
        logits = jax.nn.log_softmax((x @ params["head"])[:, :-1])
        return -jnp.take_along_axis(logits, tokens[:, 1:, None], -1).mean()

    def step(params, mean, square, tokens):
        loss, grads = jax.value_and_grad(loss_of)(params, tokens)
        mean = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, mean, grads)
        square = jax.tree.map(lambda s, g: b2 * s + (1 - b2) * g * g, square, grads)
        params = jax.tree.map(lambda p, m, s: p - rate * m / (jnp.sqrt(s) + 1e-8), params, mean, square)
        return params, mean, square, loss

    random = np.random.default_rng(1)
    batches = [random.integers(0, vocabulary, (batch, sequence)).astype(np.int32) for _ in range(8)]
    return init, step, batches


def over_all_devices():
    """How data-parallel training lies: (what all devices have, what is cut over them)."""
    import jax

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("d",))
    return tuple(jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for axes in ((), ("d",)))


def train(data_parallel=False, **shape):
    """Steps of training, each with a new batch from the host; the loss is waited for once, at the end."""
    import jax

    init, step, batches = train_step(**shape)
    whole = None
    if data_parallel:
        whole, cut = over_all_devices()
        batches = [jax.device_put(tokens, cut) for tokens in batches]
    step = jax.jit(step, donate_argnums=(0, 1, 2), out_shardings=whole)
    state = jax.jit(init, out_shardings=whole)(jax.random.key(0))
    arrays = len(jax.tree.leaves(state))
    parameter_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state[0]))
    for tokens in batches[:5]:
        *state, loss = step(*state, tokens)
    held = [state, float(loss)]

    def leg(steps=50):
        state = held[0]
        start = now()
        for i in range(steps):
            *state, loss = step(*state, batches[i % len(batches)])
        loss.block_until_ready()
        seconds = now() - start
        held[0] = state
        return {"steps_per_second": steps / seconds, "steps": steps, "arrays": arrays, "parameter_bytes": parameter_bytes, "loss": float(loss)}

    return leg


def first_program():
    """What every side has compiled or loaded in a process before its first measured program, lowered."""
    import jax

    return jax.jit(lambda x: x * 3 + 1).lower(np.float32(0))


def programs(kind, **shape):
    """What compiles and loads are taken of: gives the n-th program, lowered. No two are the same by content; they differ in
    one constant."""
    import jax

    def tiny(n):
        scale = 2 + n / 1024
        return jax.jit(lambda x: x * scale + 1).lower(np.float32(0))

    if kind != "tiny":
        # Draws keys, by small programs.
        state = jax.eval_shape(train_step(**shape)[0], jax.random.key(0))

    def train(n, **more):
        _, step, batches = train_step(rate=1e-3 + n * 1e-7, **shape)
        return jax.jit(step, donate_argnums=(0, 1, 2), **more).lower(*state, batches[0])

    def data_parallel(n):
        whole, cut = over_all_devices()
        return train(n, in_shardings=(whole, whole, whole, cut), out_shardings=whole)

    # What is done once a process is not a program's: connection, first thread of a compiler, first read of a bucket.
    first_program().compile()
    return {"tiny": tiny, "train step": train, "data parallel": data_parallel}[kind]


def compiles(**which):
    """The time from a lowered program to one that can run; a leg takes several, each of them once."""
    import jax
    from jax._src import monitoring

    program = programs(**which)
    hits = []
    monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None)

    def leg(first=0, count=1):
        # Else the client itself would remember the programs.
        jax.clear_caches()
        lowered = [program(n) for n in range(first, first + count)]
        hits.clear()
        with no_garbage_collection():
            start = now()
            compiled = [one.compile() for one in lowered]
            seconds = now() - start
        # So that an executable is nowhere when its program is asked for again.
        del compiled, lowered
        jax.clear_caches()
        gc.collect()
        return {"compile_seconds": seconds / max(count, 1), "programs": count, "jax_hits": len(hits)}

    return leg


def deserialize(folder, **which):
    """The plugin's own time to load programs from files that hold what it has serialized, in the page cache."""
    import pathlib

    import jax
    from jax._src import compiler
    from jaxlib import _jax

    program = programs(**which)
    device = jax.devices()[0]
    options = compiler.get_compile_options(num_replicas=1, num_partitions=1)
    path = lambda n: pathlib.Path(folder, f"{which['kind']}-{n}")

    def load(n):
        return device.client.deserialize_executable(path(n).read_bytes(), _jax.DeviceList((device,)), options)

    def leg(first=0, count=1, write=False):
        if write:
            for n, lowered in (("first", first_program()), *((n, program(n)) for n in range(first, first + count))):
                path(n).write_bytes(lowered.compile().runtime_executable().serialize())
            return {"serialized_bytes": path(first).stat().st_size}
        # As a server's first load is. Not one like those measured: the memory that it takes from the system is half of what a
        # process's first load of a large program costs more than its later ones, and the server pays it too.
        load("first")
        with no_garbage_collection():
            start = now()
            loaded = [load(n) for n in range(first, first + count)]
            seconds = now() - start
        del loaded
        return {"deserialize_seconds": seconds / max(count, 1), "programs": count}

    return leg


def keyed(**shape):
    """Compiles a large train step, and a program that is nearly all one constant; gives their names and ops."""
    import jax

    init, step, batches = train_step(**shape)
    step.__name__ = "many_ops"

    def count(operation):
        return sum(1 + count(op.operation) for region in operation.regions for block in region for op in block)

    def leg(constant_bytes):
        constant = np.random.default_rng(0).standard_normal(constant_bytes // 4).astype(np.float32)

        def one_constant(x):
            return x + constant

        lowered = [
            jax.jit(step, donate_argnums=(0, 1, 2)).lower(*jax.eval_shape(init, jax.random.key(0)), batches[0]),
            jax.jit(one_constant).lower(np.float32(0)),
        ]
        found = []
        for one in lowered:
            one.compile()
            module = one.compiler_ir("stablehlo").operation
            found.append({"name": module.attributes["sym_name"].value, "ops": count(module)})
        return {"programs": found}

    return leg


def program():
    """x + 1 over four f32, as JAX sends it, for clients without Python."""
    import base64

    import jax
    from jaxlib.mlir.dialects import stablehlo

    module = jax.jit(lambda x: x + 1).lower(np.zeros(4, np.float32)).compiler_ir("stablehlo")

    def leg():
        artifact = stablehlo.serialize_portable_artifact(module, stablehlo.get_current_version())
        return {"program_base64": base64.b64encode(artifact).decode()}

    return leg


def address():
    """Where clients without Python connect."""
    import os

    def leg():
        return {"address": os.environ["JAX_BACKEND_TARGET"].removeprefix("grpc://")}

    return leg


def status():
    """The server's own counters."""
    import json
    import os
    import urllib.request

    def leg():
        with urllib.request.urlopen(os.environ["WAYSTATION_STATUS_URL"], timeout=30) as page:
            found = json.load(page)
        return {"status": found}

    return leg


import checkpointing  # noqa: E402 (which takes the clock from here)

PARTS = {
    "checkpoint": checkpointing.checkpoint,
    "objects": checkpointing.objects,
    "program": program,
    "address": address,
    "status": status,
    "dispatch": dispatch,
    "latency": latency,
    "transfer": transfer,
    "train": train,
    "all_reduce": all_reduce,
    "moved": moved,
    "compiles": compiles,
    "deserialize": deserialize,
    "keyed": keyed,
}
