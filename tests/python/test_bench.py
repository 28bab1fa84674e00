"""The bench: its arithmetic, and that a quick run of it works. What it measures is nobody's assertion."""

import json
import math
import pathlib
import subprocess
import sys

import pytest
from conftest import BINARY, ROOT, base_environment

sys.path.insert(0, str(ROOT / "tests/bench"))
import figures  # noqa: E402

NULL_SERVER = BINARY.with_name("null_server")


def test_a_ratio_is_the_median_of_pairs_not_the_ratio_of_medians():
    found = figures.figure("f", "1/s", [1, 2, 30], [2, 1, 10], against="other")
    assert found["ratio"] == 2 and found["ratio_quartiles"] == [1.25, 2.5]
    assert found["waystation"] == 2 and found["other"] == 2 and found["verdict"] == "shown"


@pytest.mark.parametrize(
    ("ratios", "at_least", "verdict"),
    [
        ([0.91, 0.92, 0.93], True, "met"),
        ([0.87, 0.88, 0.93], True, "MISSED"),
        ([0.70, 0.95, 1.20], True, "not measured"),
        ([0.87, 0.88, 0.93], False, "met"),
        ([0.91, 0.92, 0.93], False, "MISSED"),
        ([0.9], True, "met"),
        ([0.9], False, "met"),
    ],
)
def test_wide_quartiles_are_no_measurement(ratios, at_least, verdict):
    assert figures.Asked(0.90, margin=0.10, at_least=at_least).verdict(ratios) == verdict


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the bench takes the newest JAX; once is enough")
def test_a_quick_run_gives_every_figure(tmp_path):
    assert NULL_SERVER.is_file(), f"no {NULL_SERVER}: cargo build --release --bin null_server"
    command = [sys.executable, ROOT / "tests/bench/bench.py", "--quick", "--binary", BINARY, "--results", tmp_path]
    done = subprocess.run(
        list(map(str, command)), env=base_environment(), text=True, capture_output=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = pathlib.Path(tmp_path).glob("*.json")
    result = json.loads(file.read_text())
    assert not result["errors"]
    assert len(result["load_average"]) == 16
    names = {figure["name"] for figure in result["figures"]}
    assert {
        "train steps, 20 ms", "train steps, 2 ms", "calls chained", "CPU of proxy and worker a call, beyond XLA",
        "call and block, p50 beyond null", "device_put 1 MB", "fetch 1 MB over 8", "growth of the proxy while 10 GB pass",
        "3 clients, calls in all", "a quiet client's p99 among floods", "warm tiny, client", "warm train step, server",
        "hit in memory, train step, beyond load, worker", "keys, ops/s", "keys, MB/s", "keys of cold compiles",
        "64 first requests, 4 workers, compiles", "cold compile, CPU of worker",
        "save, OCDBT, compressed, of the bound", "restore, zarr2, as it is", "stored, zarr2, compressed",
        "save, zarr2, compressed, CPU of the worker", "growth of the worker in a save", "read by a worker, cut in columns",
        "save, 20 arrays of 4 KB, OCDBT", "data-parallel steps of 20 ms, 2 workers", "all-reduce of 1 MB, 2 workers",
        "reshard of 1 MB, 2 workers", "compile for 2 workers, CPU",
    } <= names  # fmt: skip
    for figure in result["figures"]:
        for value in (figure["waystation"], figure["other"], figure["ratio"], *figure["ratio_quartiles"]):
            # A difference of two noisy times may fall below zero, and a process need not grow.
            free = ("beyond", "growth", "server")
            assert math.isfinite(value) and (value > 0 or any(word in figure["name"] for word in free)), figure
        assert figure["name"] in done.stdout
    # What is not a matter of speed.
    counted = {figure["name"]: figure["waystation"] for figure in result["figures"] if "first requests" in figure["name"]}
    assert counted == {f"64 first requests, 4 workers, {what}": 1 for what in ("compiles", "bucket writes")}
    processes = {name for entry in result["cpu"] for name in entry["processes"]}
    assert {"client", "proxy", "worker", "null_server"} <= processes
