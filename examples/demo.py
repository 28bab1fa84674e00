"""`make demo`: trains on Waystation four times and shows from where the compiled programs came.

1. cold: the bucket is empty, every program is compiled;
2. warm: every process of the first run is gone and nothing of it is left but the bucket: no program is compiled;
3. cold again: the bucket has been emptied;
4. one constant in one program is changed: exactly one program is compiled.

"Compiled" and "from the bucket" are the server's own counters, read by the training program from the server's status.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

TRAIN = pathlib.Path(__file__).with_name("train.py")


def server_processes(marker):
    """Processes of any kind whose command line or environment names this demo's folder."""
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        if int(process.name) == os.getpid():
            continue
        try:
            if marker.encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue  # it has ended meanwhile
    return found


def train(binary, folder, title, *options):
    """Brings a cluster up, trains on it, takes it down. Gives what the training program found out."""
    print(f"\n=== {title}", flush=True)
    # The run's own temporary folder, so that nothing of it can be found by the next but the bucket.
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="run-", dir=folder))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "WAYSTATION_"))}
    environment["TMPDIR"] = str(scratch)
    environment["PYTHONUNBUFFERED"] = "1"
    # jaxlib warns, with a stack trace, when a client says goodbye.
    environment["TF_CPP_MIN_LOG_LEVEL"] = "2"
    command = [
        str(binary), "run", "--workers", "1", "--devices_per_worker", "4",
        "--gcs_scratch_location", f"file://{folder}/bucket", "--",
        sys.executable, str(TRAIN), "--checkpoint", str(scratch / "checkpoint"), *options,
    ]  # fmt: skip
    result = None
    start = time.monotonic()
    with subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE) as process:
        for line in process.stdout:
            if line.startswith("RESULT "):
                result = json.loads(line.removeprefix("RESULT "))
            else:
                print("   ", line, end="", flush=True)
    assert process.returncode == 0, f"the {title!r} run ended with status {process.returncode}"
    assert result is not None, f"the {title!r} run told no result"
    left = server_processes(str(folder))
    assert not left, f"processes {left} outlived their run"
    result["wall_seconds"] = time.monotonic() - start
    shutil.rmtree(scratch)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=pathlib.Path, default=TRAIN.parents[1] / "target/release/waystation")
    binary = parser.parse_args().binary.resolve()
    if not binary.is_file():
        parser.error(f"no binary at {binary}: run `make build` first")

    with tempfile.TemporaryDirectory(prefix="waystation-demo-") as name:
        folder = pathlib.Path(name)
        bucket = folder / "bucket"
        bucket.mkdir()
        runs = [("cold", train(binary, folder, "cold: the bucket is empty"))]
        in_bucket = sum(1 for path in bucket.rglob("*") if path.is_file())
        assert in_bucket > 0, "the cold run left nothing in the bucket"
        runs.append(("warm", train(binary, folder, "warm: only the bucket is left of the run before")))
        shutil.rmtree(bucket)
        bucket.mkdir()
        runs.append(("cold again", train(binary, folder, "cold again: the bucket was emptied")))
        runs.append(("one constant", train(binary, folder, "one constant of one program changed", "--constant", "1.5")))

    print(f"\n{'run':13} {'compiled':>8} {'from bucket':>11} {'ready after':>11} {'100 steps':>9} {'last loss':>9}")
    for title, run in runs:
        totals = run["totals"]
        print(
            f"{title:13} {totals['compiles']:8} {totals['bucket_hits']:11} {run['compile_seconds']:9.2f} s "
            f"{run['train_seconds']:7.2f} s {run['losses'][-1]:9.4f}"
        )

    cold, warm, again, changed = (run for _, run in runs)
    programs = cold["totals"]["compiles"]
    assert programs > 0 and cold["totals"]["bucket_hits"] == 0, "cold: everything must be compiled"
    assert warm["totals"]["compiles"] == 0, "warm: nothing may be compiled"
    assert warm["totals"]["bucket_hits"] == programs, "warm: every program must come from the bucket"
    assert again["totals"]["compiles"] == programs and again["totals"]["bucket_hits"] == 0, "an empty bucket is cold again"
    assert changed["totals"]["compiles"] == 1, "one constant changed: exactly one program must be compiled"
    assert changed["totals"]["bucket_hits"] == programs - 1, "one constant changed: all others must come from the bucket"
    for title, run in runs[1:]:
        assert run["losses"] == cold["losses"], f"{title}: the losses differ from the cold run's"
        assert run["state_hash"] == cold["state_hash"], f"{title}: the trained state differs from the cold run's"
    for title, run in runs:
        assert run["client_bytes"] < 1_000_000, f"{title}: {run['client_bytes']} bytes of the checkpoint passed through Python"
    print(
        f"\nAll as it should be: {programs} programs; losses and states equal in all runs; every restored state equal bit for"
        f" bit;\n{cold['state_bytes'] / 1e6:.1f} MB saved and restored by the worker, with at most"
        f" {max(run['client_bytes'] for _, run in runs)} bytes through the Python process."
    )


if __name__ == "__main__":
    main()
