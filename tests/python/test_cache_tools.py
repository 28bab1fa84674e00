"""`waystation cache ls|inspect|verify|stats|rm|gc`, and /metrics, on what a job has left in its bucket."""

import json
import os
import urllib.request

from conftest import wait_for
from test_cache_warm import cache, run


def metrics(cluster):
    url = cluster.environment["WAYSTATION_STATUS_URL"].removesuffix("status") + "metrics"
    with urllib.request.urlopen(url, timeout=10) as response:
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = [line for line in response.read().decode().splitlines() if not line.startswith("#")]
    found = {}
    for line in lines:
        name, value = line.rsplit(" ", 1)
        metric, _, labels = name.partition("{")
        label = labels.rpartition(',')[2].rstrip("}") if "," in labels else ""
        found[metric, label] = found.get((metric, label), 0) + float(value)
    return found


def test_a_cache_is_listed_checked_and_emptied(own_cluster, tmp_path):
    bucket = tmp_path / "bucket"
    cluster = own_cluster("--workers", "1", "--devices_per_worker", "4", f"--gcs_scratch_location={bucket}")
    run(cluster)
    compiles = cluster.totals()["compiles"]
    wait_for(lambda: cluster.totals()["bucket_writes"] == compiles, 30, "all are published")
    seen = metrics(cluster)
    assert seen["waystation_compiles_total", ""] == compiles
    assert seen["waystation_cache_written_total", 'tier="bucket"'] == compiles
    assert seen["waystation_cache_misses_total", 'tier="bucket"'] == compiles
    assert seen["waystation_cache_hits_total", 'tier="bucket"'] == 0
    assert seen["waystation_cache_queue", ""] == 0
    assert seen["waystation_cache_written_bytes_total", 'tier="bucket"'] > 0
    cluster.stop()

    listed = json.loads(cache("ls", bucket, "--json"))
    assert len(listed) == compiles and {row["slot"] for row in listed} == {0}
    assert len(cache("ls", bucket).splitlines()) == compiles
    key = listed[0]["key"]
    [about] = json.loads(cache("inspect", bucket, key[:16], "--json"))
    assert about["key"] == key and about["executable_bytes"] > 0 and "platform/plugin" in about["components"]
    assert about["program"] in cache("inspect", bucket, key)
    report = json.loads(cache("stats", bucket, "--json"))
    assert (report["entries"], report["foreign_objects"]) == (compiles, 0)
    assert report["bytes"] == sum(row["bytes"] for row in listed)
    assert json.loads(cache("verify", bucket, "--json")) == [{"good": compiles, "bad_entries": 0, "foreign_objects": 0}]

    # Damage, and strangers' files.
    victim = bucket / "exe" / "v1" / key[:2] / key[2:4] / key / "0"
    whole = victim.read_bytes()
    victim.write_bytes(whole[: len(whole) // 2])
    victim.with_name("1").write_bytes(b"something else")
    stranger = bucket / "exe" / "v1" / "0"
    stranger.write_bytes(b"")
    *bad, sums = json.loads(cache("verify", bucket, "--json", status=1))
    assert {(row["key"], row["slot"], row["bad"]) for row in bad} == {(key, 0, "corrupt"), (key, 1, "foreign")}
    assert sums == {"good": compiles - 1, "bad_entries": 2, "foreign_objects": 1}
    assert f"{key}/0 corrupt" in cache("verify", bucket, status=1)

    # Keys that begin alike are not guessed at.
    twin = victim.parent.parent / (key[:-1] + ("0" if key[-1] != "0" else "1"))
    twin.mkdir()
    (twin / "0").write_bytes(b"")
    assert "several keys begin so" in cache("rm", bucket, key[:40], status=64)
    assert "no first digits" in cache("rm", bucket, "../x", status=64)
    assert "no entry" in cache("rm", bucket, ("0" if key[0] != "0" else "1") * 63, status=1)
    assert json.loads(cache("rm", bucket, key, "--json"))["removed"] == 2
    assert not victim.exists() and (twin / "0").exists()

    old = next(path for path in (bucket / "exe").rglob("0") if path != stranger and path.parent.name != twin.name)
    os.utime(old, (0, 0))
    assert json.loads(cache("gc", bucket, "--older_than=30d", "--dry_run", "--json"))["removed"] == 1
    assert old.exists()
    assert json.loads(cache("gc", bucket, "--older-than=30d", "--json"))["removed"] == 1
    assert not old.exists() and stranger.exists()
    assert "has no unit" in cache("gc", bucket, "--older_than=30", status=64)
    assert "no folder" in cache("ls", tmp_path / "nowhere", status=64)
    assert not (tmp_path / "nowhere").exists()

    # No object can have such a name, and no terminal should see it as it is.
    (bucket / "exe" / "v1" / "\x1b[31mred").write_bytes(b"")
    cache("rm", bucket, twin.name)
    rows = len(json.loads(cache("ls", bucket, "--json")))
    commands = {"ls": [], "verify": [], "stats": [], "gc": ["--older_than=30d"]}
    for name in ("endless", "again"):
        for command, flags in commands.items():
            said = cache(command, bucket, *flags, errors=True)
            assert "passed over" in said and "red" in said and "\x1b" not in said
            assert "not all was looked at" not in said, said
        assert len(cache("ls", bucket).splitlines()) == rows
        # Links are not followed: such a one hides nothing that comes after it, and has no end to be waited for.
        (bucket / "exe" / "v1" / name).symlink_to(".")
