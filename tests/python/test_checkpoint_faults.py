"""Checkpoints when something goes wrong: workers that die in the middle of a save, and stores that are slow or refuse."""

import json
import signal
import subprocess
from urllib.parse import unquote

import gcs
import pytest
from conftest import CLIENTS, X64, Checks, Cluster, run_plainly, wait_for
from gcs import order

BUCKET = "gs://shared/team"


@pytest.fixture
def double(tmp_path):
    with gcs.double(tmp_path, "shared") as url:
        # Orbax writes one object several times a second.
        order(url, "limits", paced=False)
        yield url


@pytest.fixture
def on_double(tmp_path, double):
    """Makes clusters of two workers whose bucket is the double's."""
    made = []

    def make(*flags):
        folder = tmp_path / f"cluster{len(made)}"
        folder.mkdir()
        flags = ("--workers=2", "--devices_per_worker=4", f"--log_dir={folder}", *flags)
        made.append(Cluster(folder, *flags, environment=gcs.server_environment(double)))
        return made[-1]

    yield make
    for cluster in made:
        if cluster.process.poll() is None:
            cluster.stop()


def environment_of(double):
    """Of a client whose Orbax finds the double, whatever its platform."""
    return {**gcs.orbax_environment(double), **X64}


def objects(double, prefix):
    found = order(double, "state", "GET")["buckets"]["shared"]["objects"]
    return {name for name in found if name.startswith(prefix)}


def chunks(names):
    return {name for name in names if name.rsplit("/", 1)[-1].replace(".", "").isdigit()}


def told(output):
    """What resuming.py told."""
    return [json.loads(line[2:]) for line in output.splitlines() if line.startswith("@@")]


def ended(client, seconds=120):
    """A client's output once it has ended; one that does not end tells where it hangs."""
    try:
        return client.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        client.send_signal(signal.SIGABRT)
        pytest.fail(f"the client does not end:\n{client.communicate()[0][-6000:]}")


def test_a_worker_killed_in_the_middle_of_a_save_costs_that_step_alone(double, on_double):
    step = "team/run/6/"
    cluster, folder = on_double(), f"{BUCKET}/run"
    # Of an array of the second worker's (by XML's PUT), some objects of step 6 arrive and the others never.
    order(double, "faults", kind="silence", method="PUT", path=f"{step}default/w1/".replace("/", "%2F"), after=3)
    client = cluster.start_client([CLIENTS / "resuming.py", folder, 7], env={**environment_of(double), "PYTHONFAULTHANDLER": "1"})
    wait_for(lambda: chunks(objects(double, f"{step}default/w1/")), 120, "some of the array's chunks are there")
    cluster.children("worker")[1].kill()
    output = ended(client)
    assert client.returncode != 0 and "DATA_LOSS" in told(output)[-1]["error"], output[-3000:]
    assert {"saving": 6} in told(output), output[-3000:]
    half = objects(double, step)
    order(double, "faults", "DELETE")
    cluster.stop()
    # Nobody takes it for a finished step.
    assert f"{step}commit_success.txt" not in half and 0 < len(chunks(objects(double, f"{step}default/w1/"))) < 4
    code = f"import orbax.checkpoint as ocp; print(list(ocp.CheckpointManager('{folder}').all_steps()))"
    status, output = run_plainly(["-c", code], environment_of(double))
    assert status == 0 and output.endswith("[1, 3]\n"), output[-3000:]
    # The next job restores the last good step, and saves the failed one again.
    status, output = on_double().run_client([CLIENTS / "resuming.py", folder, 7], env=environment_of(double))
    assert status == 0, output[-3000:]
    assert told(output)[0] == {"begins": 3, "steps": [1, 3]}
    assert told(output)[-1] == {"ends": 7, "steps": [3, 6]}
    whole = objects(double, step)
    assert chunks(half) < chunks(whole)
    # And so does plain Orbax.
    code = f"""if 1:
        import sys; sys.argv[1:] = ["", "0"]
        import jax, numpy as np, orbax.checkpoint as ocp, resuming
        arrays = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), resuming.expected(0))
        with ocp.CheckpointManager("{folder}", item_handlers=ocp.PyTreeCheckpointHandler()) as manager:
            for step in manager.all_steps():
                resuming.same(manager.restore(step, args=ocp.args.PyTreeRestore(restore_args=arrays)), step)
            print(list(manager.all_steps()))
    """
    status, output = run_plainly(["-c", code], environment_of(double))
    assert status == 0 and output.endswith("[3, 6]\n"), output[-3000:]


# What befalls requests to a checkpoint's objects, by the verb, and what the double answers where it does.
SAVING = [
    {"kind": {"status": 429}, "method": "PUT", "after": 2, "times": 5},
    {"kind": {"status": 500}, "method": "PUT", "after": 20, "times": 5},
    {"kind": {"status": 503}, "method": "PUT", "after": 40, "times": 3},
    {"kind": "lose_answer", "method": "PUT", "after": 60, "times": 2},
    {"kind": {"slow": 1500}, "method": "PUT", "after": 80, "times": 3},
]
RESTORING = [
    {"kind": {"status": 429}, "method": "GET", "after": 2, "times": 5},
    {"kind": {"status": 500}, "method": "GET", "after": 20, "times": 5},
    {"kind": "cut_body", "method": "GET", "after": 40, "times": 3},
    {"kind": {"slow": 3000}, "method": "GET", "after": 60, "times": 3},
    {"kind": "silence", "method": "GET", "after": 80, "times": 1},
]


def ordered(double, faults, path):
    """Orders the faults for objects under a path, as object_store names them: the other side's requests look otherwise."""
    for fault in faults:
        order(double, "faults", **fault, path=path.replace("/", "%2F").replace("_", "%5F"))


def refused(double, since):
    """How often the double has said 429 or 5xx."""
    return sum(1 for call in order(double, "log", "GET")[since:] if call["status"] in (429, 500, 503))


def test_a_store_that_is_slow_or_refuses_costs_time_and_nothing_else(double, on_double):
    cluster, environment = on_double(), environment_of(double)
    folder, way = f"{BUCKET}/unwell", "pytree_zarr2"
    ordered(double, SAVING, f"team/unwell/{way}")
    status, output = cluster.run_client([CLIENTS / "saving.py", way], env={**environment, "SCRATCH": folder}, timeout=240)
    assert "saved\n" in output, (status, output[-3000:])
    retries = lambda: cluster.totals()["checkpoints"]["retries"]
    saved = retries()
    assert refused(double, 0) == 13 <= saved, saved
    order(double, "faults", "DELETE")
    Checks(*run_plainly([CLIENTS / "plain.py"], {**environment, "SCRATCH": folder})).judge(way)
    asked = len(order(double, "log", "GET"))
    ordered(double, RESTORING, f"team/unwell/{way}")
    environment["CHECKPOINTS"] = folder
    Checks(*cluster.run_client([CLIENTS / "restoring.py"], env=environment, timeout=240)).judge(way)
    assert refused(double, asked) == 10 <= retries() - saved, (saved, retries())
