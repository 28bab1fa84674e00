"""The `waystation` command as a person meets it: exit statuses, one-line errors, and no process left behind."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
from conftest import BINARY, CONNECT, base_environment, client_status, kill_group, wait_for

USAGE = 64


def waystation(*arguments, timeout=60, env=None, **options):
    return subprocess.run(
        [BINARY, *map(str, arguments)], text=True, capture_output=True, timeout=timeout,
        env={**base_environment(), **(env or {})}, **options,
    )  # fmt: skip


def started_by(marker):
    """Running processes whose environment holds the marker. Those that only wait for init to reap them do not run."""
    found = []
    for process in psutil.process_iter():
        try:
            marked = process.pid != os.getpid() and process.environ().get("MARKER") == marker
            if marked and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def marker(tmp_path):
    """A mark in the environment of everything that a test starts; what is left at the end is killed."""
    mark = f"{tmp_path.name}-{os.getpid()}"
    yield mark
    for process in started_by(mark):
        process.kill()


def command_lines(processes):
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found.append((process.pid, process.cmdline()[:3]))
    return found


def start(marker, *arguments, **options):
    return subprocess.Popen(
        [BINARY, *map(str, arguments)], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**base_environment(), "MARKER": marker}, start_new_session=True, **options,
    )  # fmt: skip


def nothing_left(marker, seconds=10):
    wait_for(
        lambda: not started_by(marker),
        seconds,
        f"no process is left; there are {command_lines(started_by(marker))}",
    )


def one_line(done, *fragments):
    assert done.returncode == USAGE, (done.returncode, done.stdout, done.stderr)
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    for fragment in fragments:
        assert fragment in lines[0], lines[0]


# ---- help and versions


@pytest.mark.parametrize("command", [[], ["run"], ["up"], ["proxy"], ["worker"], ["resource-manager"], ["server"]])
def test_help_reads_well(command):
    done = waystation(*command, "--help")
    assert done.returncode == 0, done.stderr
    assert "Usage:" in done.stdout
    # Every option says what it is for.
    lines = done.stdout.splitlines()
    for i, line in enumerate(lines):
        if line.lstrip().startswith(("-", "--")) and line.startswith(" "):
            words = line.strip().split("  ", 1)
            text = words[1] if len(words) > 1 else lines[i + 1]
            assert text.strip(), f"no text for {line!r} of {command}"


def test_version():
    done = waystation("--version")
    assert done.returncode == 0 and done.stdout.startswith("waystation "), done.stdout


# ---- statuses


@pytest.mark.parametrize("status", [0, 1, 7, 64, 255])
def test_run_exits_with_the_commands_status(marker, status):
    done = waystation("run", "--", "sh", "-c", f"exit {status}", env={"MARKER": marker})
    assert done.returncode == status, done.stderr
    nothing_left(marker)


def test_run_passes_streams_and_arguments_through(marker):
    done = waystation("run", "--workers=1", "--", "sh", "-c", 'cat; echo "$1|$2" >&2', "x", "a b", "--workers", env={"MARKER": marker}, input="hello")
    assert done.returncode == 0
    assert done.stdout == "hello", done.stdout
    assert "a b|--workers" in done.stderr
    nothing_left(marker)


def test_run_exports_the_clients_environment(marker):
    done = waystation("run", "--devices_per_worker=2", "--", "env", env={"MARKER": marker})
    environment = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert environment["JAX_PLATFORMS"] == "proxy"
    assert environment["JAX_BACKEND_TARGET"].startswith("grpc://127.0.0.1:")
    assert environment["IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS"] == "true"
    assert environment["ENABLE_PATHWAYS_PERSISTENCE"] == "1"
    assert environment["WAYSTATION_STATUS_URL"].endswith("/status")


def test_a_command_that_is_not_there(marker):
    done = waystation("run", "--", "/no/such/command", env={"MARKER": marker})
    assert done.returncode in (USAGE, 127), done
    assert "/no/such/command" in done.stderr
    nothing_left(marker)


def test_a_command_killed_by_a_signal(marker):
    done = waystation("run", "--", "sh", "-c", "kill -TERM $$", env={"MARKER": marker})
    assert done.returncode == 128 + signal.SIGTERM, done
    nothing_left(marker)


# ---- bad input: one line, 64, before anything starts


@pytest.mark.parametrize(
    "location,fragment",
    [
        ("ftp://bucket/x", "ftp"),
        ("gs://", "bucket"),
        ("file:///dev/null/x", "/dev/null/x"),
        ("no scheme at all", "no scheme at all"),
        ("http://", "http"),
    ],
)
def test_a_location_that_cannot_be_understood(marker, location, fragment):
    done = waystation("run", "--gcs_scratch_location", location, "--", "touch", f"/tmp/{marker}", env={"MARKER": marker})
    one_line(done, fragment)
    assert not pathlib.Path(f"/tmp/{marker}").exists(), "the command ran all the same"
    nothing_left(marker)


def test_a_plugin_that_is_not_there(marker):
    one_line(waystation("run", "--pjrt_plugin", "/no/such/plugin.so", "--", "true", env={"MARKER": marker}), "/no/such/plugin.so")
    one_line(waystation("run", "--pjrt_plugin", "abacus", "--", "true", env={"MARKER": marker}), "abacus")
    nothing_left(marker)


def test_a_file_that_is_no_plugin(marker, tmp_path):
    fake = tmp_path / "plugin.so"
    fake.write_bytes(b"not a library")
    done = waystation("run", f"--pjrt_plugin={fake}", "--", "true", env={"MARKER": marker})
    one_line(done, str(fake))
    nothing_left(marker)


@pytest.mark.parametrize("role", ["proxy", "resource-manager"])
def test_a_port_in_use(marker, role):
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        more = ["--resource_manager_address=127.0.0.1:1"] if role == "proxy" else []
        done = waystation(role, f"--server_port={port}", *more, env={"MARKER": marker}, timeout=20)
        one_line(done, str(port))


@pytest.mark.parametrize("flags", [["--no_such_flag"], ["--workers", "many"], ["--workers", "0"], ["--devices_per_worker", "0"], []])
def test_bad_usage(marker, flags):
    command = ["run", *flags, "--", "true"] if flags else ["run"]
    done = waystation(*command, env={"MARKER": marker})
    assert done.returncode == USAGE, (done.returncode, done.stderr)
    assert done.stderr.strip()
    nothing_left(marker)


def test_hyphens_and_underscores_both_work(marker):
    for flags in [["--devices_per_worker", "2"], ["--devices-per-worker", "2"], ["--devices-per_worker=2"]]:
        done = waystation("run", *flags, "--", "true", env={"MARKER": marker})
        assert done.returncode == 0, (flags, done.stderr)


def test_a_bucket_that_does_not_answer_is_one_warning(marker):
    """The job runs on memory."""
    done = waystation(
        "run", "--devices_per_worker", "2", "--gcs_scratch_location", "gs://waystation-no-such-bucket/x", "--",
        sys.executable, "-c", CONNECT + "print('sum', jax.jit(lambda x: x + 1)(1))",
        env={"MARKER": marker, "STORAGE_EMULATOR_HOST": "http://127.0.0.1:9", "GOOGLE_BASE_URL": "http://127.0.0.1:9"}, timeout=180,
    )  # fmt: skip
    assert client_status(done.returncode, done.stderr) == 0 and "sum 2" in done.stdout, done.stderr[-3000:]
    warnings = [line for line in done.stderr.splitlines() if "waystation-no-such-bucket" in line]
    assert len(warnings) == 1, done.stderr[-3000:]


# ---- no process left behind


def waiting(marker, tmp_path, command):
    """A run whose command has started."""
    told = tmp_path / "started"
    run = start(marker, "run", "--devices_per_worker", "2", "--", "sh", "-c", f"echo $$ > {told}; {command}")
    wait_for(lambda: told.exists() and told.read_text().strip(), 30, "the command has started")
    time.sleep(0.1)
    return run, int(told.read_text())


def test_ctrl_c_ends_everything(marker, tmp_path):
    run, _ = waiting(marker, tmp_path, "exec sleep 600")
    # What a terminal does: the signal goes to every process of the foreground group.
    kill_group(run, signal.SIGINT)
    assert run.wait(20) == 128 + signal.SIGINT
    nothing_left(marker)


def test_terminating_run_ends_everything(marker, tmp_path):
    run, _ = waiting(marker, tmp_path, "exec sleep 600")
    run.terminate()
    assert run.wait(20) != 0
    nothing_left(marker)


def test_killing_the_command_ends_everything(marker, tmp_path):
    run, command = waiting(marker, tmp_path, "exec sleep 600")
    os.kill(command, signal.SIGKILL)
    assert run.wait(20) == 128 + signal.SIGKILL
    nothing_left(marker)


def test_kill_9_of_run_leaves_no_server(marker, tmp_path):
    run, command = waiting(marker, tmp_path, "exec sleep 600")
    run.kill()
    run.wait(20)
    wait_for(
        lambda: not [p for p in started_by(marker) if p.pid != command and p.name() == BINARY.name],
        10,
        f"no server is left; there are {command_lines(started_by(marker))}",
    )


def test_two_runs_at_once(marker):
    code = CONNECT + "assert len(jax.devices()) == 2; print('sum', jax.jit(lambda x: x + 1)(1))"
    runs = [start(marker, "run", "--devices_per_worker", "2", "--", sys.executable, "-c", code) for _ in range(2)]
    for run in runs:
        output, errors = run.communicate(timeout=180)
        assert client_status(run.returncode, errors) == 0 and "sum 2" in output, errors[-3000:]
    nothing_left(marker)


def test_the_parts_started_by_hand(marker, tmp_path):
    """Resource manager, worker and proxy as separate commands, as a deployment starts them."""

    def part(*arguments):
        ready = tmp_path / arguments[0]
        process = start(marker, *arguments, f"--ready_file={ready}")

        def is_ready():
            assert process.poll() is None, process.communicate()[1]
            return ready.exists()

        wait_for(is_ready, 30, f"{arguments[0]} is ready")
        return process, ready.read_text().splitlines()

    manager, lines = part("resource-manager", "--server_port=0", "--instance_count=1", "--instance_type=cpu:4")
    address = lines[0]
    worker, _ = part("worker", "--server-port", "0", f"--resource_manager_address={address}", "--devices=4")
    proxy, lines = part("proxy", "--server_port=0", f"--resource-manager-address={address}")
    client = subprocess.run(
        [sys.executable, "-c", CONNECT + "print(len(jax.devices()), jax.jit(lambda x: x + 1)(1))"],
        text=True, capture_output=True, timeout=120,
        env={**base_environment(), "JAX_PLATFORMS": "proxy", "JAX_BACKEND_TARGET": f"grpc://{lines[0]}",
             "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS": "true"},
    )  # fmt: skip
    assert client_status(client.returncode, client.stderr) == 0 and client.stdout.split()[1] == "2", client.stderr[-3000:]
    for process in (proxy, worker, manager):
        process.terminate()
        assert process.wait(20) == 0
    nothing_left(marker)
