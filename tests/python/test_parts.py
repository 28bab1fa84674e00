"""The parts of a cluster started by hand, and what devices show of where they are."""

import json
import os
import sys
import urllib.error
import urllib.request

import numpy as np
import pytest
from conftest import CONNECT, client_status, wait_for
from parts import parts, up

DESCRIBE = CONNECT + """
import json
import sys
from orbax.checkpoint import multihost
print("@@" + json.dumps({
    "devices": [
        [d.id, d.process_index, d.platform, d.device_kind, d.slice_index, d.virtual_task_index,
         getattr(d, "coords", None), getattr(d, "core_on_chip", None), repr(d), str(d)]
        for d in jax.devices()
    ],
    "memories": [[m.kind for m in d.addressable_memories()] for d in jax.devices()],
}))
"""
GROUPS = """
from orbax.checkpoint._src.multihost import pathways
from pathwaysutils.elastic import elastic
by_worker = pathways.group_devices_by_worker(jax.devices())
by_slice = elastic.get_slice_to_devices(jax.devices())
print("@@" + json.dumps({
    "workers": [[list(key), [d.id for d in of]] for key, of in by_worker.items()],
    "slices": [[int(key), [d.id for d in of]] for key, of in by_slice.items()],
    "count": pathways.worker_count(None),
}))
"""
MESH = """
import numpy as np
from jax.experimental import mesh_utils
mesh = jax.sharding.Mesh(mesh_utils.create_hybrid_device_mesh((2, 4), (2, 1)), ("x", "y"))
print("@@" + json.dumps([[d.slice_index for d in row] for row in mesh.devices]))
"""


COUNT = CONNECT + """
print(f"@@{len(jax.devices())}")
"""


def told(output):
    """What a client told, of each line that it marked."""
    return [json.loads(line[2:]) for line in output.splitlines() if line.startswith("@@")]


def start(made, slices, tasks, *manager_flags, worker_flags=(), environment=None):
    """Starts all parts; gives the proxy's address and its status page's."""
    made.start("manager", "resource-manager", f"--slices={slices}", *manager_flags, environment=environment)
    manager = f"--resource_manager_address={made.addresses('manager')[0]}"
    made.start("proxy", "proxy", manager, "--status_port=0", environment=environment)
    for slice in range(slices):
        for task in range(tasks):
            place = (f"--slice={slice}", f"--task={task}")
            made.start(f"worker-{slice}-{task}", "worker", manager, *place, *worker_flags, environment=environment)
    return made.addresses("proxy")


def describe(made, proxy, code=""):
    status, output = made.run_client(["-c", DESCRIBE + code], proxy)
    assert status == 0, output + made.log("manager") + made.log("proxy")
    return told(output)


def test_four_workers_by_hand_are_what_up_makes(tmp_path):
    with parts(tmp_path) as made, up(tmp_path, "--workers=4", "--devices_per_worker=2") as environment:
        proxy, page = start(made, 1, 4, "--workers=4", worker_flags=("--devices_per_worker=2", "--slice_tasks=4"))
        by_hand, groups = describe(made, proxy, GROUPS)
        proxy_of_up = environment["JAX_BACKEND_TARGET"].removeprefix("grpc://")
        by_up = describe(made, proxy_of_up, GROUPS)
        assert [by_hand, groups] == by_up
        pages = [json.load(urllib.request.urlopen(url)) for url in (f"http://{page}/status", environment["WAYSTATION_STATUS_URL"])]
    ways = [[(worker["platform"], worker["plugin_path"]) for worker in page["workers"]] for page in pages]
    assert ways[0] == ways[1] and len(ways[0]) == 4
    assert [device[0] for device in by_hand["devices"]] == list(range(8))
    assert groups["workers"] == [[[task, 0], [2 * task, 2 * task + 1]] for task in range(4)]
    assert groups["count"] == 4


def test_simulated_slices_show_the_devices_of_their_type(tmp_path):
    with parts(tmp_path, {"WAYSTATION_SIMULATE": "cpu"}) as made:
        proxy, page = start(made, 2, 2, "--instance_type=tpuv6e:2x4")
        shown, groups, mesh = describe(made, proxy, GROUPS + MESH)
        with urllib.request.urlopen(f"http://{page}/status", timeout=10) as response:
            assert json.load(response)["simulated"] == "SIMULATED tpuv6e:2x4"
        for name in made.running:
            assert "SIMULATED" in made.log(name), made.log(name)
    devices = shown["devices"]
    assert len(devices) == 16
    places = [[[x, y, 0] for y in (2 * task, 2 * task + 1) for x in (0, 1)] for task in (0, 1)]
    for index, device in enumerate(devices):
        id, process, platform, _, slice, task, coords, core, text, other_text = device
        assert (id, process, platform, core) == (index, 0, "cpu", 0)
        assert (slice, task) == divmod(index // 4, 2)
        assert coords == places[task][index % 4]
        assert f"vtask={task}, slice={slice}, " in text and "SIMULATED tpuv6e:2x4" in text, text
        assert "SIMULATED" in other_text
    assert mesh == [[0] * 4, [0] * 4, [1] * 4, [1] * 4]
    assert groups["slices"] == [[slice, list(range(8 * slice, 8 * slice + 8))] for slice in (0, 1)]
    assert groups["count"] == 4


def test_run_makes_simulated_slices_too(own_cluster):
    cluster = own_cluster("--slices=2", "--instance_type=tpu7x:2x2x1", "--simulate=cpu")
    status, output = cluster.run_code(DESCRIBE + GROUPS)
    assert status == 0, output
    shown, groups = told(output)
    assert [[device[4], device[6], device[7]] for device in shown["devices"]] == [
        [slice, [x, y, 0], core] for slice in (0, 1) for y in (0, 1) for x in (0, 1) for core in (0, 1)
    ]
    assert groups["count"] == 2
    assert cluster.status()["simulated"] == "SIMULATED tpu7x:2x2x1"


def test_a_worker_waits_to_hear_what_to_simulate(tmp_path):
    """The parts of a deployment come in any order."""
    with parts(tmp_path, {"WAYSTATION_SIMULATE": "cpu"}) as made:
        made.start("manager", "resource-manager")
        address = made.addresses("manager")[0]
        made.running["manager"].terminate()
        made.running["manager"].wait(20)
        worker = made.start("worker", "worker", f"--resource_manager_address={address}")
        wait_for(lambda: "asking again" in made.log("worker"), 30, "the worker asks")
        made.start("manager", "resource-manager", "--instance_type=tpu7x:1x1x1", port=address.split(":")[1])
        wait_for(lambda: "registered" in made.log("worker"), 60, f"the worker comes:\n{made.log('worker')}")
        assert "devices=2" in made.log("worker")
        assert worker.poll() is None


def test_what_to_simulate_must_be_said(tmp_path):
    with parts(tmp_path, {"WAYSTATION_SIMULATE": "cpu"}) as made:
        made.start("manager", "resource-manager")
        worker = made.start("worker", "worker", f"--resource_manager_address={made.addresses('manager')[0]}")
        assert worker.wait(60) == 64
        assert "--instance_type" in made.log("worker")


def test_clients_that_wait_see_for_what(tmp_path):
    """jaxlib writes it to its log without being asked to, and goes on waiting."""
    with parts(tmp_path) as made:
        made.start("manager", "resource-manager", "--slices=2", "--instance_type=cpu:1")
        manager = f"--resource_manager_address={made.addresses('manager')[0]}"
        made.start("all", "proxy", manager)
        made.start("worker-0", "worker", manager, "--devices_per_worker=1")
        first, told = made.start_client("first", ["-c", COUNT], made.addresses("all")[0])
        wait_for(lambda: "waiting for its workers: 1 of 2 slices (1 of 2 workers)" in told(), 60, "the first one is told")
        made.start("worker-1", "worker", manager, "--devices_per_worker=1", "--slice=1")
        assert client_status(first.wait(60), told()) == 0, told()
        assert "@@2" in told()
        # Now both slices are taken.
        made.start("one", "proxy", manager, "--virtual_slices=cpu:1")
        second, told = made.start_client("second", ["-c", COUNT], made.addresses("one")[0])
        holder = made.addresses("all")[0]
        waits = f"waiting for its workers: waiting for 1 slice of cpu:1: proxy {holder} holds 2, 0 free with all workers"
        wait_for(lambda: waits in told(), 60, "the second one is told")
        made.running["all"].terminate()
        assert client_status(second.wait(60), told()) == 0, told()
        assert "@@1" in told()


def page(address, path):
    """What a status page answers: (status, text)."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


OVER_BOTH = CONNECT + """
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
program = jax.jit(lambda x: jnp.sin(x) @ x.T)
for devices in (jax.devices(), jax.devices()[::-1]):
    x = jnp.arange(512.0 * 512).reshape(512, 512) % 7
    x = jax.device_put(x, NamedSharding(Mesh(devices, "x"), P("x")))
    print("@@" + str(float(jnp.abs(program(x)).sum())))
"""
# Runs a command on one CPU.
PINNED = [
    sys.executable, "-c",
    "import os, sys; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); os.execvp(sys.argv[1], sys.argv[1:])",
]  # fmt: skip


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_workers_with_more_and_fewer_cpus_run_programs_together(tmp_path):
    with parts(tmp_path) as made:
        made.start("manager", "resource-manager", "--slices=2")
        manager = f"--resource_manager_address={made.addresses('manager')[0]}"
        for slice in range(2):
            within = PINNED if slice else ()
            made.start(f"worker-{slice}", "worker", manager, f"--slice={slice}", "--devices_per_worker=2", within=within)
        made.start("proxy", "proxy", manager)
        status, output = made.run_client(["-c", OVER_BOTH], made.addresses("proxy")[0])
        assert status == 0, output
        # Compiled by the one with more and by the one with fewer.
        one, other = told(output)
        x = np.arange(512.0 * 512).reshape(512, 512) % 7
        assert one == pytest.approx(np.abs(np.sin(x) @ x.T).sum(), rel=1e-4)
        assert other == pytest.approx(one, rel=1e-5)


def test_every_part_says_how_it_is(tmp_path):
    with parts(tmp_path) as made:
        made.start("manager", "resource-manager", "--status_port=0", "--instance_type=cpu:2")
        manager, managers = made.addresses("manager")
        flag = f"--resource_manager_address={manager}"
        made.start("proxy", "proxy", flag, "--status_port=0")
        _, proxys = made.addresses("proxy")
        # Before there is any worker: whoever waits for the head before it starts workers must not wait for ever.
        wait_for(lambda: page(managers, "/readyz")[0] == 200, 20, "the resource manager is ready")
        assert page(proxys, "/readyz")[0] == 200
        made.start("worker", "worker", flag, "--devices_per_worker=2", "--status_port=0")
        _, workers = made.addresses("worker")
        assert page(workers, "/healthz") == (200, "ok\n")
        wait_for(lambda: page(workers, "/readyz")[0] == 200, 60, "the worker is ready")
        for address in (managers, proxys, workers):
            assert page(address, "/healthz") == (200, "ok\n")

        def there():
            status = json.loads(page(managers, "/status")[1])
            return len(status["workers"]) == 1 and status

        status = wait_for(there, 60, "the worker has registered")
        assert status["instance_type"] == "cpu:2" and status["workers"][0]["devices"] == 2
        wait_for(lambda: json.loads(page(proxys, "/status")[1])["ready"], 60, "the proxy has its worker")


def test_libtpu_is_told_of_the_other_machines_and_slices(tmp_path):
    """There is no TPU here: what its library would find in the environment is what the worker's other helper finds there."""
    spy = tmp_path / "python"
    spy.write_text(f'#!/bin/sh\nenv > "{tmp_path}/environment"\nexec "{sys.executable}" "$@"\n')
    spy.chmod(0o755)
    deployed = {
        "WAYSTATION_PYTHON": str(spy), "WAYSTATION_PJRT_PLUGIN": "tpu", "JOBSET_NAME": "train",
        "REPLICATED_JOB_NAME": "pathways-worker", "MEGASCALE_SLICE_ID": "1", "JOB_COMPLETION_INDEX": "1",
        "TPU_PROCESS_PORT": "9", "TPU_SKIP_MDS_QUERY": "true",
    }  # fmt: skip
    with parts(tmp_path) as made:
        made.start("manager", "resource-manager", "--slices=2", "--instance_type=tpuv5:2x2x2")
        address = made.addresses("manager")[0]
        # Of Megascale's coordinators the one that is the resource manager's host is not meant.
        deployed["MEGASCALE_COORDINATOR_ADDRESS"] = address.rsplit(":", 1)[0]
        worker = made.start("worker", "worker", f"--resource_manager_address={address}", environment=deployed)
        assert worker.wait(60) == 64 and "libtpu" in made.log("worker"), made.log("worker")
    found = dict(line.split("=", 1) for line in (tmp_path / "environment").read_text().splitlines() if "=" in line)
    assert {name: value for name, value in found.items() if name.startswith(("TPU_", "CLOUD_TPU_", "MEGASCALE_"))} == {
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,2,1",
        "TPU_PROCESS_BOUNDS": "1,1,2",
        "CLOUD_TPU_TASK_ID": "1",
        "TPU_WORKER_ID": "1",
        "TPU_WORKER_HOSTNAMES": "train-pathways-worker-1-0.train,train-pathways-worker-1-1.train",
        "TPU_PROCESS_ADDRESSES": "train-pathways-worker-1-0.train:8471,train-pathways-worker-1-1.train:8471",
        # As the machine had it.
        "TPU_PROCESS_PORT": "9",
        "TPU_SKIP_MDS_QUERY": "true",
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "1",
        "MEGASCALE_COORDINATOR_ADDRESS": "train-pathways-worker-0-0.train",
    }


def test_libtpu_is_told_of_machines_that_no_jobset_names(tmp_path):
    """A worker waits until the resource manager has heard of the hosts that it needs; its own are loopback addresses here."""

    def deployed(name, slice, task):
        spy = tmp_path / f"python-{name}"
        spy.write_text(f'#!/bin/sh\nenv > "{tmp_path}/environment-{name}"\nexec "{sys.executable}" "$@"\n')
        spy.chmod(0o755)
        return {
            "WAYSTATION_PYTHON": str(spy), "WAYSTATION_PJRT_PLUGIN": "tpu", "MEGASCALE_SLICE_ID": str(slice),
            "TPU_WORKER_ID": str(task),
        }  # fmt: skip

    with parts(tmp_path) as made:
        made.start("manager", "resource-manager", "--slices=2", "--instance_type=tpuv5:2x2x2")
        manager = f"--resource_manager_address={made.addresses('manager')[0]}"

        def worker(name, slice, task, ip):
            return made.start(name, "worker", manager, bind=ip, environment=deployed(name, slice, task))

        first = worker("first", 1, 0, "127.0.0.3")
        waits = "waiting for slice 0 task 0, slice 1 task 1"
        wait_for(lambda: waits in made.log("first"), 30, "it says for whom it waits")
        worker("coordinator", 0, 0, "127.0.0.2")
        wait_for(lambda: "waiting for slice 1 task 1" in made.log("first"), 30, "one of them has come")
        second = worker("second", 1, 1, "127.0.0.4")
        for name, process in (("first", first), ("second", second)):
            assert process.wait(60) == 64 and "libtpu" in made.log(name), made.log(name)
    text = (tmp_path / "environment-first").read_text()
    found = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    assert found["TPU_WORKER_HOSTNAMES"] == "127.0.0.3,127.0.0.4"
    assert found["TPU_PROCESS_ADDRESSES"] == "127.0.0.3:8471,127.0.0.4:8471"
    assert found["MEGASCALE_COORDINATOR_ADDRESS"] == "127.0.0.2"
    assert (found["MEGASCALE_NUM_SLICES"], found["MEGASCALE_SLICE_ID"], found["TPU_WORKER_ID"]) == ("2", "1", "0")
