"""Parts of a cluster started one by one, as a deployment does it."""

import contextlib
import pathlib
import shlex
import subprocess
import sys

from conftest import BINARY, CLIENT_ENVIRONMENT, base_environment, client_status, wait_for


class Parts:
    """Processes of the binary, each with a log and a ready file in a folder; `ends` them all."""

    def __init__(self, folder, environment=None):
        self.folder = pathlib.Path(folder)
        self.environment = {**base_environment(), **(environment or {})}
        self.running = {}

    def start(self, name, command, *flags, port=0, bind="127.0.0.1", environment=None, within=(), binary=BINARY):
        """Starts a part, on a free port if none is named, by way of the command `within`; gives its process."""
        self._ready(name).unlink(missing_ok=True)
        with open(self._log(name), "ab") as log:
            self.running[name] = subprocess.Popen(
                [*within, binary, command, f"--bind_address={bind}", f"--server_port={port}", f"--ready_file={self._ready(name)}", *flags],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder,
                env={**self.environment, **(environment or {})},
            )  # fmt: skip
        return self.running[name]

    def addresses(self, name):
        """Where a part listens, once it does: the service's HOST:PORT first."""

        def told():
            assert self.running[name].poll() is None, f"{name} has ended:\n{self.log(name)}"
            return self._ready(name).exists()

        wait_for(told, 60, f"{name} listens; it says:\n{self.log(name)}")
        return self._ready(name).read_text().split()

    def log(self, name):
        return self._log(name).read_text(errors="replace")[-6000:]

    def run_client(self, arguments, proxy, timeout=300, environment=None):
        """Runs a JAX process on a proxy; gives (status, output)."""
        done = subprocess.run(
            [sys.executable, *map(str, arguments)], env=self._of_client(proxy, environment), cwd=self.folder, text=True, timeout=timeout,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return client_status(done.returncode, done.stdout), done.stdout

    def start_client(self, name, arguments, proxy, environment=None):
        """Starts a JAX process on a proxy; gives the process, and a function that gives what it has told."""
        with open(self._log(name), "wb") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, *map(str, arguments)], env=self._of_client(proxy, environment), cwd=self.folder,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        return self.running[name], lambda: self.log(name)

    def _of_client(self, proxy, environment):
        return {
            **self.environment, **CLIENT_ENVIRONMENT, "JAX_PLATFORMS": "proxy", "JAX_BACKEND_TARGET": f"grpc://{proxy}",
            "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS": "true", **(environment or {}),
        }  # fmt: skip

    def stop(self):
        for process in self.running.values():
            process.terminate()
        for name, process in self.running.items():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(20)
                raise AssertionError(f"{name} did not end:\n{self.log(name)}") from None

    def _ready(self, name):
        return self.folder / f"{name}.ready"

    def _log(self, name):
        return self.folder / f"{name}.log"


@contextlib.contextmanager
def up(folder, *flags):
    """Runs `waystation up`; gives the environment that it prints for its clients."""
    with open(pathlib.Path(folder) / "up.log", "wb") as log:
        process = subprocess.Popen(
            [BINARY, "up", *flags], stdout=subprocess.PIPE, stderr=log, text=True, cwd=folder, env=base_environment()
        )
    try:
        environment = {}
        while "WAYSTATION_STATUS_URL" not in environment:
            line = process.stdout.readline()
            assert line, (pathlib.Path(folder) / "up.log").read_text()
            word, setting = shlex.split(line)
            assert word == "export"
            environment.update([setting.split("=", 1)])
        yield environment
    finally:
        process.terminate()
        process.wait(30)
    assert process.returncode == 0


@contextlib.contextmanager
def parts(folder, environment=None):
    made = Parts(folder, environment)
    try:
        yield made
    finally:
        made.stop()
