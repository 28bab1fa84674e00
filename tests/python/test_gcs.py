"""Cloud Storage: real clients on the emulator and on our double, and clusters on the double, well and unwell."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request

import gcs
import pytest
from conftest import CLIENTS, CONNECT, Cluster, wait_for
from gcs import order

sys.path.append(str(CLIENTS))
import gcs_clients  # noqa: E402

LOCATION = "gs://shared/team"


def contents(url):
    return order(url, "state", "GET")["buckets"]["shared"]


def entries(url):
    return [name for name in contents(url)["objects"] if name.startswith("team/exe/")]


@pytest.fixture
def double(tmp_path):
    with gcs.double(tmp_path, "shared") as url:
        # Clients that meet 429 wait; nothing here is about that.
        order(url, "limits", paced=False)
        yield url


@pytest.fixture
def emulator(tmp_path):
    with gcs.emulator(tmp_path) as url:
        body = json.dumps({"name": "shared"}).encode()
        urllib.request.urlopen(urllib.request.Request(f"{url}/storage/v1/b?project=p", body)).close()
        yield url


def client(code, url, folder):
    environment = {**os.environ, **gcs.client_environment(url)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=folder, text=True, capture_output=True, timeout=300
    )


@pytest.mark.parametrize("server", ["emulator", "double"])
@pytest.mark.parametrize("name", gcs_clients.ALL)
def test_real_clients_get_along(request, tmp_path, server, name):
    url = request.getfixturevalue(server)
    done = client(gcs_clients.ALL[name], url, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture
def on_double(tmp_path, double):
    """Makes clusters whose bucket is the double's."""
    made = []

    def make(*flags):
        folder = tmp_path / f"cluster{len(made)}"
        folder.mkdir()
        flags = (f"--gcs_scratch_location={LOCATION}", f"--log_dir={folder}", *flags)
        made.append(Cluster(folder, *flags, environment=gcs.server_environment(double)))
        return made[-1]

    yield make
    for cluster in made:
        if cluster.process.poll() is None:
            cluster.stop()


def test_a_cluster_keeps_its_programs_and_its_rule_in_the_bucket(double, on_double, tmp_path):
    theirs = {"action": {"type": "Delete"}, "condition": {"age": 3, "matchesPrefix": ["theirs/"]}}
    order(double, "lifecycle", bucket="shared", lifecycle={"rule": [theirs]})
    code = CONNECT + "print(jax.jit(lambda x: x * 3 + 1)(jnp.arange(4)).tolist())"
    first = on_double("--cache_ttl=36h")
    status, output = first.run_code(code)
    assert status == 0 and "[1, 4, 7, 10]" in output, output
    rules = wait_for(lambda: (contents(double)["lifecycle"]["rule"][1:]), 30, "our rule is there")
    prefixes = [f"team/{path}" for path in ("exe/v1/", "claim/v1/")]
    assert rules == [{"action": {"type": "Delete"}, "condition": {"age": 2, "matchesPrefix": prefixes}}]
    assert contents(double)["lifecycle"]["rule"][0] == theirs
    # A worker that ends waits for its uploads.
    first.stop()
    assert entries(double)
    # Written by the XML API, read by the JSON API.
    read = client(
        "import gcsfs\n"
        "fs = gcsfs.GCSFileSystem()\n"
        "names = fs.find('shared/team/exe')\n"
        "print(len(names), {fs.cat(name)[:4] for name in names})",
        double,
        tmp_path,
    )
    assert read.stdout.startswith(f"{len(entries(double))} "), read.stdout + read.stderr[-2000:]
    assert read.stdout.count("b'") == 1, "all begin with the same magic"
    second = on_double()
    status, output = second.run_code(code)
    assert status == 0 and "[1, 4, 7, 10]" in output, output
    totals = second.totals()
    assert totals["bucket_hits"] > 0 and totals["compiles"] == 0, totals


# Reads the numbers of programs, and runs a program that nobody has compiled before for each.
PROGRAMS = (
    CONNECT
    + """
import numpy as np
for line in sys.stdin:
    k = int(line)
    print(k, jax.jit(lambda x: x * k + 1)(np.arange(3, dtype=np.float32)).tolist(), flush=True)
"""
)

FAULTS = {
    "403 on reads": {"kind": {"status": 403}, "method": "GET"},
    "403 on writes": {"kind": {"status": 403}, "method": "PUT"},
    "a storm of 429": {"kind": {"status": 429}},
    "500": {"kind": {"status": 500}},
    "no answer": {"kind": "silence"},
    "cut in mid-body": {"kind": "cut_body"},
    "no such bucket": {"kind": {"status": 404}},
    "credentials that have expired": {"kind": {"status": 401}},
}


def warnings(log):
    """Texts of warnings, without their times, spans and values."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if " WARN " in line]
    return [re.sub(r"^(\w+\{[^}]*\}: )*", "", line.split(" WARN ", 1)[1]).split("=")[0] for line in lines]


def test_no_fault_of_the_bucket_fails_a_job_and_all_are_over_when_they_end(double, on_double):
    cluster = on_double()
    log = cluster.folder / "worker-0-0.log"
    process = cluster.start_client(["-c", PROGRAMS], stdin=subprocess.PIPE)
    numbers = iter(range(2, 10_000))

    def compute():
        k = next(numbers)
        process.stdin.write(f"{k}\n")
        process.stdin.flush()
        line = process.stdout.readline()
        while line and not line.startswith(f"{k} "):
            line = process.stdout.readline()
        assert line.strip() == f"{k} {[1.0, k + 1.0, 2 * k + 1.0]}", line

    def published():
        before = len(entries(double))
        compute()
        return wait_until_more(before)

    def wait_until_more(before):
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            if len(entries(double)) > before:
                return True
            time.sleep(0.05)
        return False

    try:
        for name, fault in FAULTS.items():
            # The bucket is asked again, so the next fault is met.
            wait_for(published, 120, f"recovered before {name}")
            said, began = len(warnings(log)), time.monotonic()
            order(double, "faults", **fault)
            for _ in range(3):
                compute()
            order(double, "faults", "DELETE")
            new = warnings(log)[said:]
            # Each at most once a minute.
            most = 1 + (time.monotonic() - began) // 60
            assert all(new.count(warning) <= most for warning in new), (name, new)
        wait_for(published, 120, "recovered from all")
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("fault", [None, "no answer", "403 on all", "no such bucket"])
def test_a_start_never_waits_long_for_a_bucket(double, on_double, fault):
    """The time itself is bounded where the bucket is asked (8 s); here it is that the rest does not wait, too."""
    if fault == "no such bucket":
        order(double, "bucket", "DELETE", bucket="shared")
    elif fault:
        order(double, "faults", kind="silence" if fault == "no answer" else {"status": 403})
    cluster = on_double()
    status, output = cluster.run_code(CONNECT + "print(jax.jit(lambda x: x + 1)(jnp.arange(2)).tolist())")
    assert status == 0 and "[1, 2]" in output, output
    said = [line for line in cluster.log_text().splitlines() if " WARN " in line and "bucket" in line]
    assert len(said) == (1 if fault else 0), said
    assert not [line for line in warnings(cluster.folder / "worker-0-0.log") if "cannot be used" in line]
    if fault == "no such bucket":
        order(double, "bucket", bucket="shared")
    order(double, "faults", "DELETE")

    def used():
        # Another program each time.
        number = time.monotonic_ns()
        code = CONNECT + f"print(jax.jit(lambda x: x + {number % 1_000_003})(jnp.arange(2)).tolist())"
        assert cluster.run_code(code)[0] == 0
        return entries(double)

    wait_for(used, 120, "the bucket is used once it is well")


def test_doctor_names_rights_and_rules(double):
    from conftest import BINARY, base_environment

    def doctor():
        environment = {**base_environment(), **gcs.server_environment(double)}
        command = [BINARY, "doctor", f"--gcs_scratch_location={LOCATION}"]
        done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=60)
        return done.returncode, done.stdout

    status, output = doctor()
    assert status == 0 and "ok storage.objects.create: granted" in output, output
    assert "-- lifecycle: the bucket has no rule" in output, output
    order(double, "permissions", bucket="shared", granted=["storage.objects.get", "storage.objects.list"])
    status, output = doctor()
    assert status == 64 and "!! storage.objects.create: not granted: nothing is published" in output, output
    assert "-- storage.buckets.update: not granted: no lifecycle rule is added" in output, output


def credentials(kind, url, folder):
    """A credentials file, as Google's own tools take it."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    file = folder / "credentials.json"
    if kind == "service account key":
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        account = {"private_key": pem.decode(), "private_key_id": "1", "client_email": "trainer@example.invalid"}
        file.write_text(json.dumps({"type": "service_account", "token_uri": f"{url}/token", "client_id": "1", **account}))
        return file
    subject = folder / "subject"
    subject.write_text("subject of the workload")
    account = {
        "type": "external_account",
        "audience": "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/q",
        "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
        "token_url": f"{url}/sts/v1/token",
        "credential_source": {"file": str(subject)},
    }
    if kind == "impersonation":
        impersonated = "serviceAccounts/trainer@example.invalid:generateAccessToken"
        account["service_account_impersonation_url"] = f"{url}/iam/v1/projects/-/{impersonated}"
    file.write_text(json.dumps(account))
    return file


@pytest.mark.parametrize("kind", ["service account key", "federation", "impersonation"])
def test_a_cluster_goes_by_the_credentials_of_a_file(double, tmp_path, kind):
    environment = {"GOOGLE_BASE_URL": double, "HOME": str(tmp_path)}
    # What is not signed is refused, and what is exchanged is good for a second.
    order(double, "tokens", required=True, lifetime_seconds=1)
    environment["GOOGLE_APPLICATION_CREDENTIALS"] = str(credentials(kind, double, tmp_path))
    code = CONNECT + "print(jax.jit(lambda x: x * 3 + 1)(jnp.arange(4)).tolist())"

    def run(name):
        folder = tmp_path / name
        folder.mkdir()
        cluster = Cluster(folder, f"--gcs_scratch_location={LOCATION}", f"--log_dir={folder}", environment=environment)
        try:
            status, output = cluster.run_code(code)
            assert status == 0 and "[1, 4, 7, 10]" in output, output
            wait_for(lambda: contents(double)["lifecycle"], 30, "the manager's rule is there")
            assert not [line for log in folder.glob("*.log") for line in warnings(log)]
            return cluster.totals()
        finally:
            cluster.stop()

    assert run("first")["compiles"] > 0 and entries(double)
    totals = run("second")
    assert totals["bucket_hits"] > 0 and totals["compiles"] == 0, totals
    answers = [call for call in order(double, "log", "GET") if not call["target"].startswith("/_double")]
    assert not [call for call in answers if call["status"] == 401], "every request came with a good token"
    exchanged = [call for call in answers if call["target"].startswith(("/sts/", "/iam/"))]
    assert bool(exchanged) == (kind != "service account key")
