"""Checkpoints that the workers read and write, and plain Orbax on the other side.

What real Orbax wrote (checkpoint_fixtures.py) is restored through the workers, into many shardings; what the workers wrote is
restored by plain Orbax in a process that knows nothing of Waystation, and by other workers.
"""

import json
import shutil
import subprocess

import pytest
from conftest import BINARY, CLIENTS, X64, Checks, run_plainly

FIXTURES = [
    *(f"{prefix}{layout}" for prefix in ("", "chunked/", "raw/") for layout in ("zarr2", "zarr2_ocdbt", "zarr3", "zarr3_ocdbt")),
    "two_processes/zarr2", "two_processes/zarr2_ocdbt", "manager/0/state", "manager/10/state", "v1/state",
]  # fmt: skip


@pytest.fixture(scope="session")
def restored(clusters, checkpoints):
    """Restores all fixtures on a cluster, when first asked."""
    done = {}

    def get(*shape):
        if shape not in done:
            environment = {"CHECKPOINTS": str(checkpoints[0]), **X64}
            done[shape] = Checks(*clusters(*shape).run_client([CLIENTS / "restoring.py"], timeout=600, env=environment))
        return done[shape]

    return get


@pytest.mark.parametrize("shape", [(1, 8), (2, 4)], ids=["1x8", "2x4"])
@pytest.mark.parametrize("name", FIXTURES)
def test_workers_restore_what_orbax_wrote(restored, shape, name):
    restored(*shape).judge(name)


def test_every_fixture_is_a_case(checkpoints):
    assert set(FIXTURES) == set(checkpoints[1])


# Orbax's ways to save, and the format that each needs of the workers.
WAYS = {
    "standard": "ocdbt", "manager": "ocdbt", "pytree": "ocdbt", "pytree_zarr2": "zarr2",
    "pytree_zarr3": "zarr3", "pytree_ocdbt_zarr3": "ocdbt_zarr3",
}  # fmt: skip
# What the workers may have been told in place of it.
WRONG = {"zarr2": "ocdbt", "ocdbt": "zarr2", "zarr3": "zarr2", "ocdbt_zarr3": "zarr3"}
SHAPES = [(1, 8), (2, 4)]


@pytest.fixture(scope="session")
def saved(clusters, tmp_path_factory):
    """Saves by a way on a cluster of a shape, when first asked; gives the folder."""
    done = {}

    def get(way, shape, checkpoint_format):
        key = (way, shape, checkpoint_format)
        if key not in done:
            folder = tmp_path_factory.mktemp(f"{way}-{checkpoint_format}")
            flags = [] if checkpoint_format == "zarr2" else [f"--checkpoint_format={checkpoint_format}"]
            cluster = clusters(*shape, *flags)
            status, output = cluster.run_client([CLIENTS / "saving.py", way], env={"SCRATCH": str(folder), **X64})
            assert "saved\n" in output, (status, output[-3000:])
            done[key] = folder
        return done[key]

    return get


@pytest.fixture(scope="session")
def read_plainly(saved):
    done = {}

    def get(way, shape, checkpoint_format):
        key = (way, shape, checkpoint_format)
        if key not in done:
            done[key] = Checks(*run_plainly([CLIENTS / "plain.py"], {"SCRATCH": str(saved(*key))}))
        return done[key]

    return get


def name_in(folder):
    (name,) = json.loads((folder / "expected.json").read_text())
    return name


@pytest.mark.parametrize("shape", SHAPES, ids=["1x8", "2x4"])
@pytest.mark.parametrize("way", WAYS)
def test_plain_orbax_restores_what_workers_wrote(saved, read_plainly, way, shape):
    key = (way, shape, WAYS[way])
    read_plainly(*key).judge(name_in(saved(*key)))


@pytest.mark.parametrize("shape", [(1, 8), (2, 4), (1, 4)], ids=["1x8", "2x4", "1x4"])
@pytest.mark.parametrize("way", WAYS)
def test_what_two_workers_wrote_is_restored_on_others(saved, clusters, way, shape):
    """On one worker, on other meshes, replicated and on turned devices: restoring.py goes through them."""
    folder = saved(way, (2, 4), WAYS[way])
    environment = {"CHECKPOINTS": str(folder), **X64}
    Checks(*clusters(*shape).run_client([CLIENTS / "restoring.py"], env=environment)).judge(name_in(folder))


@pytest.mark.parametrize("way", WAYS)
def test_what_is_written_in_the_wrong_format_is_found_and_mended(saved, clusters, tmp_path, way):
    folder = tmp_path / "saved"
    shutil.copytree(saved(way, (2, 4), WRONG[WAYS[way]]), folder)
    name = name_in(folder)
    plain = lambda: Checks(*run_plainly([CLIENTS / "plain.py"], {"SCRATCH": str(folder)}))
    checkpoint = lambda *command: subprocess.run([BINARY, "checkpoint", *command], text=True, capture_output=True, check=False)
    # Plain Orbax does not restore it; the workers restore their arrays all the same.
    assert plain().by_name[name]["result"] == "failed"
    arguments = [CLIENTS / "saving.py", "restored", name]
    status, output = clusters(2, 4).run_client(arguments, env={"SCRATCH": str(folder), **X64})
    assert "equal\n" in output, (status, output[-3000:])
    found = checkpoint("verify", folder / name, "--json")
    assert found.returncode == 1 and '"mismatch"' in found.stdout, found.stdout + found.stderr
    mended = checkpoint("convert", folder / name, "--in_place")
    assert mended.returncode == 0, mended.stdout + mended.stderr
    found = checkpoint("verify", folder / name)
    assert found.returncode == 0, found.stdout + found.stderr
    plain().judge(name)
