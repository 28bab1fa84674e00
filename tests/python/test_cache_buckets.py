"""`waystation cache ...` on Cloud Storage and S3, both played by our own double."""

import json
import secrets

import gcs
import pytest
from conftest import Cluster
from test_cache_warm import cache, run

ENVIRONMENTS = {"gs": gcs.server_environment, "s3": gcs.s3_environment}
RIGHTS = {"gs": "storage.objects.delete", "s3": "s3:DeleteObject"}


@pytest.fixture
def double(tmp_path):
    with gcs.double(tmp_path, "shared") as url:
        gcs.order(url, "limits", paced=False)
        yield url


@pytest.mark.parametrize("scheme", ENVIRONMENTS)
def test_the_tools_do_in_a_bucket_what_they_do_in_a_folder(double, tmp_path, scheme):
    location, records = f"{scheme}://shared/team", f"{scheme}://shared/records"
    key_file, other_key = tmp_path / "key", tmp_path / "other"
    for file in (key_file, other_key):
        file.write_text(secrets.token_hex(32))
    signing, history = f"--cache_signing_key={key_file}", tmp_path / "history"
    env = {**ENVIRONMENTS[scheme](double), "WAYSTATION_CACHE_HISTORY": str(history)}

    def entries():
        return [name for name in gcs.order(double, "state", "GET")["buckets"]["shared"]["objects"] if "team/exe/" in name]

    def tool(*arguments, **options):
        return cache(*arguments, env=env, **options)

    def job(*flags):
        """Runs the programs in a cluster of its own; gives its counters."""
        folder = tmp_path / secrets.token_hex(4)
        folder.mkdir()
        flags = ("--workers=1", "--devices_per_worker=4", f"--gcs_scratch_location={location}", signing, *flags)
        cluster = Cluster(folder, *flags, environment=env)
        try:
            run(cluster)
            return cluster.totals()
        finally:
            # Waits for uploads.
            cluster.stop()

    compiles = job(f"--record_programs={records}")["compiles"]
    assert compiles >= 4 and len(entries()) == compiles
    listed = json.loads(tool("ls", location, "--json"))
    assert len(listed) == compiles
    key = listed[0]["key"]
    [about] = json.loads(tool("inspect", location, key[:16], "--json"))
    assert about["key"] == key and "platform/plugin" in about["components"]
    report = json.loads(tool("stats", location, "--json"))
    assert (report["entries"], report["bytes"]) == (compiles, sum(row["bytes"] for row in listed))
    assert json.loads(tool("stats", records, "--json"))["recordings"] >= compiles

    # Whole, and by whom: without a key nobody asks.
    good = {"good": compiles, "bad_entries": 0, "foreign_objects": 0}
    assert json.loads(tool("verify", location, "--json")) == [good]
    assert json.loads(tool("verify", location, signing, "--json")) == [good]
    *bad, sums = json.loads(tool("verify", location, f"--cache_signing_key={other_key}", "--json", status=1))
    assert {row["bad"] for row in bad} == {"signature"} and sums["bad_entries"] == compiles
    said = tool("verify", location, f"--cache_signing_key={tmp_path}/absent", status=64)
    assert "--cache_signing_key" in said

    # Without the right to delete nothing goes, and the message names it.
    granted = ["storage.buckets.get", "storage.objects.get", "storage.objects.list", "storage.objects.create"]
    gcs.order(double, "permissions", bucket="shared", granted=granted)
    for command in (["rm", location, key], ["gc", location, "--older_than=0s"]):
        said = tool(*command, status=64)
        assert RIGHTS[scheme] in said and "does not let this identity delete" in said, said
    assert len(entries()) == compiles
    gcs.order(double, "permissions", bucket="shared", granted=None)
    assert json.loads(tool("rm", location, key, "--json"))["removed"] == 1
    assert len(entries()) == compiles - 1 and not [name for name in entries() if key in name]

    # What is missing is compiled from the recordings, signed, and of use to the next job.
    warm = ["warm", records, f"--gcs_scratch_location={location}", signing, "--devices=4", "--cache_wait=10m", "--json"]
    report = json.loads(tool(*warm))
    assert (report["compiled"], report["failed"], report["not_written"]) == (1, 0, 0)
    totals = job()
    assert (totals["compiles"], totals["bucket_hits"]) == (0, compiles)
    [last] = json.loads(tool("why-miss", "--json", "--last=1"))
    assert last["note"]["program"].startswith("jit_"), last
    assert json.loads(tool("gc", location, "--older_than=30d", "--json"))["removed"] == 0
