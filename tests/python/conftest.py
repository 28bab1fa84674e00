"""Brings clusters up for the end-to-end tests.

A cluster is real processes of the release binary; a client is a real Python process with JAX. Clusters are kept for the
session, one of each shape, and started when a test first asks for one.
"""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import urllib.request
import warnings

import checkpoint_fixtures
import psutil
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CLIENTS = pathlib.Path(__file__).parent / "clients"
BINARY = pathlib.Path(os.environ.get("WAYSTATION_BINARY", ROOT / "target/release/waystation"))

# What a client's code begins with. Older JAX does not know the "proxy" platform by itself; pathwaysutils registers it.
CONNECT = "import sys, jax, jax.numpy as jnp, pathwaysutils; pathwaysutils.initialize(); "

# What begins a line of a client program of `clients/` that tells how a check went.
MARK = "@@check "

# The command that a held cluster runs: tells its environment, then waits until its stdin ends.
HOLD = (
    "import json, os, sys; f = sys.argv[1]; open(f + '.new', 'w').write(json.dumps(dict(os.environ)));"
    "os.rename(f + '.new', f); sys.stdin.read()"
)


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes minutes; `make soak` runs it")


def pytest_collection_modifyitems(config, items):
    if config.getoption("-m"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run by `make soak`"))


def pytest_sessionstart(session):
    if not BINARY.is_file():
        pytest.exit(f"no binary at {BINARY}: run `make build` first, or name it in WAYSTATION_BINARY", returncode=2)


def base_environment():
    """The environment without what would point a client or a server somewhere; the plugin comes from this Python."""
    dropped = ("JAX_", "XLA_", "IFRT_PROXY", "WAYSTATION_", "ENABLE_PATHWAYS", "PYTEST_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return {**kept, "WAYSTATION_PYTHON": sys.executable, "WAYSTATION_CACHE_HISTORY": "none"}


def wait_for(condition, seconds, what):
    """Waits until the condition gives something true, and gives that."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"after {seconds} s still not: {what}")
        time.sleep(0.05)


# What a client of any side has.
CLIENT_ENVIRONMENT = {"PYTHONPATH": f"{CLIENTS}:{CLIENTS.parent}", "PYTHONUNBUFFERED": "1"}


# JAX's types of 64 bits are on.
X64 = {"JAX_ENABLE_X64": "1"}


def run_plainly(arguments, environment=None, devices=4, timeout=600):
    """Runs a client on plain JAX, on its own CPU backend, with nothing of Waystation; gives (status, output)."""
    environment = {
        **base_environment(), **CLIENT_ENVIRONMENT, **X64, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices),
        **(environment or {}),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], env=environment, text=True, timeout=timeout,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout


# What jaxlib 0.10.2 says when it breaks off the interpreter's end, as it does now and then (docs/compatibility.md).
ABORT_AT_EXIT = ("IFRT proxy server disconnected: CANCELLED", "Py_FinalizeEx", "Mutex corrupt")


def client_status(status, output):
    """The exit status of a client, which is 0 where jaxlib has aborted when the program had ended well.

    Not by running it again: what it has done to a cluster, a cache and its folders is done.
    """
    aborted = status in (-signal.SIGABRT, 128 + signal.SIGABRT) and all(words in output for words in ABORT_AT_EXIT)
    if not aborted or "Traceback (most recent call last)" in output:
        return status
    warnings.warn(f"jaxlib aborted at the end of a client that had ended well:\n{output[-2000:]}", stacklevel=2)
    return 0


class Checks:
    """What the checks of one run of a client program came to."""

    def __init__(self, status, output):
        self.status, self.output = status, output
        lines = [json.loads(line[len(MARK) :]) for line in output.splitlines() if line.startswith(MARK)]
        self.by_name = {line["name"]: line for line in lines}

    def judge(self, name):
        """Fails or skips the test if the check of that name did."""
        line = self.by_name.get(name)
        if line is None:
            pytest.fail(f"the client never got there: it ended with {self.status}; its last words:\n{self.output[-3000:]}")
        if line["result"] == "skipped":
            pytest.skip(line["detail"])
        assert line["result"] == "passed", line["detail"]


def named_once(pairs):
    """A JSON object's; Python's reader would keep the last of two that are named alike, and others the first."""
    names = [name for name, _ in pairs]
    assert len(names) == len(set(names)), names
    return dict(pairs)


class Cluster:
    """One `waystation run` that is held open, and the environment that it gives to its clients."""

    def __init__(self, folder, *flags, environment=None):
        self.folder = pathlib.Path(folder)
        self.log = self.folder / "server.log"
        told = self.folder / "environment.json"
        command = [str(BINARY), "run", *flags, "--", sys.executable, "-c", HOLD, str(told)]
        self._log_file = open(self.log, "wb")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=self._log_file, stderr=subprocess.STDOUT,
            env={**base_environment(), **(environment or {})}, cwd=self.folder, start_new_session=True,
        )  # fmt: skip

        def ready():
            if self.process.poll() is not None:
                raise AssertionError(f"{command} ended with {self.process.returncode}:\n{self.log_text()}")
            return told.exists()

        try:
            wait_for(ready, 60, f"cluster is up; it says:\n{self.log_text()}")
        except BaseException:
            self.stop()
            raise
        self.environment = json.loads(told.read_text())

    def log_text(self):
        return self.log.read_text(errors="replace")[-4000:] if self.log.exists() else ""

    def status(self):
        with urllib.request.urlopen(self.environment["WAYSTATION_STATUS_URL"], timeout=10) as response:
            return json.load(response, object_pairs_hook=named_once)

    def totals(self):
        return self.status()["totals"]

    def children(self, role=None):
        """The server processes, or those of one role ("worker", "proxy", "resource-manager")."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if pathlib.Path(words[0]).name == BINARY.name and (role is None or role in words[1:2]):
                    found.append(process)
        return found

    def start_client(self, arguments, **options):
        environment = {**self.environment, **CLIENT_ENVIRONMENT, **options.pop("env", {})}
        return subprocess.Popen(
            [sys.executable, *map(str, arguments)], env=environment, text=True, cwd=self.folder,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options,
        )  # fmt: skip

    def run_client(self, arguments, timeout=300, **options):
        """Runs a client to its end; gives (status, output)."""
        process = self.start_client(arguments, **options)
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            return "timed out", output
        return client_status(process.returncode, output), output

    def run_code(self, code, timeout=300, **options):
        return self.run_client(["-c", code], timeout, **options)

    def stop(self):
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)
            raise AssertionError("the cluster did not end when its command had ended") from None
        finally:
            self._log_file.close()


@pytest.fixture(scope="session")
def clusters(tmp_path_factory):
    """Gives the cluster of a shape, and of further flags: clusters(workers, devices_per_worker, ...)."""
    running = {}

    def get(workers=1, devices=8, *flags):
        shape = (workers, devices, *flags)
        if shape in running and running[shape].process.poll() is not None:
            raise AssertionError(f"the cluster {shape} has died:\n{running[shape].log_text()}")
        if shape not in running:
            folder = tmp_path_factory.mktemp(f"cluster-{workers}x{devices}")
            flags = ("--workers", str(workers), "--devices_per_worker", str(devices), *flags)
            running[shape] = Cluster(folder, *flags)
        return running[shape]

    yield get
    for cluster in running.values():
        cluster.stop()


@pytest.fixture
def cluster(clusters):
    """One worker with eight devices, shared by the session's tests."""
    return clusters(1, 8)


@pytest.fixture
def own_cluster(tmp_path):
    """Makes clusters of this test alone: own_cluster("--workers", "1", ...)."""
    made = []

    def make(*flags):
        folder = tmp_path / f"cluster{len(made)}"
        folder.mkdir()
        made.append(Cluster(folder, *flags))
        return made[-1]

    yield make
    for cluster in made:
        if cluster.process.poll() is None:
            cluster.stop()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Checkpoints that real Orbax wrote: (folder, what each holds); see checkpoint_fixtures.py."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, checkpoint_fixtures.generate(folder)


def kill_group(process, signal_number=signal.SIGKILL):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal_number)
