"""`--record_programs` and `cache warm`: what a job has asked for is compiled before the next one starts."""

import json
import shutil
import subprocess

import jax
import jax.export
import numpy as np
from conftest import BINARY, CONNECT, ROOT, base_environment, wait_for

PROGRAMS = CONNECT + """
import numpy as np
for n in range(3):
    assert np.asarray(jax.jit(lambda x: jnp.sin(x) + n)(np.arange(8.0)))[0] == n
mesh = jax.make_mesh((4,), ("x",))
x = jax.device_put(np.arange(8.0), jax.NamedSharding(mesh, jax.P("x")))
assert float(jax.jit(lambda x: (x * 2).sum())(x)) == 56
print("works")
"""


def run(cluster):
    status, output = cluster.run_code(PROGRAMS)
    assert status == 0 and "works" in output, output


def cache(*arguments, status=0, errors=False, env=None):
    """Runs `waystation cache ...`; gives what it prints, or says as its error."""
    environment = {**base_environment(), **(env or {})}
    done = subprocess.run(
        [BINARY, "cache", *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
    return done.stderr if errors or not done.stdout else done.stdout


def test_a_recorded_job_compiles_nothing_after_a_warm_up(own_cluster, tmp_path):
    bucket, records = tmp_path / "bucket", tmp_path / "records"
    bucket.mkdir()
    flags = ["--workers", "1", "--devices_per_worker", "4", f"--gcs_scratch_location={bucket}"]
    first = own_cluster(*flags, f"--record_programs={records}")
    run(first)
    totals = first.totals()
    compiles = totals["compiles"]
    assert compiles >= 4
    requests = first.status()["compile_requests"]

    def recorded():
        counts = first.status()["recorded"]
        return counts if sum(counts.values()) == requests else None

    counts = wait_for(recorded, 30, "every request is recorded or found so")
    assert (counts["dropped"], counts["failed"], counts["uncacheable"]) == (0, 0, 0)
    assert counts["stored"] == len([path for path in records.rglob("*") if path.is_file()]) >= compiles
    first.stop()

    shutil.rmtree(bucket)
    bucket.mkdir()
    (records / "programs" / "v1" / "README").write_text("not ours")
    warm = ["warm", records, f"--gcs_scratch_location={bucket}", "--devices=4", "--json"]
    report = json.loads(cache(*warm))
    assert (report["compiled"], report["failed"], report["bad_recordings"], report["foreign_objects"]) == (compiles, 0, 0, 1)
    assert report["not_written"] == 0 and report["compiled"] + report["present"] == counts["stored"]
    again = json.loads(cache(*warm))
    assert (again["compiled"], again["present"]) == (0, counts["stored"])

    second = own_cluster(*flags)
    run(second)
    totals = second.totals()
    assert (totals["compiles"], totals["bucket_hits"], totals["bucket_misses"]) == (0, compiles, 0)

    # Devices that are not there, and a recording that is cut: named, and the rest is done. Which one is cut is as it comes.
    fewer = ["warm", records, f"--gcs_scratch_location={bucket}", "--devices=1", "--json"]
    report = json.loads(cache(*fewer, status=1))
    assert report["failed"] >= 1 and any("--devices" in why for why in report["failures"].values())
    victim = next(path for path in records.rglob("*") if len(path.name) == 64)
    victim.write_bytes(victim.read_bytes()[:-1])
    report = json.loads(cache(*warm, status=1))
    assert report["bad_recordings"] == 1 and "checksum" in report["failures"][victim.name]
    assert report["failed"] == 0 and report["present"] == counts["stored"] - 1


def test_bytecode_is_taken_and_text_is_refused(tmp_path):
    bucket, programs = tmp_path / "bucket", tmp_path / "programs"
    bucket.mkdir()
    programs.mkdir()
    exported = jax.export.export(jax.jit(lambda x: x * 3), platforms=["cpu"])(np.arange(4.0, dtype=np.float32))
    (programs / "triple.mlirbc").write_bytes(exported.mlir_module_serialized)
    (programs / "triple.json").write_text('{"num_replicas": 1, "num_partitions": 1}')
    report = json.loads(cache("warm", programs, f"--gcs_scratch_location={bucket}", "--json"))
    assert (report["compiled"], report["failed"], report["bad_recordings"]) == (1, 0, 0)

    text = programs / "text.mlirbc"
    text.write_text(exported.mlir_module())
    said = cache("warm", text, f"--gcs_scratch_location={bucket}", status=1)
    assert "it is text" in said, said
    (programs / "triple.json").write_text('{"num_partition": 1}')
    said = cache("warm", programs / "triple.mlirbc", f"--gcs_scratch_location={bucket}", status=1)
    assert "unknown field" in said, said
    assert "no folder" in cache("warm", tmp_path / "nowhere", f"--gcs_scratch_location={bucket}", status=64)


def test_a_job_that_never_ran_is_recorded_and_compiles_nothing(own_cluster, tmp_path):
    bucket, records = tmp_path / "bucket", tmp_path / "records"
    bucket.mkdir()
    train = ROOT / "examples" / "train.py"
    shape = ["--workers", "1", "--devices_per_worker", "4"]
    recorder = own_cluster(*shape, f"--record_programs={records}", "--record_only")
    status, output = recorder.run_client([ROOT / "examples" / "record_programs.py", train])
    assert status == 0 and "3 programs stored, 0 were stored already" in output, output
    stored = [path for path in records.rglob("*") if path.is_file()]
    assert len(stored) == 3 and recorder.totals()["compiles"] == 0

    # Values may be put and fetched; nothing is executed, and the refusal names the flag.
    status, output = recorder.run_code(
        CONNECT + "import numpy as np; assert np.asarray(jax.device_put(np.arange(3)))[2] == 2; jnp.arange(3) + 1"
    )
    assert status == 1 and "FAILED_PRECONDITION: execute is refused" in output and "--record_only" in output, output
    # What cannot be stored is told to whoever waits for it.
    kept = records.rename(tmp_path / "kept")
    records.write_text("in the way")
    status, output = recorder.run_code(CONNECT + "jax.jit(lambda x: x * 7).lower(1.0).compile()")
    assert status == 1 and "UNAVAILABLE: not recorded" in output and "records" in output, output
    recorder.stop()

    warm = ["warm", kept, f"--gcs_scratch_location={bucket}", "--devices=4", "--json"]
    report = json.loads(cache(*warm))
    # The sum was recorded, too, before it was refused.
    assert (report["compiled"], report["failed"], report["not_written"]) == (4, 0, 0)
    job = own_cluster(*shape, f"--gcs_scratch_location={bucket}")
    status, output = job.run_client([train, "--steps", "40"])
    assert status == 0, output
    totals = job.totals()
    assert (totals["compiles"], totals["bucket_hits"], totals["bucket_misses"]) == (0, 3, 0)


# A job whose programs run on both of two workers of two devices, or on one of them.
SPANNING = """
mesh, back = jax.make_mesh((4,), ("x",)), jax.make_mesh((4,), ("x",), devices=jax.devices()[::-1])
half = jax.make_mesh((2,), ("x",), devices=jax.devices()[2:])
spread, turned, own = (jax.NamedSharding(mesh, jax.P("x")) for mesh in (mesh, back, half))
jitted = [
    (jax.jit(lambda x: x * x.sum()), spread),
    (jax.jit(lambda x: x.max() - x), turned),
    (jax.jit(lambda x: x + 1), spread),
    (jax.jit(lambda x: x - x.max()), own),
]
"""
RECORD = CONNECT + SPANNING + """
for f, sharding in jitted:
    f.lower(jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)).compile()
"""
EXECUTE = CONNECT + SPANNING + """
import numpy as np
value = np.arange(8, dtype=np.float32)
wanted = [value * 28, 7 - value, value + 1, value - 7]
for (f, sharding), wanted in zip(jitted, wanted, strict=True):
    assert np.array_equal(np.asarray(f(jax.device_put(value, sharding))), wanted), (f, wanted)
print("works")
"""


def warmed(records, bucket, *flags):
    report = json.loads(cache("warm", records, f"--gcs_scratch_location={bucket}", "--devices=2", "--json", *flags))
    assert (report["failed"], report["bad_recordings"], report["not_written"]) == (0, 0, 0), report
    return report["compiled"], report["present"]


def keys(bucket):
    return {entry["key"] for entry in json.loads(cache("ls", bucket, "--json"))}


def test_programs_over_several_workers_are_warmed_without_the_cluster(own_cluster, tmp_path):
    """Recorded while they run, and without; on the cluster itself, and on one worker of as many devices."""
    bucket, records = tmp_path / "bucket", tmp_path / "records"
    bucket.mkdir()
    shape = ["--workers", "2", "--devices_per_worker", "2"]
    first = own_cluster(*shape, f"--gcs_scratch_location={bucket}", f"--record_programs={records}")
    status, output = first.run_code(EXECUTE)
    assert status == 0 and "works" in output, output
    compiles = first.totals()["compiles"]
    wait_for(lambda: first.status()["recorded"]["stored"] >= 4, 30, "all are recorded")
    first.stop()
    shutil.rmtree(bucket)
    bucket.mkdir()
    assert warmed(records, bucket) == (compiles, 0)
    second = own_cluster(*shape, f"--gcs_scratch_location={bucket}")
    status, output = second.run_code(EXECUTE)
    assert status == 0 and "works" in output, output
    totals = second.totals()
    assert (totals["compiles"], totals["bucket_hits"], totals["bucket_misses"]) == (0, compiles, 0), totals
    second.stop()

    for workers, devices in [(2, 2), (1, 4), (4, 1)]:
        records, other = tmp_path / f"records{workers}", tmp_path / f"bucket{workers}"
        recorder = own_cluster(
            "--workers", str(workers), "--devices_per_worker", str(devices), f"--record_programs={records}", "--record_only"
        )  # fmt: skip
        status, output = recorder.run_code(RECORD)
        assert status == 0 and recorder.totals()["compiles"] == 0, output
        recorder.stop()
        # What has run elsewhere is the same as what was lowered only.
        assert warmed(records, bucket, "--workers=2") == (0, 4)
        other.mkdir()
        assert warmed(records, other, "--workers=2") == (4, 0)
        found = keys(other)
        assert len(found) == 4 and found <= keys(bucket), (found, keys(bucket))
    # Each is for as many partitions as it has, wherever they lie; the one on half of the devices for one worker.
    abouts = [json.loads(cache("inspect", other, key, "--json"))[0] for key in found]
    spans = sorted((about["replicas"], about["partitions"], about["spans_workers"]) for about in abouts)
    assert spans == [(1, 2, False), (1, 4, True), (1, 4, True), (1, 4, True)], abouts
    assert all(about["pieces"].get(str(about["partitions"])) for about in abouts), abouts
    said = cache("warm", records, f"--gcs_scratch_location={bucket}", "--devices=2", "--workers=1", status=1)
    assert "give more --workers" in said, said
