"""`--cache_disk_dir`: what one job has compiled, the next one on the machine loads, without a bucket."""

import json

from conftest import CONNECT, wait_for
from test_cache_warm import cache

PROGRAMS = CONNECT + """
import numpy as np
for n in range(3):
    assert np.asarray(jax.jit(lambda x: jnp.sin(x) + n)(np.arange(8.0)))[0] == n
print("works")
"""


def run(cluster):
    status, output = cluster.run_code(PROGRAMS)
    assert status == 0 and "works" in output, output


def test_the_next_job_on_the_machine_compiles_nothing(own_cluster, tmp_path):
    folder = tmp_path / "cache"
    flags = ["--workers", "1", f"--cache_disk_dir={folder}", "--cache_disk_bytes=64MiB"]
    first = own_cluster(*flags)
    run(first)
    compiles = first.totals()["compiles"]
    assert compiles >= 3
    wait_for(lambda: first.totals()["disk_writes"] == compiles, 30, "all are written behind the client")

    # Beside the first one, which keeps the index.
    second = own_cluster(*flags)
    run(second)
    totals = second.totals()
    assert (totals["compiles"], totals["disk_hits"], totals["disk_bad_entries"]) == (0, compiles, 0)
    [shown] = [worker["disk_cache"] for worker in first.status()["workers"]]
    assert shown["has_index"] and 0 < shown["bytes"] <= 64 << 20
    assert [worker["disk_cache"]["has_index"] for worker in second.status()["workers"]] == [False]

    # Every entry damaged: compiled again, the right result, and repaired.
    entries = [path for path in folder.glob("??/*") if len(path.name) == 64]
    assert len(entries) == compiles
    for entry in entries:
        whole = entry.read_bytes()
        entry.write_bytes(whole[: len(whole) // 2])
    third = own_cluster(*flags)
    run(third)
    wait_for(lambda: third.totals()["disk_writes"] == compiles, 30, "all are repaired")
    totals = third.totals()
    assert (totals["compiles"], totals["disk_bad_entries"]) == (compiles, compiles)

    # All of that is noted in the folder, whoever did it: the compiles of the third have keys that were known.
    def explained():
        notes = json.loads(cache("why-miss", f"--cache_disk_dir={folder}", "--last=1000", "--json"))
        return notes if len(notes) == 2 * compiles else None

    notes = wait_for(explained, 30, "every compile is noted")
    assert [note["since"]["components"] for note in notes[compiles:]] == [[]] * compiles
    assert "there is no folder" in cache("why-miss", f"--cache_disk_dir={folder}/nowhere", status=64)
