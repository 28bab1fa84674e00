"""What pathwaysutils deploys, started with our images: a JobSet trains, saves and ends, and a shared service gives its slices to
clients; nothing in it knows whose the images are.

The images' names are all that is ours in it, and three things are added to its environment: TPUs are simulated, Cloud Storage is
the double, and names lead into networks of this test's own.
"""

import importlib.resources
import json
import os
import re
import string

import gcs
import pytest
import yaml
from conftest import CLIENTS, CONNECT, wait_for
from pathwaysutils.experimental.gke import jobset
from pods import DEPLOY, Cluster, Image, jobs_of
from test_parts import told

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a pod's network takes root")

SERVER, PROXY, SIDECAR = "waystation/server", "waystation/proxy_server", "waystation/sidecar"
TAG = "jax-0.12.0.1"
IMAGES = {SERVER: "server", PROXY: "proxy_server", SIDECAR: "sidecar"}


def generated(location, tpu_type, topology, slices, url, **options):
    made = jobset.PathwaysJobSet(
        name="train", namespace="default", pathways_dir="gs://shared/pathways", tpu_type=tpu_type, topology=topology,
        num_slices=slices, pathways_version=TAG, pathways_rm_and_worker_image=SERVER, pathways_proxy_image=PROXY, **options,
    )  # fmt: skip
    made.add_user_workload(
        image="user/train", command=["python", str(CLIENTS / "deployed.py"), location],
        # Where the user's own libraries find the bucket.
        env={"ENABLE_PATHWAYS_PERSISTENCE": "1", **gcs.orbax_environment(url)},
    )  # fmt: skip
    return made


# (TPU type, topology, slices, machines a slice, devices of a machine)
SHAPES = [("v6e", "2x2", 1, 1, 4), ("v5p", "2x2x2", 2, 2, 4)]


@pytest.mark.parametrize("tpu_type,topology,slices,tasks,devices", SHAPES)
def test_a_jobset_trains_and_saves(tmp_path, tpu_type, topology, slices, tasks, devices):
    images = {f"{name}:{TAG}": Image(file) for name, file in IMAGES.items()}
    cluster = Cluster(tmp_path, images, {"WAYSTATION_SIMULATE": "cpu"})
    try:
        host = cluster.network()
        url = gcs.outside_double(tmp_path, cluster, host, "shared")
        # Orbax writes its metadata twice in a second, and gcsfs does not get over the 429 that this costs.
        gcs.order_within(cluster, url, "limits", paced=False)
        cluster.added["STORAGE_EMULATOR_HOST"] = url
        made = generated("gs://shared/run", tpu_type, topology, slices, url)
        if slices > 1:
            made.add_colocated_python(image=f"{SIDECAR}:{TAG}")
        # By way of the file that an operator would apply.
        made.export_yaml(str(tmp_path / "jobset.yaml"))
        pods = list(jobs_of(yaml.safe_load((tmp_path / "jobset.yaml").read_text())))
        assert len(pods) == 1 + slices * tasks
        for pod in pods:
            cluster.pod(pod)
        for pod in pods:
            cluster.start(pod)
        user = "train-pathways-head-0-0.user-workload"
        manager = "train-pathways-head-0-0.pathways-rm"
        everything = lambda: "\n".join(f"== {name}\n{cluster.log(name)[-3000:]}" for name in cluster.running if "." in name)  # noqa: E731

        def over():
            fallen = [name for name, process in cluster.running.items() if process.poll() not in (None, 0)]
            assert not fallen, f"{fallen} ended:\n{everything()}"
            return cluster.running[user].poll() == 0

        wait_for(over, 240, f"the user's program has ended:\n{everything()}")
        (result,) = told(cluster.log(user))
        shown = result["devices"]
        assert len(shown) == slices * tasks * devices
        assert [device[:2] for device in shown] == [
            [slice, task] for slice in range(slices) for task in range(tasks) for _ in range(devices)
        ]
        assert all("SIMULATED" in device[3] for device in shown)
        assert len({(device[0], *device[2]) for device in shown}) == len(shown)
        for name in cluster.running:
            if "pathways-" in name.split(".")[-1]:
                assert "SIMULATED" in cluster.log(name), cluster.log(name)
            if name.endswith("sidecar"):
                assert "not built yet" in cluster.log(name)
        # The bucket has programs, the checkpoint, and the rule that keeps the former from staying for ever.
        bucket = gcs.order_within(cluster, url, "state", "GET")["buckets"]["shared"]
        names = list(bucket["objects"])
        assert any(name.startswith("pathways/exe/") for name in names), names
        assert "run/state/_CHECKPOINT_METADATA" in names and any(name.startswith("run/state/weights/") for name in names)
        assert "pathways/exe/" in json.dumps(bucket["lifecycle"]), bucket["lifecycle"]
        assert "lifecycle" in cluster.log(manager)
    finally:
        ended = cluster.stop()
    # Asked to, all end by themselves.
    assert {name: status for name, status in ended.items() if status != 0 and "." in name} == {}


SEEN = CONNECT + """
import json
x = jax.jit(lambda x: x * 2)(jnp.arange(4.0))
print("@@" + json.dumps([[d.slice_index, d.id] for d in jax.devices()] + [float(x.sum())]), flush=True)
sys.stdin.read()
"""


def proxy_pod(name, manager, slices):
    """A client's proxy as the Shared Pathways Service starts it, by the file that pathwaysutils has for it; and the client."""
    package = "pathwaysutils.experimental.shared_pathways_service"
    text = (importlib.resources.files(package) / "yamls/pw-proxy.yaml").read_text()
    job = yaml.safe_load(
        string.Template(text).substitute(
            PROXY_JOB_NAME=name, PROXY_SERVER_IMAGE=f"{PROXY}:{TAG}", PROXY_SERVER_PORT=29000, PATHWAYS_HEAD_HOSTNAME=manager,
            PATHWAYS_HEAD_PORT=29001, GCS_SCRATCH_LOCATION="gs://shared/pathways", EXPECTED_INSTANCES=slices,
            PROXY_ARGS="\n        - --sidecar_name=external", PROXY_ENV="        - name: A\n          value: B",
        )
    )  # fmt: skip
    spec = job["spec"]["template"]["spec"]
    environment = {
        "JAX_PLATFORMS": "proxy", "JAX_BACKEND_TARGET": "grpc://localhost:29000", "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS": "true"
    }  # fmt: skip
    client = {"name": "client", "image": "user/client", "command": ["sh", "-c", 'mkfifo stdin; exec 0<>stdin; exec python -c "$CODE"']}
    client["env"] = [{"name": key, "value": value} for key, value in {**environment, "CODE": SEEN}.items()]
    spec["containers"].append(client)
    return {"host": name, "domain": "default", "labels": {}, "annotations": {}, "index": 0, "spec": spec}


def test_clients_of_a_shared_service_get_slices_of_their_own(tmp_path):
    images = {f"{name}:{TAG}": Image(file) for name, file in IMAGES.items()}
    cluster = Cluster(tmp_path, images, {"WAYSTATION_SIMULATE": "cpu"})
    try:
        url = gcs.outside_double(tmp_path, cluster, cluster.network(), "shared")
        cluster.added["STORAGE_EMULATOR_HOST"] = url
        made = jobset.PathwaysJobSet(
            name="service", namespace="default", pathways_dir="gs://shared/pathways", tpu_type="v6e", topology="2x2",
            num_slices=2, pathways_version=TAG, pathways_rm_and_worker_image=SERVER, shared_pathways_service=True,
        )  # fmt: skip
        pods = list(jobs_of(made.to_dict()))
        head = f"{pods[0]['host']}.service"
        clients = [proxy_pod(name, head, "tpuv6e:2x2") for name in ("one", "two", "three")]
        for pod in [*pods, *clients]:
            cluster.pod(pod)
        for pod in [*pods, *clients[:2]]:
            cluster.start(pod)

        def seen(name):
            return told(cluster.log(f"{name}.client"))

        everything = lambda: "\n".join(f"== {name}\n{cluster.log(name)[-2500:]}" for name in cluster.running if "." in name)  # noqa: E731
        wait_for(lambda: seen("one") and seen("two"), 120, f"two clients see devices:\n{everything()}")
        shown = [seen(name)[0] for name in ("one", "two")]
        devices = [device for one in shown for device in map(tuple, one[:-1])]
        assert all(len(one) == 5 and one[-1] == 12 for one in shown), shown
        assert len({id for _, id in devices}) == 8, f"they share devices: {shown}"
        # A third one waits for a slice, and gets that of one that goes.
        cluster.start(clients[2])
        wait_for(lambda: "waiting" in cluster.log("three.pathways-proxy"), 60, f"the third waits:\n{everything()}")
        assert not seen("three")
        for part in ("client", "pathways-proxy"):
            process = cluster.running.pop(f"one.{part}")
            process.terminate()
            process.wait(30)
        wait_for(lambda: seen("three"), 120, f"the third gets a slice:\n{everything()}")
        ids = [{id for _, id in one[:-1]} for one in (shown[0], seen("three")[0])]
        assert ids[0] == ids[1]
    finally:
        cluster.stop()


def test_images_are_of_one_debian_release():
    """The program is linked against the libc of the image that compiles it, and runs in the others."""
    bases = [base for name in IMAGES.values() for base in re.findall(r"^FROM (\S+)", (DEPLOY / f"{name}.Containerfile").read_text(), re.M)]
    assert len(bases) == 5, bases
    assert all("bookworm" in base for base in bases), bases
