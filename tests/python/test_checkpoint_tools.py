"""`waystation checkpoint ...` on checkpoints that real Orbax wrote, and what it writes restored by real Orbax."""

import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys

import gcs
import ml_dtypes  # noqa: F401 (numpy knows its names by it)
import numpy as np
import pytest
import tensorstore
from checkpoint_fixtures import LAYOUTS
from conftest import BINARY, wait_for

# What the command line calls them.
NAMES = {"zarr2": "zarr2", "zarr2_ocdbt": "ocdbt", "zarr3": "zarr3", "zarr3_ocdbt": "ocdbt_zarr3"}

# Restores a checkpoint with plain Orbax; prints what `described` makes of it.
RESTORE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import jax
jax.config.update("jax_num_cpu_devices", 4)
import orbax.checkpoint as ocp
import checkpoint_fixtures
found = {}
for path in sys.argv[2:]:
    try:
        tree = ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(path)
        found[path] = checkpoint_fixtures.described(tree)
    except Exception as error:
        found[path] = f"{type(error).__name__}: {error}"
print("=====" + json.dumps(found))
"""


def tool(*arguments, status=0, environment=None):
    command = [str(BINARY), "checkpoint", *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert ended.returncode == status or status is None and ended.returncode in (0, 1), (command, ended.returncode, ended.stdout[-2000:], ended.stderr[-2000:])
    return ended.stderr if status == 64 else ended.stdout


def verify(location, status=0):
    return json.loads(tool("verify", location, "--json", status=status))


def kinds(location):
    return {fault["kind"] for fault in verify(location, status=1)["found"]}


def restored(*paths):
    """What plain Orbax, without Waystation, finds in checkpoints; an error where it cannot."""
    dropped = ("JAX_", "XLA_", "IFRT_PROXY", "ENABLE_PATHWAYS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1"}
    command = [sys.executable, "-W", "ignore", "-c", RESTORE, str(pathlib.Path(__file__).parent), *map(str, paths)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = json.loads(ended.stdout.rpartition("=====")[2])
    return [found[str(path)] for path in paths]


def exported(location, folder, *flags):
    """{name: (shape, bytes in hex)}, by way of .npy."""
    tool("export", location, folder, "--as_bits", *flags)
    found = {}
    for file in pathlib.Path(folder).rglob("*.npy"):
        array = np.load(file)
        found[str(file.relative_to(folder)).removesuffix(".npy")] = (list(array.shape), array.tobytes().hex())
    return found


def bits(arrays):
    return {name: (about["shape"], about["hex"]) for name, about in arrays.items()}


def test_every_array_is_exported_bit_for_bit(checkpoints, tmp_path):
    folder, expected = checkpoints
    count = 0
    for number, (checkpoint, arrays) in enumerate(expected.items()):
        assert exported(folder / checkpoint, tmp_path / str(number)) == bits(arrays), checkpoint
        count += len(arrays)
    print(f"{count} arrays of {len(expected)} checkpoints are equal")


def test_what_orbax_wrote_is_well_and_listed(checkpoints):
    folder, expected = checkpoints
    for checkpoint, arrays in expected.items():
        report = verify(folder / checkpoint)
        assert (report["arrays"], report["faults"], report["foreign_objects"]) == (len(arrays), 0, []), checkpoint
        seen = json.loads(tool("inspect", folder / checkpoint, "--json"))
        assert seen["stored_bytes"] > 0 and seen["faults"] == []
        for about in seen["arrays"]:
            array = arrays[about["name"]]
            assert (about["dtype"], about["shape"]) == (array["dtype"], array["shape"])
            assert about["prng_impl"] == array.get("prng") or array.get("prng", "").startswith("fry")
        text = tool("inspect", folder / checkpoint)
        assert all(name in text for name in arrays)
    listed = json.loads(tool("ls", folder / "manager", "--json"))
    assert listed["kind"] == "steps" and [step["number"] for step in listed["steps"]] == [0, 10]
    assert all(step["finished"] for step in listed["steps"])
    assert [item["name"] for item in listed["steps"][0]["items"]] == ["metrics", "note", "state"]
    assert json.loads(tool("ls", folder / "v1", "--json"))["kind"] == "step"
    assert json.loads(tool("ls", folder / "zarr2", "--json"))["kind"] == "item"
    assert "no checkpoint" in tool("ls", folder / "zarr2" / "array_metadatas", status=64)
    # Without a step, the last one is meant.
    assert json.loads(tool("inspect", folder / "manager", "--json"))["location"].endswith("/10/state")
    report = verify(folder / "manager")
    assert (report["items"], report["faults"]) == (2, 0)


def test_conversions_are_restored_by_orbax(checkpoints, tmp_path):
    folder, expected = checkpoints
    made = []
    for source in LAYOUTS:
        for target in LAYOUTS:
            path = tmp_path / f"{source}-{target}"
            tool("convert", folder / source, path, "--layout", NAMES[target])
            report = verify(path)
            assert report["faults"] == 0 and report["foreign_objects"] == []
            tool("diff", folder / source, path)
            made.append((path, source))
        # Chunks that run over the edge, compressed anew.
        path = tmp_path / f"{source}-cut"
        tool("convert", folder / source, path, "--chunk_bytes=50B", "--compression=3")
        assert verify(path)["faults"] == 0 and verify(path)["chunks_without_checksum"] == 0
        made.append((path, source))
        path = tmp_path / f"{source}-raw"
        tool("convert", folder / source, path, "--compression=none", "--chunk_bytes=1KiB")
        made.append((path, source))
    found = restored(*(path for path, _ in made), folder / "zarr2")
    assert not isinstance(found[-1], str), found[-1]
    for (path, source), tree in zip(made, found):
        assert not isinstance(tree, str), (path, tree)
        assert bits(tree) == bits(expected[source]) or bits(tree) == bits(found[-1]), path
    # What one process has written of a database needs no others.
    merged = tmp_path / "merged"
    tool("convert", folder / "two_processes/zarr2_ocdbt", merged, "--layout=ocdbt")
    assert sorted(path.name for path in merged.iterdir() if path.name.startswith("ocdbt")) == []
    assert exported(merged, tmp_path / "npy") == bits(expected["two_processes/zarr2_ocdbt"])
    # A whole folder of steps.
    tool("convert", folder / "manager", tmp_path / "manager", "--layout=zarr3")
    assert verify(tmp_path / "manager")["items"] == 2
    assert json.loads(tool("inspect", tmp_path / "manager", "--json"))["layout"] == "zarr3"
    assert (tmp_path / "manager/10/note/metadata").read_bytes() == (folder / "manager/10/note/metadata").read_bytes()
    tool("convert", folder / "v1", tmp_path / "v1", "--layout=zarr2")
    state, newer = restored(tmp_path / "manager/10/state", tmp_path / "v1/state")
    assert bits(state) == bits(expected["manager/10/state"])
    assert {name: bits(newer)[name][1] for name in newer} == {name: about["hex"] for name, about in expected["v1/state"].items()}
    print(f"{len(made) + 2} conversions restored by Orbax")


def mismatched(folder, target):
    """What a save with Orbax's defaults through workers that write zarr v2 leaves: half in the database, half beside it."""
    shutil.copytree(folder / "zarr2_ocdbt", target)
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{target}"}).result()
    moved = [path.name for path in (folder / "zarr2").iterdir() if path.name.startswith(("by.", "dtypes.", "large", "layers."))]
    for name in moved:
        store.delete_range(tensorstore.KvStore.KeyRange(f"{name}/", f"{name}0")).result()
        shutil.copytree(folder / "zarr2" / name, target / name)
    return moved


def test_a_mismatch_is_named_and_mended(checkpoints, tmp_path):
    folder, expected = checkpoints
    mixed, flipped, reverse = tmp_path / "mixed", tmp_path / "flipped", tmp_path / "reverse"
    moved = mismatched(folder, mixed)
    for path, source, said in ((flipped, "zarr2", True), (reverse, "zarr3_ocdbt", False)):
        shutil.copytree(folder / source, path)
        about = json.loads((path / "_METADATA").read_text())
        (path / "_METADATA").write_text(json.dumps(about | {"use_ocdbt": said}))
    for path in (mixed, flipped, reverse):
        assert kinds(path) == {"mismatch"}
        assert "convert --in_place" in tool("verify", path, status=1)
        # Waystation reads it all the same.
        assert len(exported(path, tmp_path / f"{path.name}-npy")) == len(expected["zarr2"])
    before = restored(mixed, flipped, reverse)
    assert all(isinstance(tree, str) for tree in before), before

    [item] = json.loads(tool("convert", mixed, "--in_place", "--json"))["items"]
    assert (item["layout"], item["arrays"], item["metadata_changed"]) == ("ocdbt", len(moved), False)
    report = verify(mixed)
    assert report["faults"] == 0 and len(report["foreign_objects"]) == len(moved)
    tool("convert", mixed, "--in_place", "--remove_old")
    assert verify(mixed)["foreign_objects"] == [] and not (mixed / "large").exists()
    for path in (flipped, reverse):
        [item] = json.loads(tool("convert", path, "--in_place", "--json"))["items"]
        assert (item["arrays"], item["metadata_changed"]) == (0, True)
        assert verify(path)["faults"] == 0
    *after, whole = restored(mixed, flipped, reverse, folder / "zarr2")
    assert all(bits(tree) == bits(whole) for tree in after)


def test_layouts_change_in_place(checkpoints, tmp_path):
    folder, expected = checkpoints
    made = []
    for source, target in (("zarr2", "zarr3_ocdbt"), ("zarr3_ocdbt", "zarr2"), ("zarr2", "zarr3"), ("zarr2_ocdbt", "zarr3_ocdbt")):
        path = tmp_path / f"{source}-{target}"
        shutil.copytree(folder / source, path)
        tool("convert", path, "--in_place", "--layout", NAMES[target])
        report = verify(path)
        assert report["faults"] == 0 and len(report["foreign_objects"]) == len(expected[source])
        tool("convert", path, "--in_place", "--layout", NAMES[target], "--remove_old")
        report = verify(path)
        assert report["faults"] == 0 and report["foreign_objects"] == [], report
        tool("diff", path, folder / source)
        made.append(path)
    tool("convert", made[0], "--in_place", "--chunk_bytes=1KiB", status=64)
    *found, whole = restored(*made, folder / "zarr2")
    assert all(bits(tree) == bits(whole) for tree in found)


def test_databases_that_nobody_merged_are_read_named_and_merged(checkpoints, tmp_path):
    folder, expected = checkpoints
    source, path = folder / "two_processes/zarr2_ocdbt", tmp_path / "children"
    shutil.copytree(source, path, ignore=shutil.ignore_patterns("commit_success.txt"))
    (path / "manifest.ocdbt").unlink()
    shutil.rmtree(path / "d")
    assert kinds(path) == {"database"}
    assert json.loads(tool("inspect", path, "--json"))["databases_of_processes"] == ["ocdbt.process_0", "ocdbt.process_1"]
    assert exported(path, tmp_path / "npy") == bits(expected["two_processes/zarr2_ocdbt"])
    tool("convert", path, "--in_place")
    assert verify(path)["faults"] == 0
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{path}"}).result()
    whole = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{source}"}).result()
    assert {key: store[key] for key in store.list().result()} == {key: whole[key] for key in whole.list().result()}


def test_casts_and_differences(checkpoints, tmp_path):
    folder, expected = checkpoints
    path = tmp_path / "cast"
    tool("convert", folder / "zarr2", path, "--dtype=float32", "--cast=by.*=bfloat16", "--cast=by.half=int8", status=64)
    # Of complex numbers there is no cast to real ones.
    tool("convert", folder / "zarr2", path, "--cast=by.*=bfloat16", "--cast=by.half=int8", "--cast=keys.*=float32")
    seen = {about["name"]: about["dtype"] for about in json.loads(tool("inspect", path, "--json"))["arrays"]}
    assert (seen["by.rows"], seen["by.half"], seen["keys.one"]) == ("bfloat16", "int8", "uint32")
    found = exported(path, tmp_path / "npy")
    for name, to in (("by.rows", "bfloat16"), ("by.cube", "bfloat16"), ("by.half", "int8")):
        about = expected["zarr2"][name]
        array = np.frombuffer(bytes.fromhex(about["hex"]), about["dtype"]).astype(np.dtype(to))
        assert found[name] == (about["shape"], array.tobytes().hex())
    differences = json.loads(tool("diff", folder / "zarr2", path, "--json", status=1))["differences"]
    found = {difference["array"]: difference for difference in differences}
    assert {name for name in seen if name.startswith("by.") and name != "by.both"} == set(found)
    assert found["by.rows"]["kind"] == "dtype" and 0 < found["by.rows"]["max_abs_difference"] < 0.02
    assert "differing" not in found["by.half"], "the numbers are the same"

    differences = json.loads(tool("diff", folder / "manager", folder / "manager", "--step=0", "--second_step=10", "--json", status=1))
    found = {difference["array"]: difference for difference in differences["differences"]}
    assert (found["w"]["differing"], found["w"]["elements"], found["w"]["max_abs_difference"]) == (192, 192, 10.0)
    assert found["step"]["max_abs_difference"] == 10.0
    assert "only in first" in tool("diff", folder / "zarr2", folder / "v1", status=1)


def test_safetensors(checkpoints, tmp_path):
    folder, expected = checkpoints
    file = tmp_path / "all.safetensors"
    assert "int2" in tool("export", folder / "zarr3_ocdbt", file, "--only=dtypes.int2", status=64), "it has no name for that"
    only = ["--only=by.*", "--only=large", "--only=dtypes.float8_e4m3fn", "--only=dtypes.bfloat16", "--only=keys.*", "--only=python.*"]
    tool("export", folder / "zarr3_ocdbt", file, *only, "--cast=python.float=float16")
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0 and header.pop("__metadata__")["prng of keys.rbg"] == "rbg"
    names = {"F32": "float32", "BF16": "bfloat16", "U32": "uint32", "F8_E4M3": "float8_e4m3fn", "I32": "int32", "I64": "int64"}
    for name, about in header.items():
        begin, end = about["data_offsets"]
        found = data[8 + length + begin : 8 + length + end]
        if name == "python.float":
            assert about["dtype"] == "F16" and np.frombuffer(found, np.float16) == 0.25
            continue
        array = expected["zarr3_ocdbt"][name]
        assert (names[about["dtype"]], about["shape"], found.hex()) == (array["dtype"], array["shape"], array["hex"]), name
    assert len(header) > 12
    tool("export", folder / "zarr3_ocdbt", file, *only, status=64)
    assert "bfloat16" in tool("export", folder / "zarr2", tmp_path / "npy", "--only=dtypes.bfloat16", status=64)


def files(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_copies_are_the_same(checkpoints, tmp_path):
    folder, _ = checkpoints

    tool("copy", folder / "manager", tmp_path / "copy")
    assert files(tmp_path / "copy") == files(folder / "manager")
    assert "there already" in tool("copy", folder / "manager", tmp_path / "copy", status=64)


def sparse(path, chunks, size=1 << 20):
    """A checkpoint of zeros."""
    (path / "w").mkdir(parents=True)
    about = {"chunks": [size], "compressor": None, "dimension_separator": ".", "dtype": "|u1", "fill_value": None,
             "filters": None, "order": "C", "shape": [chunks * size], "zarr_format": 2}  # fmt: skip
    (path / "w/.zarray").write_text(json.dumps(about))
    for number in range(chunks):
        with (path / "w" / str(number)).open("wb") as file:
            file.truncate(size)


def killed(folder, chunks, *arguments):
    """Runs a command until it has written so many chunks."""
    process = subprocess.Popen([str(BINARY), "checkpoint", *map(str, arguments)])
    try:
        wait_for(lambda: len(list(folder.glob("w/*"))) > chunks or process.poll() is not None, 30, "some are written")
        process.kill()
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("command", [("copy",), ("convert", "--chunk_bytes=700KiB", "--compression=1")])
def test_what_was_interrupted_goes_on(command, checkpoints, tmp_path):
    verb, *flags = command
    sparse(tmp_path / "source", 100)
    target, begun = tmp_path / "target", tmp_path / "target.orbax-checkpoint-tmp"
    killed(begun, 10, verb, tmp_path / "source", target, *flags)
    assert begun.exists() and not target.exists(), "killed before its end"
    # Nothing else goes on with that.
    assert "something else" in tool(verb, checkpoints[0] / "manager", target, *flags, status=64)
    report = json.loads(tool(verb, tmp_path / "source", target, *flags, "--json"))
    kept = report["kept" if verb == "copy" else "kept_chunks"]
    assert kept > 0 and not begun.exists()
    assert all(name.removeprefix("w/").isdecimal() or name == "w/.zarray" for name in files(target)), "nothing else is left"
    tool("diff", tmp_path / "source", target)
    print(f"{kept} of {kept + report.get('objects', 0) + report.get('chunks', 0)} were kept")


# What a command takes of memory at most: this process is itself too large to be told from what it starts.
PEAK = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, used = os.wait4(process.pid, 0)
print(os.waitstatus_to_exitcode(status), used.ru_maxrss * 1024)
"""


def test_memory_is_bounded(tmp_path):
    sparse(tmp_path / "source", 30, 10 << 20)
    commands = [
        ("verify", tmp_path / "source"),
        ("convert", tmp_path / "source", tmp_path / "cut", "--layout=ocdbt_zarr3", "--chunk_bytes=1MiB", "--compression=1"),
        ("convert", tmp_path / "source", tmp_path / "database", "--layout=ocdbt"),
        ("export", tmp_path / "source", tmp_path / "npy"),
        ("diff", tmp_path / "source", tmp_path / "cut"),
        ("copy", tmp_path / "source", tmp_path / "copy"),
    ]
    for command in commands:
        bound = [] if command[0] == "copy" else ["--memory=192MiB"]
        line = [sys.executable, "-S", "-c", PEAK, str(BINARY), "checkpoint", *map(str, command), *bound]
        ended = subprocess.run(line, capture_output=True, text=True, check=True, timeout=120)
        status, peak = map(int, ended.stdout.split())
        assert status == (command[0] == "verify"), ended.stderr
        # The binary itself, and what the store has of writes on their way.
        assert peak < (192 + 150) << 20, (command, peak >> 20)
        print(f"{command[0]}: {peak >> 20} MiB")
    assert "--memory" in tool("verify", tmp_path / "source", "--memory=16MiB", status=1)


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_buckets(scheme, checkpoints, tmp_path):
    folder, expected = checkpoints
    with gcs.double(tmp_path, "shared") as url:
        gcs.order(url, "limits", paced=False)
        environment = {**os.environ, **(gcs.server_environment(url) if scheme == "gs" else gcs.s3_environment(url))}

        def there(*arguments, status=0):
            return tool(*arguments, status=status, environment=environment)

        root = f"{scheme}://shared/team"
        there("copy", folder / "manager", f"{root}/manager")
        assert [step["finished"] for step in json.loads(there("ls", f"{root}/manager", "--json"))["steps"]] == [True, True]
        assert json.loads(there("verify", f"{root}/manager", "--json"))["faults"] == 0
        assert "not empty" in there("copy", folder / "manager", f"{root}/manager", status=64)
        # Older versions of Orbax commit by a rename alone, on disks; in buckets that is not enough.
        shutil.copytree(folder / "manager/10", tmp_path / "older", ignore=shutil.ignore_patterns("commit_success.txt"))
        there("copy", tmp_path / "older", f"{root}/older")
        assert json.loads(there("ls", f"{root}/older", "--json"))["steps"][0]["finished"]
        # Objects that are sent in parts.
        sparse(tmp_path / "large", 1, 40 << 20)
        there("copy", tmp_path / "large", f"{root}/large")
        there("convert", f"{root}/large", f"{root}/database", "--layout=ocdbt")
        there("diff", f"{root}/database", tmp_path / "large")
        there("copy", f"{root}/large", tmp_path / "large_back")
        there("diff", tmp_path / "large_back", tmp_path / "large")
        there("copy", f"{root}/manager", tmp_path / "back")
        assert files(tmp_path / "back") == files(folder / "manager")
        # What is not committed there is not finished.
        written = list(gcs.order(url, "state", "GET")["buckets"]["shared"]["objects"])
        assert "team/manager/10/commit_success.txt" in written and not [name for name in written if "waystation" in name]
        there("convert", folder / "zarr2", f"{root}/a", "--layout=ocdbt")
        there("convert", f"{root}/a", f"{root}/b", "--layout=zarr3", "--chunk_bytes=100B")
        there("convert", f"{root}/b", "--in_place", "--layout=ocdbt_zarr3", "--remove_old")
        assert "team/b/commit_success.txt" in gcs.order(url, "state", "GET")["buckets"]["shared"]["objects"]
        report = json.loads(there("verify", f"{root}/b", "--json"))
        assert report["faults"] == 0 and report["foreign_objects"] == []
        there("diff", folder / "zarr2", f"{root}/b")
        there("export", f"{root}/b", f"{root}/npy", "--only=by.rows")
        there("export", f"{root}/b", tmp_path / "npy", "--only=by.rows")
        array = np.load(tmp_path / "npy/by.rows.npy")
        assert array.tobytes().hex() == expected["zarr2"]["by.rows"]["hex"]


def test_unfinished_steps_are_told_apart(checkpoints, tmp_path):
    folder, _ = checkpoints
    root = tmp_path / "root"
    shutil.copytree(folder / "manager", root)
    (root / "10").rename(root / "10.orbax-checkpoint-tmp")
    listed = json.loads(tool("ls", root, "--json"))
    assert [step["finished"] for step in listed["steps"]] == [True, False]
    assert verify(root)["unfinished_steps"] == ["10.orbax-checkpoint-tmp"]
    assert json.loads(tool("inspect", root, "--json"))["location"].endswith("/0/state")
    assert "unfinished" in kinds(root / "10.orbax-checkpoint-tmp")
    tool("copy", root, tmp_path / "copy")
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["0"]


def test_arrays_without_elements(tmp_path):
    (tmp_path / "source").mkdir()
    for name, shape in (("none", [0, 3]), ("some", [2, 3])):
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": f"{tmp_path}/source/{name}/"},
            "metadata": {"shape": shape, "chunks": [1, 3], "dtype": "<f4", "compressor": None},
            "create": True,
        }
        tensorstore.open(spec).result().write(np.ones(shape, np.float32)).result()
    for layout, name in NAMES.items():
        path = tmp_path / layout
        tool("convert", tmp_path / "source", path, "--layout", name)
        tool("diff", tmp_path / "source", path)
        assert exported(path, tmp_path / f"{layout}-npy")["none"] == ([0, 3], "")
        # Of _METADATA alone, which was never there.
        assert kinds(path) == {"unreadable"}
        store = {"driver": "file", "path": f"{path}/none/"}
        if "ocdbt" in layout:
            store = {"driver": "ocdbt", "base": f"file://{path}", "path": "none/"}
        array = tensorstore.open({"driver": "zarr3" if "zarr3" in layout else "zarr", "kvstore": store}, open=True).result()
        assert array.shape == (0, 3)
    tool("export", tmp_path / "zarr3", tmp_path / "x.safetensors")


@pytest.mark.parametrize("what", ["a huge shape", "a huge chunk", "dots in a name", "dots in a key", "a bomb", "a pipe"])
def test_hostile_checkpoints_are_errors(what, checkpoints, tmp_path):
    folder, _ = checkpoints
    path = tmp_path / "hostile"
    shutil.copytree(folder / "raw/zarr2", path)
    meta = json.loads((path / "w/.zarray").read_text())
    if what == "a huge shape":
        meta |= {"shape": [1 << 40, 1 << 20], "chunks": [4, 12]}
    elif what == "a huge chunk":
        meta |= {"shape": [1 << 40, 12], "chunks": [1 << 40, 12]}
    elif what == "a bomb":
        # A frame that becomes 16 GiB: RLE blocks of 128 KiB, 4 bytes each.
        size = 16 << 30
        block = (128 << 10) << 3 | 2
        frame = bytes.fromhex("28b52ffd") + bytes([0b1110_0000]) + size.to_bytes(8, "little")
        frame += (block.to_bytes(3, "little") + b"\0") * (size // (128 << 10) - 1) + (block | 1).to_bytes(3, "little") + b"\0"
        (path / "w/0.0").write_bytes(frame)
        meta |= {"shape": [size // 4, 1], "chunks": [size // 4, 1], "compressor": {"id": "zstd"}}
    elif what == "a pipe":
        (path / "w/0.0").unlink()
        os.mkfifo(path / "w/0.0")
    elif what == "dots in a key":
        store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{path}"}).result()
        for file in (path / "w").iterdir():
            store["../../evil/" + file.name] = file.read_bytes()
            store["/evil/" + file.name] = file.read_bytes()
    else:
        about = json.loads((path / "_METADATA").read_text())
        about["tree_metadata"]["('w',)"]["key_metadata"][0]["key"] = "../../secret"
        (path / "_METADATA").write_text(json.dumps(about))
    (path / "w/.zarray").write_text(json.dumps(meta))
    import resource

    limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))  # noqa: E731
    for command in (["verify", path], ["export", path, tmp_path / "npy"], ["convert", path, tmp_path / "converted"]):
        command = [str(BINARY), "checkpoint", *map(str, command)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, preexec_fn=limit)
        assert ended.returncode in (1, 64) or what == "dots in a name" and command[2] != "verify", (command, ended)
        # One array's chunks are too large: that is a fault, and the others are looked at.
        assert ended.returncode == 1 or (what, command[2]) != ("a huge chunk", "verify"), ended
        assert "panicked" not in ended.stderr and len(ended.stderr.splitlines()) <= 1
    assert not (tmp_path / "converted").exists() or what == "dots in a name"
    assert not (tmp_path.parent / "evil").exists() and not pathlib.Path("/evil").exists()
    assert {file.name for file in tmp_path.iterdir()} <= {"converted", "converted.orbax-checkpoint-tmp", "hostile", "npy"}
