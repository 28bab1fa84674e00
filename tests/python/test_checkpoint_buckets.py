"""Checkpoints on buckets: the workers speak XML to the double, Orbax's TensorStore and gcsfs JSON; both mean one store."""

from urllib.parse import unquote

import gcs
import pytest
from conftest import CLIENTS, X64, Checks, Cluster, run_plainly
from gcs import order

BUCKET = "gs://shared/team"


@pytest.fixture(scope="module")
def double(tmp_path_factory):
    with gcs.double(tmp_path_factory.mktemp("double"), "shared") as url:
        # Orbax writes one object several times a second.
        order(url, "limits", paced=False)
        yield url


@pytest.fixture(scope="module")
def on_double(double, tmp_path_factory):
    """A cluster for each format, of two workers that find the double."""
    running = {}

    def get(checkpoint_format="zarr2"):
        if checkpoint_format not in running:
            flags = [] if checkpoint_format == "zarr2" else [f"--checkpoint_format={checkpoint_format}"]
            folder = tmp_path_factory.mktemp(f"cluster-{checkpoint_format}")
            environment = gcs.server_environment(double)
            running[checkpoint_format] = Cluster(
                folder, "--workers=2", "--devices_per_worker=4", *flags, environment=environment
            )
        return running[checkpoint_format]

    yield get
    for cluster in running.values():
        cluster.stop()


def environment_of(double):
    """Of a client whose Orbax finds the double, whatever its platform."""
    return {**gcs.orbax_environment(double), **X64}


# Orbax's ways to save, and the format that each needs of the workers.
WAYS = {"standard": "ocdbt", "manager": "ocdbt", "pytree": "ocdbt", "pytree_zarr2": "zarr2"}
NAMES = {way: "manager/0/default" if way == "manager" else way for way in WAYS}


def requests(double):
    """(method, path) of all requests to the double."""
    return {(call["method"], unquote(call["target"])) for call in order(double, "log", "GET")}


@pytest.fixture(scope="module")
def ours(double, on_double):
    """What plain Orbax restores of what workers wrote, and the requests that it took."""
    environment = {**environment_of(double), "SCRATCH": f"{BUCKET}/ours"}
    for checkpoint_format in ("ocdbt", "zarr2"):
        ways = [way for way in WAYS if WAYS[way] == checkpoint_format]
        status, output = on_double(checkpoint_format).run_client([CLIENTS / "saving.py", *ways], timeout=600, env=environment)
        assert "saved\n" in output, (status, output[-3000:])
    return Checks(*run_plainly([CLIENTS / "plain.py"], environment)), requests(double)


@pytest.mark.parametrize("way", WAYS)
def test_plain_orbax_restores_from_a_bucket_what_workers_wrote(ours, way):
    checks, requests = ours
    checks.judge(NAMES[way])
    # The workers' requests were the XML API's.
    assert [path for method, path in requests if method == "PUT" and path.startswith(f"/shared/team/ours/{way}/")]


@pytest.fixture(scope="module")
def theirs(double, on_double):
    """What workers restore of what plain Orbax wrote, and the requests that it took."""
    environment, folder = environment_of(double), f"{BUCKET}/theirs"
    status, output = run_plainly([CLIENTS / "saving.py", *WAYS], {**environment, "SCRATCH": folder})
    assert "saved\n" in output, (status, output[-3000:])
    checks = Checks(*on_double().run_client([CLIENTS / "restoring.py"], timeout=600, env={**environment, "CHECKPOINTS": folder}))
    return checks, requests(double)


@pytest.mark.parametrize("way", WAYS)
def test_workers_restore_from_a_bucket_what_plain_orbax_wrote(theirs, way):
    checks, requests = theirs
    checks.judge(NAMES[way])
    assert [path for method, path in requests if method == "GET" and path.startswith(f"/shared/team/theirs/{way}/")]


def test_workers_save_and_restore_on_s3(tmp_path):
    with gcs.double(tmp_path, "shared") as url:
        flags = ["--workers=2", "--devices_per_worker=4"]
        cluster = Cluster(tmp_path, *flags, environment=gcs.s3_environment(url))
        try:
            environment = {"SCRATCH": "s3://shared/team/step", "S3_ENDPOINT": url}
            checks = Checks(*cluster.run_client([CLIENTS / "on_s3.py"], env=environment))
            for name in ("saved_and_restored", "read_plainly"):
                checks.judge(name)
        finally:
            cluster.stop()
        written = gcs.order(url, "state", "GET")["buckets"]["shared"]["objects"]
        assert "team/step/params.w/.zarray" in written, sorted(written)
        assert {call["method"] for call in order(url, "log", "GET")} <= {"GET", "HEAD", "PUT"}, "and nothing is deleted"
