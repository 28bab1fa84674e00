"""The compile cache between whole clusters that share one bucket."""

import contextlib
import signal
import threading

import pytest
from conftest import CONNECT, client_status, wait_for

# Programs whose compiles take a while, told apart by a constant. Prints a number that says that they ran right.
PROGRAMS = (
    CONNECT
    + """
def program(n):
    def f(x):
        for i in range(60):
            x = jnp.sin(x) * (n + i) / 61 + x
        return x.sum()
    return f
total = sum(float(jax.jit(program(n))(jnp.ones(8))) for n in range(5))
print("total", total, flush=True)
"""
)

# A program that takes long to load: its constant is no pattern.
LARGE = (
    CONNECT
    + """
import numpy as np
table = np.random.default_rng(0).random((4096, 4096), dtype=np.float32)
print("got", float(jax.jit(lambda x: x + table)(jnp.zeros((), jnp.float32))[7, 5]) == float(table[7, 5]), flush=True)
"""
)


def counts(cluster):
    return cluster.totals()["cache"]


def test_two_jobs_that_start_together_compile_each_program_once(own_cluster, tmp_path):
    location = f"--gcs_scratch_location=file://{tmp_path}/bucket"
    jobs = [own_cluster(location, "--devices_per_worker=1", "--cache_wait=5m") for _ in range(2)]
    clients = [job.start_client(["-c", PROGRAMS]) for job in jobs]
    outputs = [client.communicate(timeout=300)[0] for client in clients]
    assert [client_status(client.returncode, output) for client, output in zip(clients, outputs)] == [0, 0], outputs
    totals = [[line for line in output.splitlines() if line.startswith("total")] for output in outputs]
    assert totals[0] == totals[1] and totals[0], totals
    one, two = map(counts, jobs)
    programs = len(list((tmp_path / "bucket/exe").rglob("0")))
    assert programs >= 5
    assert one["compiles"] + two["compiles"] == programs, (one, two)
    # Uploads are behind the clients; each program's was done when the other one found it.
    assert one["bad_entries"] + two["bad_entries"] == 0
    assert one["claim_errors"] + two["claim_errors"] == 0


def test_an_entry_that_its_worker_dies_of_is_compiled_anew(own_cluster, tmp_path):
    state = tmp_path / "state"
    flags = [f"--gcs_scratch_location=file://{tmp_path}/bucket", f"--state_dir={state}", "--cache_wait=0"]
    entries = lambda: sorted(path.name for path in (tmp_path / "bucket/exe").rglob("[0-3]"))  # noqa: E731

    first = own_cluster(*flags)
    assert first.run_code(LARGE)[0] == 0
    first.stop()
    slots = entries()

    def kill_in_mid_load(worker, killed, over):
        # The note of the large program is there for as long as its load takes.
        while not killed.is_set() and not over.is_set():
            for note in list((state / "loads").glob("*")):
                with contextlib.suppress(OSError, ValueError):
                    key, object_, _ = note.name.split(".")[:3]
                    size = max(path.stat().st_size for path in (tmp_path / "bucket/exe").rglob(f"{key}/*"))
                    if size > 1 << 20 and object_ != "compiled" and not note.name.endswith(".new"):
                        worker.send_signal(signal.SIGKILL)
                        killed.set()

    # On a busy machine the load may be over before it is seen.
    for _ in range(5):
        second = own_cluster(*flags)
        (worker,) = second.children("worker")
        killed, over = threading.Event(), threading.Event()
        killer = threading.Thread(target=kill_in_mid_load, args=(worker, killed, over), daemon=True)
        killer.start()
        status, output = second.run_code(LARGE)
        over.set()
        killer.join()
        if killed.is_set():
            break
        second.stop()
    else:
        pytest.fail(f"the load was never met: {status}\n{output}")
    assert status != 0
    # `run` starts the worker again, and that one knows.
    wait_for(lambda: [p for p in second.children("worker") if p.pid != worker.pid], 60, "another worker")
    wait_for(lambda: second.status()["ready"], 60, "the cluster is well")
    status, output = second.run_code(LARGE)
    assert status == 0 and "got True" in output, output
    seen = counts(second)
    assert seen["compiles"] == 1 and seen["bad_refused"] >= 1, seen
    second.stop()
    assert len(entries()) == len(slots) + 1 and "1" in entries()

    third = own_cluster(*flags)
    status, output = third.run_code(LARGE)
    assert status == 0 and "got True" in output, output
    assert counts(third)["compiles"] == 0, counts(third)


# Over two workers of two devices each, in an order that the command names. Sums cross workers.
SPANNING = (
    CONNECT
    + """
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
devices = np.array(jax.devices())[[int(place) for place in sys.argv[1]]]
x = jax.device_put(np.arange(32.0, dtype=np.float32), NamedSharding(Mesh(devices, ("x",)), P("x")))
for shift in range(3):
    print("sum", float(jax.jit(lambda x: (x + shift).sum())(x)), flush=True)
"""
)


def test_a_program_over_several_workers_is_compiled_once_wherever_its_parts_lie(own_cluster, tmp_path):
    flags = [f"--gcs_scratch_location=file://{tmp_path}/bucket", "--workers=2", "--devices_per_worker=2", "--cache_wait=0"]
    compiles = []
    # The second time other processes, and the first device is another worker's.
    for order in ["0123", "3210", "2013"]:
        cluster = own_cluster(*flags)
        status, output = cluster.run_client(["-c", SPANNING, order])
        assert status == 0, output
        assert [line for line in output.splitlines() if line.startswith("sum")] == ["sum 496.0", "sum 528.0", "sum 560.0"]
        compiles.append(counts(cluster)["compiles"])
        cluster.stop()
    assert compiles[0] >= 3 and compiles[1:] == [0, 0], compiles
