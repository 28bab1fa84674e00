"""Folders that workers share, or do not: each of two workers in a mount namespace of its own, as on two machines."""

import pathlib
import subprocess
import sys

import pytest
from conftest import BINARY, CLIENT_ENVIRONMENT, CLIENTS, X64, base_environment, client_status, wait_for

# Has the folder $1 be another one, $2, for what follows.
ELSEWHERE = 'mount --bind "$2" "$1" && shift 2 && exec "$@"'


def can_unshare():
    return subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0


class Parts:
    """A resource manager, two workers and a proxy, each started by hand."""

    def __init__(self, folder):
        self.folder, self.running = folder, []

    def start(self, name, *arguments, before=()):
        ready, log = self.folder / f"{name}.ready", self.folder / f"{name}.log"
        with open(log, "wb") as file:
            command = [*before, BINARY, *arguments, "--server_port=0", "--bind_address=127.0.0.1", f"--ready_file={ready}"]
            process = subprocess.Popen(
                list(map(str, command)), env=base_environment(), stdout=file, stderr=file, start_new_session=True
            )
        self.running.append(process)

        def is_ready():
            assert process.poll() is None, log.read_text()[-3000:]
            return ready.exists()

        wait_for(is_ready, 60, f"{name} is ready")
        return ready.read_text().splitlines()[0]

    def stop(self):
        for process in reversed(self.running):
            process.kill()
            process.wait()


@pytest.fixture
def cluster_of(tmp_path):
    """Brings up two workers, of which the second finds `elsewhere` where the first has `shared`; gives the client's way in."""
    parts = Parts(tmp_path)

    def bring_up(shared, elsewhere):
        manager = parts.start("manager", "resource-manager", "--workers=2")
        for task, before in enumerate([(), ("unshare", "-m", "sh", "-c", ELSEWHERE, "sh", shared, elsewhere)]):
            parts.start(
                f"worker{task}", "worker", f"--resource_manager_address={manager}", f"--task={task}", "--slice_tasks=2",
                "--devices_per_worker=4", before=before,
            )  # fmt: skip
        address = parts.start("proxy", "proxy", f"--resource_manager_address={manager}", "--status_port=0")
        return {
            **base_environment(), **CLIENT_ENVIRONMENT, **X64, "JAX_PLATFORMS": "proxy",
            "JAX_BACKEND_TARGET": f"grpc://{address}", "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS": "true",
            "ENABLE_PATHWAYS_PERSISTENCE": "1",
        }  # fmt: skip

    yield bring_up
    parts.stop()


def save(environment, folder):
    done = subprocess.run(
        [sys.executable, CLIENTS / "saving.py", "pytree_zarr2"], env={**environment, "SCRATCH": str(folder)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240,
    )  # fmt: skip
    return client_status(done.returncode, done.stdout), done.stdout


def arrays_in(folder):
    """Files that belong to arrays, and what workers leave to find each other by."""
    names = [path.name for path in pathlib.Path(folder).rglob("*") if path.is_file()]
    return [name for name in names if name in (".zarray", "zarr.json") or name.replace(".", "").isdigit() or "waystation" in name]


@pytest.mark.skipif(not can_unshare(), reason="mount namespaces take rights that this user does not have")
@pytest.mark.parametrize("same", [False, True], ids=["two folders", "one folder"])
def test_workers_save_to_a_folder_only_if_they_share_it(cluster_of, tmp_path, same):
    shared, elsewhere = tmp_path / "shared", tmp_path / "elsewhere"
    shared.mkdir()
    elsewhere.mkdir()
    environment = cluster_of(shared, shared if same else elsewhere)
    status, output = save(environment, shared)
    if same:
        assert "saved\n" in output, (status, output[-3000:])
        assert ".zarray" in arrays_in(shared) and not [name for name in arrays_in(shared) if "waystation" in name]
        return
    assert status != 0 and "FAILED_PRECONDITION" in output and "INTERNAL" not in output, output[-3000:]
    assert "is not shared" in output, output[-3000:]
    for name in ("slice 0 task 0", "slice 0 task 1"):
        assert name in output, output[-3000:]
    # What is the first worker's alone is none of the other's, and a request of its own. Nothing is there of what is on both.
    assert not arrays_in(elsewhere), arrays_in(elsewhere)
    alone = {path.parent.name.split(".")[0] for path in shared.rglob(".zarray")}
    assert alone <= {"dtypes", "scalars", "keys", "layers", "odd", "na me", "tuple", "numpy", "python"}, alone
