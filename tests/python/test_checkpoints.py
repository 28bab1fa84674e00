"""Checkpoints that the workers read and write, and plain Orbax on the other side.

What real Orbax wrote (checkpoint_fixtures.py) is restored through the workers, into many shardings; what the workers wrote is
restored by plain Orbax in a process that knows nothing of Waystation, and by other workers.
"""

import subprocess

import pytest
from conftest import BINARY, CLIENTS, X64, Checks, run_plainly

FIXTURES = [
    *(f"{prefix}{layout}" for prefix in ("", "chunked/", "raw/") for layout in ("zarr2", "zarr2_ocdbt", "zarr3", "zarr3_ocdbt")),
    "two_processes/zarr2", "two_processes/zarr2_ocdbt", "manager/0/state", "manager/10/state", "v1/state",
]  # fmt: skip


@pytest.fixture(scope="session")
def restored(clusters):
    """Restores all that is in a folder on a cluster, when first asked."""
    done = {}

    def get(folder, shape):
        if (folder, shape) not in done:
            environment = {"CHECKPOINTS": str(folder), **X64}
            checks = Checks(*clusters(*shape).run_client([CLIENTS / "restoring.py"], timeout=600, env=environment))
            done[folder, shape] = checks
        return done[folder, shape]

    return get


@pytest.mark.parametrize("shape", [(1, 8), (2, 4)], ids=["1x8", "2x4"])
@pytest.mark.parametrize("name", FIXTURES)
def test_workers_restore_what_orbax_wrote(restored, checkpoints, shape, name):
    restored(checkpoints[0], shape).judge(name)


def test_every_fixture_is_a_case(checkpoints):
    assert set(FIXTURES) == set(checkpoints[1])


# Orbax's ways to save, and the format that each needs of the workers.
WAYS = {
    "standard": "ocdbt", "manager": "ocdbt", "pytree": "ocdbt", "pytree_zarr2": "zarr2",
    "pytree_zarr3": "zarr3", "pytree_ocdbt_zarr3": "ocdbt_zarr3",
}  # fmt: skip
# What the workers may have been told in place of it.
WRONG = {"zarr2": "ocdbt", "ocdbt": "zarr2", "zarr3": "zarr2", "ocdbt_zarr3": "zarr2"}
# Where each way puts its checkpoint.
NAMES = {way: "manager/0/default" if way == "manager" else way for way in WAYS}
SHAPES = [(1, 8), (2, 4)]


def save(clusters, shape, formats, folder):
    """Saves by each way in the format that is given for it, all into one folder. A process for each format: they take long to start."""
    for checkpoint_format in sorted(set(formats.values())):
        flags = [] if checkpoint_format == "zarr2" else [f"--checkpoint_format={checkpoint_format}"]
        ways = [way for way in formats if formats[way] == checkpoint_format]
        environment = {"SCRATCH": str(folder), **X64}
        status, output = clusters(*shape, *flags).run_client([CLIENTS / "saving.py", *ways], timeout=600, env=environment)
        assert "saved\n" in output, (status, output[-3000:])
    return folder


def read_plainly(folder):
    return Checks(*run_plainly([CLIENTS / "plain.py"], {"SCRATCH": str(folder)}))


@pytest.fixture(scope="session")
def saved(clusters, tmp_path_factory):
    """Saves by all ways on a cluster of a shape, when first asked; gives the folder."""
    done = {}

    def get(shape):
        if shape not in done:
            done[shape] = save(clusters, shape, WAYS, tmp_path_factory.mktemp("saved"))
        return done[shape]

    return get


@pytest.fixture(scope="session")
def read(saved):
    """What plain Orbax reads of what was saved on a cluster of a shape."""
    done = {}

    def get(shape):
        if shape not in done:
            done[shape] = read_plainly(saved(shape))
        return done[shape]

    return get


@pytest.mark.parametrize("shape", SHAPES, ids=["1x8", "2x4"])
@pytest.mark.parametrize("way", WAYS)
def test_plain_orbax_restores_what_workers_wrote(read, way, shape):
    read(shape).judge(NAMES[way])


@pytest.mark.parametrize("shape", [(1, 8), (2, 4), (1, 4)], ids=["1x8", "2x4", "1x4"])
@pytest.mark.parametrize("way", WAYS)
def test_what_two_workers_wrote_is_restored_on_others(saved, restored, way, shape):
    """On one worker, on other meshes, replicated and on turned devices: restoring.py goes through them."""
    restored(saved((2, 4)), shape).judge(NAMES[way])


class Mended:
    """What was saved in formats that are wrong for the ways, and then converted."""

    def __init__(self, clusters, folder):
        save(clusters, (2, 4), {way: WRONG[WAYS[way]] for way in WAYS}, folder)
        self.before = read_plainly(folder)
        environment = {"SCRATCH": str(folder), **X64}
        arguments = [CLIENTS / "saving.py", "restored", *NAMES.values()]
        self.restored = clusters(2, 4).run_client(arguments, timeout=600, env=environment)
        self.commands = {}
        for way, name in NAMES.items():
            commands = [["verify", folder / name, "--json"], ["convert", folder / name, "--in_place"], ["verify", folder / name]]
            run = lambda command: subprocess.run([BINARY, "checkpoint", *command], text=True, capture_output=True, check=False)
            self.commands[way] = [run(command) for command in commands]
        self.after = read_plainly(folder)


@pytest.fixture(scope="module")
def mended(clusters, tmp_path_factory):
    return Mended(clusters, tmp_path_factory.mktemp("wrong"))


@pytest.mark.parametrize("way", WAYS)
def test_what_is_written_in_the_wrong_format_is_found_and_mended(mended, way):
    name = NAMES[way]
    # Plain Orbax does not restore it; the workers restore their arrays all the same.
    assert mended.before.by_name[name]["result"] == "failed"
    status, output = mended.restored
    assert f"{name} is equal\n" in output, (status, output[-3000:])
    found, converted, found_again = mended.commands[way]
    assert found.returncode == 1 and '"mismatch"' in found.stdout, found.stdout + found.stderr
    assert converted.returncode == 0, converted.stdout + converted.stderr
    assert found_again.returncode == 0, found_again.stdout + found_again.stderr
    mended.after.judge(name)
