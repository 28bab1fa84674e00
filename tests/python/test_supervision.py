"""What `waystation run` and the separate roles do when something happens to them: terminals, signals, deaths, restarts."""

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import time

import psutil
from conftest import BINARY, CONNECT, base_environment, wait_for
from test_cli import marker, nothing_left, start, started_by  # noqa: F401 (marker is a fixture)


def role_of(process):
    """`worker`, `proxy`, ... of a process of ours."""
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()
        # None while it starts another program.
        if words and os.path.basename(words[0]) == BINARY.name:
            return words[1]
    return None


def processes(marker, role):
    return [process for process in started_by(marker) if role_of(process) == role]


COUNTS_INTERRUPTS = """
import signal, time
count = 0
def interrupted(*_):
    global count
    count += 1
signal.signal(signal.SIGINT, interrupted)
print("ready", flush=True)
deadline = time.monotonic() + 20
while not count and time.monotonic() < deadline:
    time.sleep(0.05)
time.sleep(1)
print("interrupts:", count, flush=True)
raise SystemExit(5)
"""


def test_ctrl_c_at_a_terminal_reaches_the_command_once(marker):
    """The terminal sends it to the command itself; a second one from `run` would break into the command's clean-up."""
    pid, terminal = pty.fork()
    if pid == 0:
        environment = {**base_environment(), "MARKER": marker}
        os.execve(BINARY, [str(BINARY), "run", "--", sys.executable, "-c", COUNTS_INTERRUPTS], environment)
    output, sent = b"", False
    with contextlib.suppress(OSError):
        while data := os.read(terminal, 4096):
            output += data
            if b"ready" in output and not sent:
                sent = True
                os.write(terminal, b"\x03")
    _, status = os.waitpid(pid, 0)
    assert b"interrupts: 1" in output, output.decode()
    assert os.waitstatus_to_exitcode(status) == 5
    nothing_left(marker)


def test_a_signal_to_run_alone_goes_on_to_the_command(marker):
    run = start(marker, "run", "--", sys.executable, "-c", COUNTS_INTERRUPTS)
    assert run.stdout.readline() == "ready\n"
    run.send_signal(signal.SIGINT)
    assert run.wait(30) == 5
    assert "interrupts: 1" in run.stdout.read()
    nothing_left(marker)


def test_the_third_signal_kills_a_command_that_does_not_listen(marker):
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
    run = start(marker, "run", "--", sys.executable, "-c", code)
    assert run.stdout.readline() == "ready\n"
    for _ in range(3):
        assert run.poll() is None
        run.terminate()
        time.sleep(0.3)
    assert run.wait(30) == 128 + signal.SIGKILL
    nothing_left(marker)


def test_a_signal_while_starting_takes_everything_down(marker):
    run = start(marker, "run", "--workers=2", "--", "touch", f"/tmp/{marker}")
    wait_for(lambda: processes(marker, "resource-manager"), 30, "the resource manager runs")
    run.terminate()
    status = run.wait(30)
    assert status in (128 + signal.SIGTERM, 0), status  # 0: everything was up already
    nothing_left(marker)


def test_kill_9_of_run_kills_the_command_too(marker):
    run = start(marker, "run", "--", "sleep", "600")
    wait_for(lambda: any(p.name() == "sleep" for p in started_by(marker)), 30, "the command runs")
    run.kill()
    run.wait(20)
    nothing_left(marker)


def test_a_workers_death_is_told_with_its_last_lines(marker, tmp_path):
    run = start(marker, "run", "--workers=2", f"--log_dir={tmp_path}", "--", "cat", stdin=subprocess.PIPE)
    wait_for(lambda: any(p.name() == "cat" for p in started_by(marker)), 30, "the command runs")
    worker = next(p for p in processes(marker, "worker") if "--task=1" in p.cmdline())
    worker.kill()
    time.sleep(0.5)
    assert run.poll() is None, "a worker's death must not end the command"
    _, errors = run.communicate("", timeout=30)
    assert run.returncode == 0
    assert "worker-0-1 has ended (signal: 9" in errors, errors
    assert "registered" in errors and (tmp_path / "worker-0-1.log").is_file()
    nothing_left(marker)


def compile_children(marker):
    """The compile child of each worker, by the worker's process id."""
    return {child.ppid(): child for child in processes(marker, "compile-child")}


def test_a_compile_child_ends_with_its_worker(marker):
    run = start(marker, "run", "--workers=2", "--", "sleep", "600")
    children = wait_for(lambda: len(found := compile_children(marker)) == 2 and found, 30, "both workers have a child")
    workers = {worker.pid: worker for worker in processes(marker, "worker")}
    assert set(children) == set(workers), "a compile child is its worker's"
    pid, child = children.popitem()
    workers[pid].kill()
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, 10, "the child ends with its worker")
    assert run.poll() is None
    run.terminate()
    run.wait(30)
    nothing_left(marker)


def test_a_worker_without_a_compile_child_compiles(marker):
    code = CONNECT + "print('value', float(jax.jit(lambda x: x * 2)(21.0)), flush=True); sys.stdin.readline()"
    flags = ["--compile_in_child=false"]
    run = start(marker, "run", *flags, "--", sys.executable, "-c", code, stdin=subprocess.PIPE)
    assert run.stdout.readline() == "value 42.0\n"
    assert not compile_children(marker)
    run.communicate("\n", timeout=30)
    assert run.returncode == 0
    nothing_left(marker)


LOSES_ITS_WORKER = CONNECT + """
x = jnp.arange(8.0)
print("ready", float(x.sum()), flush=True)
sys.stdin.readline()
try:
    print("still", float((x * 2).sum()), flush=True)
except Exception as error:
    print("lost", str(error)[:9], flush=True)
"""


def test_a_killed_worker_is_data_loss_and_is_started_again(marker):
    up = start(marker, "up", "--devices_per_worker=2")
    lines = [up.stdout.readline()]
    while "WAYSTATION_STATUS_URL" not in lines[-1]:
        lines.append(up.stdout.readline())
    exported = dict(re.fullmatch(r"export (\w+)=(\S+)\n", line).groups() for line in lines)
    environment = {**base_environment(), **exported}
    client = subprocess.Popen(
        [sys.executable, "-c", LOSES_ITS_WORKER], text=True, env=environment,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert client.stdout.readline() == "ready 28.0\n"
    [worker] = processes(marker, "worker")
    worker.kill()
    worker.wait(20)
    output, errors = client.communicate("\n", timeout=60)
    assert output == "lost DATA_LOSS\n", (output, errors[-3000:])
    late = subprocess.run(
        [sys.executable, "-c", CONNECT + "print(jax.device_count(), jax.jit(lambda x: x + 1)(1))"],
        text=True, capture_output=True, timeout=120, env=environment,
    )  # fmt: skip
    assert late.stdout == "2 2\n", late.stderr[-3000:]
    up.send_signal(signal.SIGINT)
    assert up.wait(30) == 0
    nothing_left(marker)


def test_each_of_many_workers_that_end_at_once_is_started_again(marker):
    run = start(marker, "run", "--workers=6", "--devices_per_worker=1", "--", "cat", stdin=subprocess.PIPE)
    wait_for(lambda: any(p.name() == "cat" for p in started_by(marker)), 60, "the command runs")
    old = processes(marker, "worker")
    assert len(old) == 6
    for worker in old:
        worker.kill()
    wait_for(lambda: len(set(processes(marker, "worker")) - set(old)) == 6, 60, "six other workers run")
    run.communicate("", timeout=60)
    assert run.returncode == 0
    nothing_left(marker)


def test_the_resource_manager_is_started_again_on_its_port(marker):
    """Workers that are lost after it are not lost for good."""
    up = start(marker, "up", "--devices_per_worker=2")
    lines = [up.stdout.readline()]
    while "WAYSTATION_STATUS_URL" not in lines[-1]:
        lines.append(up.stdout.readline())
    exported = dict(re.fullmatch(r"export (\w+)=(\S+)\n", line).groups() for line in lines)
    for role in ("resource-manager", "worker"):
        [old] = processes(marker, role)
        old.kill()
        wait_for(lambda: set(processes(marker, role)) - {old}, 30, f"another {role} runs")  # noqa: B023 (called here)
    late = subprocess.run(
        [sys.executable, "-c", CONNECT + "print(jax.device_count(), jax.jit(lambda x: x + 1)(1))"],
        text=True, capture_output=True, timeout=120, env={**base_environment(), **exported},
    )  # fmt: skip
    assert late.stdout == "2 2\n", late.stderr[-3000:]
    up.send_signal(signal.SIGINT)
    assert up.wait(30) == 0
    nothing_left(marker)


def test_up_prints_the_environment_and_status_answers(marker):
    up = start(marker, "up", "--devices_per_worker=2")
    environment = {}
    while "WAYSTATION_STATUS_URL" not in environment:
        line = up.stdout.readline()
        name, value = re.fullmatch(r"export (\w+)=(\S+)\n", line).groups()
        environment[name] = value

    def has_its_devices():
        status = subprocess.run(
            [BINARY, "status"], text=True, capture_output=True, timeout=30, env={**base_environment(), **environment}
        )
        assert status.returncode == 0, status
        return '"devices": 2' in status.stdout

    # The proxy is there at once; clients wait for the worker, and so does this.
    wait_for(has_its_devices, 30, "the worker has registered")
    client = subprocess.run(
        [sys.executable, "-c", CONNECT + "print(jax.device_count())"],
        text=True, capture_output=True, timeout=120, env={**base_environment(), **environment},
    )  # fmt: skip
    assert client.stdout.strip() == "2", client.stderr[-2000:]
    up.send_signal(signal.SIGINT)
    assert up.wait(30) == 0
    nothing_left(marker)


HOLDS_AN_ARRAY = CONNECT + """
x = jnp.arange(8.0) + 1
print("ready", float(x.sum()), flush=True)
sys.stdin.readline()
print("again", float((x * 2).sum()), jax.devices()[0].id, flush=True)
"""


def test_a_session_outlives_a_restart_of_the_resource_manager(marker, tmp_path):
    def part(*arguments):
        ready = tmp_path / f"{arguments[0]}-{time.monotonic()}"
        process = start(marker, *arguments, f"--ready_file={ready}")
        wait_for(ready.exists, 30, f"{arguments[0]} is ready")
        return process, ready.read_text().split()[0]

    manager, address = part("server", "--node_type=resource_manager", "--server_port=0", "--enforce_kernel_ipv6_support=false")
    part("server", "--server_port=0", f"--resource_manager_address={address}", "--devices_per_worker=2")
    _, target = part("proxy", "--server_port=0", f"--resource_manager_address={address}", "--xla_cpu_enable_fast_math=false")
    environment = {
        **base_environment(), "MARKER": marker, "JAX_PLATFORMS": "proxy", "JAX_BACKEND_TARGET": f"grpc://{target}",
        "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS": "true",
    }  # fmt: skip
    client = subprocess.Popen(
        [sys.executable, "-c", HOLDS_AN_ARRAY], text=True, env=environment,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert client.stdout.readline() == "ready 36.0\n"
    manager.kill()
    manager.wait(20)
    manager, again = part("resource-manager", f"--server_port={address.rsplit(':', 1)[1]}")
    assert again == address
    time.sleep(3)  # Worker and proxy have dialled again by then.
    output, errors = client.communicate("\n", timeout=60)
    assert output == "again 72.0 0\n", errors[-3000:]
    # The cluster is complete again for a client that comes now.
    late = subprocess.run(
        [sys.executable, "-c", CONNECT + "print(jax.device_count(), jax.jit(lambda x: x + 1)(1))"],
        text=True, capture_output=True, timeout=120, env=environment,
    )  # fmt: skip
    assert late.stdout == "2 2\n", late.stderr[-3000:]
