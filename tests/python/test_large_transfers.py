"""Host buffers that JAX leaves as files in a directory which it shares with the proxy."""

import os
import subprocess

from conftest import CONNECT, client_status

THRESHOLD = {"IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION_THRESHOLD_BYTES": "65536"}
DIRECTORY = "IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION_DIRECTORY"

# Puts and checks once for each line on stdin.
PUTS = CONNECT + """
import os, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()).reshape(-1), ("x",))
for line in sys.stdin:
    value = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024) + int(line)
    for view in (value, value.T, value[::2]):
        for sharding in (jax.devices()[-1], NamedSharding(mesh, P("x")), NamedSharding(mesh, P())):
            array = jax.device_put(view, sharding)
            assert np.array_equal(np.asarray(jax.jit(lambda x: x + 0)(array)), view)
    print("round", line.strip(), flush=True)
"""


def start(cluster, **env):
    return cluster.start_client(["-c", PUTS], stdin=subprocess.PIPE, env={**THRESHOLD, **env})


def put(client, number):
    client.stdin.write(f"{number}\n")
    client.stdin.flush()
    for line in client.stdout:
        if line == f"round {number}\n":
            return
    raise AssertionError(f"the client ended with {client.wait(60)}")


def end(client):
    output, _ = client.communicate(timeout=60)
    assert client_status(client.returncode, output) == 0, output


def test_large_arrays_go_through_the_runs_directory(own_cluster):
    cluster = own_cluster("--devices_per_worker", "2")
    directory = cluster.environment[DIRECTORY]
    assert os.listdir(directory) == []
    client = start(cluster)
    for number in range(3):
        put(client, number)
    end(client)
    assert os.listdir(directory) == []


def test_the_directory_is_the_one_of_the_flag(own_cluster, tmp_path):
    directory = tmp_path / "it's shared"
    directory.mkdir()
    cluster = own_cluster("--devices_per_worker", "2", "--large_transfer_directory", str(directory))
    assert cluster.environment[DIRECTORY] == str(directory)
    client = start(cluster)
    put(client, 1)
    end(client)
    # Elsewhere the client writes what the proxy does not find; the session's end says why.
    other = tmp_path / "other"
    other.mkdir()
    client = start(cluster, **{DIRECTORY: str(other)})
    output, _ = client.communicate("1\n", timeout=120)
    assert client.returncode != 0 and "--large_transfer_directory" in output, output


def test_two_clients_take_turns_in_one_directory(own_cluster):
    cluster = own_cluster("--devices_per_worker", "2")
    clients = [start(cluster), start(cluster)]
    for number in range(3):
        # Both use the same handles, and so the same names of files.
        put(clients[0], number)
        put(clients[1], number + 100)
    for client in clients:
        end(client)
