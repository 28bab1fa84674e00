"""Checkpoints on buckets: the workers speak XML to the double, Orbax's TensorStore and gcsfs JSON; both mean one store."""

import json
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


def name_in(folder, double):
    """The one checkpoint that is listed in the folder's expected.json."""
    code = f"from etils import epath; print(epath.Path('{folder}/expected.json').read_text())"
    status, output = run_plainly(["-c", code], environment_of(double))
    assert status == 0, output[-3000:]
    (name,) = json.loads(output.splitlines()[-1])
    return name


# Orbax's ways to save, and the format that each needs of the workers.
WAYS = {"standard": "ocdbt", "manager": "ocdbt", "pytree": "ocdbt", "pytree_zarr2": "zarr2"}


@pytest.mark.parametrize("way", WAYS)
def test_plain_orbax_restores_from_a_bucket_what_workers_wrote(double, on_double, way):
    folder = f"{BUCKET}/ours-{way}"
    environment = {**environment_of(double), "SCRATCH": folder}
    status, output = on_double(WAYS[way]).run_client([CLIENTS / "saving.py", way], env=environment)
    assert "saved\n" in output, (status, output[-3000:])
    Checks(*run_plainly([CLIENTS / "plain.py"], environment)).judge(name_in(folder, double))
    # The workers' requests were the XML API's.
    written = [unquote(call["target"]) for call in order(double, "log", "GET") if call["method"] == "PUT"]
    assert any(target.startswith(f"/shared/team/ours-{way}/") for target in written), written[:5]


@pytest.mark.parametrize("way", ["pytree_zarr2", "pytree", "standard", "manager"])
def test_workers_restore_from_a_bucket_what_plain_orbax_wrote(double, on_double, way):
    folder = f"{BUCKET}/theirs-{way}"
    environment = environment_of(double)
    status, output = run_plainly([CLIENTS / "saving.py", way], {**environment, "SCRATCH": folder})
    assert "saved\n" in output, (status, output[-3000:])
    cluster = on_double()
    before = cluster.totals()["restored_bytes"]
    checks = Checks(*cluster.run_client([CLIENTS / "restoring.py"], env={**environment, "CHECKPOINTS": folder}))
    checks.judge(name_in(folder, double))
    assert cluster.totals()["restored_bytes"] > before


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
