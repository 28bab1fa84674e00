"""Clients that come, go and die, on one server; a worker that stands still."""

import os
import signal
import time

import pytest
from conftest import CONNECT, client_status, wait_for

PRELUDE = """
import json, os, sys, time
import numpy as np, jax, jax.numpy as jnp, harness
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
def grid(n=8): return Mesh(np.array(jax.devices()[:n]), ("x",))
def rows(): return NamedSharding(grid(), P("x"))
"""

# A client that trains until it is killed, with 64 MiB on the devices.
TRAINS_FOREVER = (
    PRELUDE
    + """
x = jax.device_put(np.ones((4096, 4096), np.float32), rows())
step = jax.jit(lambda x: x * 0.5 + jnp.sum(x) / x.size, donate_argnums=0)
i = 0
while True:
    x = step(x)
    i += 1
    if i == 5:
        x.block_until_ready()
        print("training", flush=True)
    if i % 20 == 0:
        x.block_until_ready()
"""
)

# A client that does a bit of everything, and says so.
WORKS = (
    PRELUDE
    + """
x = jax.device_put(np.arange(64, dtype=np.float32), rows())
assert float(jax.jit(jnp.sum)(x)) == 2016
assert np.array_equal(np.asarray(jax.jit(lambda x: x * 2)(x)), np.arange(64) * 2)
print("works")
"""
)


def read_until(process, word, seconds=120):
    seen = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        line = process.stdout.readline()
        if not line:
            break
        seen.append(line)
        if word in line:
            return
    process.kill()
    raise AssertionError(f"{word!r} never came; seen:\n{''.join(seen[-40:])}")


def works(cluster):
    status, output = cluster.run_code(WORKS, timeout=120)
    assert status == 0 and "works" in output, output[-3000:]


def resident_bytes(processes):
    return sum(process.memory_info().rss for process in processes)


def test_two_clients_at_once_do_not_see_each_other(cluster):
    code = (
        PRELUDE
        + """
me = int(sys.argv[1])
x = jax.device_put(np.full((64,), me, np.float32), rows())
step = jax.jit(lambda x: x * 1.0 + 1.0)
for i in range(300):
    x = step(x)
    if i % 50 == 0:
        assert np.array_equal(np.asarray(x), np.full((64,), me + i + 1)), np.asarray(x)
assert np.array_equal(np.asarray(x), np.full((64,), me + 300))
y = jax.device_put(np.full((8,), me), jax.devices()[me % 8])
y.delete()
print("client", me, "done")
"""
    )
    clients = [cluster.start_client(["-c", code, str(me)]) for me in (1, 100)]
    for me, client in zip((1, 100), clients):
        output, _ = client.communicate(timeout=240)
        assert client_status(client.returncode, output) == 0 and f"client {me} done" in output, output[-3000:]


def test_a_client_that_leaves_leaves_nothing(cluster):
    works(cluster)
    wait_for(lambda: cluster.totals()["array_bytes"] == 0, 60, f"no array bytes: {cluster.totals()}")


def test_a_killed_client_loses_its_arrays_and_disturbs_nobody(own_cluster):
    cluster = own_cluster("--workers", "1", "--devices_per_worker", "8")
    workers = cluster.children("worker")
    assert len(workers) == 1, [process.cmdline() for process in cluster.children()]

    # Once for the executables, threads and pools that stay.
    works(cluster)
    warm = cluster.start_client(["-c", TRAINS_FOREVER])
    read_until(warm, "training")
    warm.kill()
    warm.wait()
    wait_for(lambda: cluster.totals()["array_bytes"] == 0, 60, f"no array bytes: {cluster.totals()}")
    time.sleep(1)
    before = resident_bytes(workers)

    for _ in range(3):
        other = cluster.start_client(["-c", TRAINS_FOREVER])
        client = cluster.start_client(["-c", TRAINS_FOREVER])
        read_until(client, "training")
        read_until(other, "training")
        assert cluster.totals()["array_bytes"] >= 128 << 20
        os.kill(client.pid, signal.SIGKILL)
        client.wait()
        # The other client's arrays stay, and it goes on.
        wait_for(lambda: cluster.totals()["array_bytes"] < 200 << 20, 5, f"one client's bytes: {cluster.totals()}")
        time.sleep(0.5)
        assert other.poll() is None
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
        killed = time.monotonic()
        works(cluster)
        wait_for(lambda: cluster.totals()["array_bytes"] == 0, 5, f"no array bytes: {cluster.totals()}")
        wait_for(
            lambda: resident_bytes(workers) <= before * 1.1 + (50 << 20),
            max(1.0, 5 - (time.monotonic() - killed)),
            f"worker's memory back from {resident_bytes(workers) >> 20} to {before >> 20} MiB",
        )
    assert cluster.children("worker")[0].pid == workers[0].pid, "the worker was replaced"


STALLED = (
    PRELUDE
    + """
step = jax.jit(lambda x: x + 1)
x = jax.device_put(np.zeros((), np.int32), jax.devices()[0])
x = step(x)
x.block_until_ready()
print("go", flush=True)
sys.stdin.readline()
start = time.monotonic()
for i in range(25_000):
    x = step(x)
print("issued", round(time.monotonic() - start, 2), flush=True)
assert int(x) == 25_001, int(x)
y = jax.device_put(np.arange(8), jax.devices()[3])
assert np.array_equal(np.asarray(jax.jit(lambda y: y * 3)(y)), np.arange(8) * 3)
print("right", round(time.monotonic() - start, 2), flush=True)
"""
)


def test_25_000_executes_to_a_stalled_worker(own_cluster):
    import subprocess

    cluster = own_cluster("--workers", "1", "--devices_per_worker", "8")
    (worker,) = cluster.children("worker")
    (proxy,) = cluster.children("proxy")
    client = cluster.start_client(["-c", STALLED], stdin=subprocess.PIPE)
    read_until(client, "go")
    before = {process.pid: process.memory_info().rss for process in (worker, proxy)}
    peak = dict(before)
    worker.suspend()
    try:
        client.stdin.write("\n")
        client.stdin.flush()
        end = time.monotonic() + 3
        while time.monotonic() < end:
            for process in (worker, proxy):
                peak[process.pid] = max(peak[process.pid], process.memory_info().rss)
            time.sleep(0.02)
    finally:
        worker.resume()
    while client.poll() is None:
        for process in (worker, proxy):
            peak[process.pid] = max(peak[process.pid], process.memory_info().rss)
        time.sleep(0.02)
        if time.monotonic() > end + 120:
            client.kill()
    output, _ = client.communicate()
    assert client_status(client.returncode, output) == 0 and "right" in output, output[-3000:]
    for process in (worker, proxy):
        grown = (peak[process.pid] - before[process.pid]) >> 20
        assert grown < 256, f"{process.cmdline()[1]} grew by {grown} MiB"


def test_a_large_constant_is_compiled_and_a_large_array_comes_back(cluster):
    code = (
        PRELUDE
        + """
big = np.random.default_rng(0).normal(size=(3 << 20,)).astype(np.float32)
assert np.array_equal(np.asarray(jax.jit(lambda: jnp.asarray(big) + 0)()), big)
x = np.random.default_rng(1).integers(0, 255, (512 << 20,), dtype=np.uint8)
assert np.array_equal(np.asarray(jax.device_put(x, jax.devices()[0])), x)
print("came back")
"""
    )
    status, output = cluster.run_code(code, timeout=240)
    assert status == 0 and "came back" in output, output[-3000:]


def test_strangers_on_the_port_disturb_nobody(cluster):
    """Bytes that are no gRPC, half requests, and connections that say nothing."""
    import socket

    host, port = cluster.environment["JAX_BACKEND_TARGET"].removeprefix("grpc://").rsplit(":", 1)
    idle = []
    for noise in [b"", b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 300, os.urandom(4096)]:
        connection = socket.create_connection((host, int(port)), timeout=5)
        connection.sendall(noise)
        idle.append(connection)
    works(cluster)
    for connection in idle:
        connection.close()
    works(cluster)


@pytest.mark.slow
def test_many_clients_one_after_another(cluster):
    for _ in range(20):
        works(cluster)
    assert cluster.totals()["array_bytes"] == 0


def test_a_client_comes_through_an_abstract_unix_socket(own_cluster):
    cluster = own_cluster("--transport", "unix", "--devices_per_worker", "2")
    assert cluster.environment["JAX_BACKEND_TARGET"].startswith("grpc://unix-abstract:waystation-")
    code = CONNECT + "print(jax.device_count(), int(jax.jit(jnp.sum)(jnp.arange(1000))))"
    status, output = cluster.run_code(code)
    assert status == 0 and "2 499500" in output.splitlines(), output


def test_the_proxy_gives_back_what_a_clients_large_arrays_took(own_cluster):
    cluster = own_cluster("--devices_per_worker", "8")
    (proxy,) = cluster.children("proxy")
    before = proxy.memory_info().rss
    code = (
        PRELUDE
        + """
a = np.ones(512 << 20, np.uint8)
for _ in range(2):
    y = jax.device_put(a, rows())
    y.block_until_ready()
    del y
"""
    )
    status, output = cluster.run_code(code)
    assert status == 0, output
    wait_for(lambda: proxy.memory_info().rss < before + (64 << 20), 20, "the proxy's memory went back to the system")
