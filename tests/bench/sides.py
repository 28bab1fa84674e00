"""The sides of a comparison: a JAX client in a process of its own, and the servers behind it where there are some."""

import contextlib
import itertools
import json
import os
import pathlib
import select
import subprocess
import sys
import tempfile
import time

import psutil

CLIENT = pathlib.Path(__file__).with_name("client.py")
# The name under which JAX registers the plugin in process; any that is nobody else's.
PLUGIN_PLATFORM = "waystation_bench_plugin"
ROLES = ("proxy", "worker", "resource-manager", "compile-child")


def environment(**variables):
    """The environment without what would point a client or a server somewhere."""
    dropped = ("JAX_", "XLA_", "IFRT_PROXY", "PJRT_", "WAYSTATION_", "ENABLE_PATHWAYS", "PYTEST_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    # Nothing of Python's own may make the sides differ from run to run.
    return {**kept, "PYTHONHASHSEED": "0", "TF_CPP_MIN_LOG_LEVEL": "2", **variables}


def jax_cache(folder):
    """Variables that have JAX keep every compiled program in a folder."""
    if folder is None:
        return {}
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


class Side:
    """A client that takes commands. `command` runs it, perhaps under a launcher that brings servers up first."""

    def __init__(self, name, command, env, log, null_server=None):
        self.name = name
        self.null_server = null_server
        self._log = open(log, "ab")
        self.process = subprocess.Popen(
            [*command, sys.executable, str(CLIENT)], env=env, text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, start_new_session=True,
        )  # fmt: skip
        try:
            self.hello = self._answer()
        except BaseException:
            self.stop()
            raise

    def _answer(self):
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            raise RuntimeError(f"the client of side '{self.name}' ended with status {status}; see {self._log.name}")
        return json.loads(line)

    def run(self, part, setup=None, options=None):
        """One leg. The answer also has `cpu`: seconds by process."""
        self.begin(part, setup, options)
        return self.end()

    def begin(self, part, setup=None, options=None):
        """Starts a leg; `end` waits for it."""
        self._begun = (part, self.server_cpu())
        self.process.stdin.write(json.dumps({"part": part, "setup": setup or {}, "options": options or {}}) + "\n")

    def end(self):
        part, before = self._begun
        answer = self._answer()
        if "error" in answer:
            raise RuntimeError(f"'{part}' on side '{self.name}': {answer['error']}")
        cpu = {"client": answer.pop("cpu_seconds", 0.0)}
        after = self.server_cpu()
        cpu.update({role: after[role] - before.get(role, 0.0) for role in after})
        answer["cpu"] = cpu
        return answer

    def has_answered(self):
        """Whether `end` would not wait."""
        return bool(select.select([self.process.stdout], [], [], 0)[0])

    def resident(self):
        """Resident bytes of each server process now, by role."""
        found = {}
        for role, process in self.servers():
            with contextlib.suppress(psutil.Error):
                found[role] = found.get(role, 0) + process.memory_info().rss
        return found

    def client_resident(self):
        """Resident bytes of the client."""
        processes = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        return sum(process.memory_info().rss for process in processes if process.cmdline()[1:2] == [str(CLIENT)])

    def server_cpu(self):
        """CPU seconds so far of each server process of this side, by role."""
        seconds = {}
        for role, process in self.servers():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                seconds[role] = seconds.get(role, 0.0) + times.user + times.system
        return seconds

    def servers(self):
        """(role, process) of each server process."""
        if self.null_server:
            return [("null_server", psutil.Process(self.null_server.pid))]
        found = []
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    role = next((word for word in process.cmdline()[1:2] if word in ROLES), None)
                    if role:
                        found.append((role, process))
        return found

    def stop(self):
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        for process in filter(None, (self.process, self.null_server)):
            if process is self.null_server:
                process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._log.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


class Sides:
    """Makes sides; knows where the binaries are."""

    def __init__(self, binary, null_server, logs, transport):
        self.binary = binary
        self.load = null_server.with_name("load")
        self.cache_bench = null_server.with_name("cache_bench")
        self.checkpoint_bench = null_server.with_name("checkpoint_bench")
        self.gang_bench = null_server.with_name("gang_bench")
        self.loopback_bench = null_server.with_name("loopback_bench")
        self.transport = transport
        self.null_binary = null_server
        self._numbers = itertools.count()
        self.logs = pathlib.Path(logs)
        self.logs.mkdir(parents=True, exist_ok=True)

    def _log(self, name):
        return self.logs / f"{name}.log"

    def native(self, cache=None, env=None):
        """JAX's own CPU backend; with its persistent compilation cache in a folder if one is given."""
        variables = {**jax_cache(cache), **(env or {}), "JAX_PLATFORMS": "cpu"}
        return Side("native", [], environment(**variables), self._log("native"))

    def plugin(self, path, cache=None):
        """JAX with the worker's plugin loaded into its own process, with one device as the worker has; `cache` as above."""
        configuration = self.logs / "plugin.json"
        configuration.write_text(json.dumps({"library_path": path, "create_option": {"cpu_device_count": 1}}))
        env = environment(
            JAX_PLATFORMS=PLUGIN_PLATFORM,
            PJRT_NAMES_AND_LIBRARY_PATHS=f"{PLUGIN_PLATFORM}:{configuration}",
            **jax_cache(cache),
        )
        return Side("plugin", [], env, self._log("plugin"))

    def waystation(self, *flags, devices=1, workers=1, transport=None, env=None):
        """A client under `waystation run`: proxy, resource manager and workers; all of them have the variables."""
        command = [self.binary, "run", "--workers", workers, "--devices_per_worker", devices]
        command += ["--transport", transport or self.transport]
        command = [str(word) for word in (*command, *flags, "--")]
        return Side("waystation", command, environment(**(env or {})), self._log("waystation"))

    def null(self, devices=1, transport=None):
        """A client of the null server."""
        socket = f"waystation-bench-{os.getpid()}-{next(self._numbers)}"
        with tempfile.TemporaryDirectory() as folder:
            ready = pathlib.Path(folder, "ready")
            with open(self._log("null"), "ab") as log:
                server = subprocess.Popen(
                    [str(self.null_binary), "--devices", str(devices), "--ready-file", str(ready), "--unix-socket", socket],
                    stdout=log, stderr=log,
                )  # fmt: skip
            deadline = time.monotonic() + 30
            while not ready.exists():
                if server.poll() is not None or time.monotonic() > deadline:
                    server.kill()
                    raise RuntimeError(f"the null server does not come up; see {self._log('null')}")
                time.sleep(0.02)
            address = ready.read_text().strip()
        target = f"grpc://unix-abstract:{socket}" if (transport or self.transport) == "unix" else f"grpc://{address}"
        env = environment(
            JAX_PLATFORMS="proxy", JAX_BACKEND_TARGET=target, IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS="true"
        )
        return Side("null", [], env, self._log("null"), null_server=server)
