"""What the compile cache takes for the same program, across processes, places, devices and JAX versions; and what
`waystation cache why-miss` says of what it does not."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from conftest import BINARY, ROOT, base_environment, client_status

# A function and a training step, traced in a file of the test's choosing; FACTOR, DONATE, DEVICE, OPTION and AXIS (of a
# mesh, over which the function's argument is split) are put in.
PROGRAM = """
import os, sys
import jax, jax.numpy as jnp
import numpy as np

if jax.version.__version_info__ < (0, 12):
    import pathwaysutils
    pathwaysutils.initialize()

def train(parameters, batch):
    def loss(parameters):
        h = batch
        for w, b in parameters:
            h = jnp.tanh(h @ w + b)
        return jnp.mean(h ** 2)
    value, grads = jax.value_and_grad(loss)(parameters)
    return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, grads), value

device = jax.devices()[int(os.environ.get("DEVICE", "0"))]
with jax.default_device(device):
    x = jax.device_put(np.ones((8, 8), np.float32), device)
    options = json_options = {}
    if os.environ.get("OPTION"):
        name, value = os.environ["OPTION"].split("=")
        options = {"compiler_options": {name: value}}
    factor = float(os.environ.get("FACTOR", "2"))
    f = jax.jit(lambda x: x * factor + 1, **options)
    y = x
    if os.environ.get("AXIS"):
        mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("rows", "columns"))
        y = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(os.environ["AXIS"])))
    np.testing.assert_allclose(f(y), np.ones((8, 8)) * factor + 1)
    layers = [(x, x[0]), (x, x[1])]
    layers = jax.device_put([(np.ones((8, 8), np.float32), np.ones(8, np.float32))] * 2, device)
    donate = (0,) if os.environ.get("DONATE") else ()
    new, value = jax.jit(train, donate_argnums=donate)(layers, x)
    assert np.isfinite(value)
"""


class Job:
    """Runs of the program that share a bucket and a history of keys."""

    def __init__(self, folder):
        self.folder = folder
        self.history = folder / "history"

    def run(self, *flags, where="one", lines=0, python=sys.executable, env=None):
        """Runs it once in a cluster of its own; gives, by program, how its key was served."""
        place = self.folder / where
        place.mkdir(exist_ok=True)
        script = place / "train.py"
        script.write_text("\n" * lines + PROGRAM)
        before = len(self.notes())
        ended = subprocess.run(
            [BINARY, "run", f"--gcs_scratch_location=file://{self.folder}/bucket", "--devices_per_worker=4", *flags,
             "--", python, script],
            env={**base_environment(), "WAYSTATION_CACHE_HISTORY": str(self.history), **(env or {})},
            capture_output=True, text=True, timeout=300, cwd=place,
        )  # fmt: skip
        assert client_status(ended.returncode, ended.stderr) == 0, ended.stderr
        return {note["program"]: note["origin"] for note in self.notes()[before:] if note["program"] in TRACED}

    def notes(self):
        return [json.loads(line) for line in self.history.read_text().splitlines()] if self.history.exists() else []

    def why(self, program):
        """The components that the last compile of a program differs in from what was known."""
        ended = subprocess.run(
            [BINARY, "cache", "why-miss", "--json", f"--program={program}", "--last=1"],
            env={**base_environment(), "WAYSTATION_CACHE_HISTORY": str(self.history)},
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        (last,) = json.loads(ended.stdout)
        return last["since"] and last["since"]["components"]


TRACED = ("jit__lambda", "jit_train")
HITS = dict.fromkeys(TRACED, "bucket")
MISSES = dict.fromkeys(TRACED, "compiled")


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


def test_one_program_from_anywhere_is_one_key_and_every_difference_has_a_name(job, tmp_path):
    assert job.run() == MISSES
    assert job.why("jit_train") is None
    # Another directory, other lines, another process, another device.
    assert job.run(where="two", lines=50, env={"DEVICE": "2"}) == HITS

    assert job.run(env={"FACTOR": "3"}) == {"jit__lambda": "compiled", "jit_train": "bucket"}
    assert job.why("jit__lambda") == ["program"]
    assert job.run(env={"DONATE": "1"}) == {"jit__lambda": "bucket", "jit_train": "compiled"}
    assert job.why("jit_train") == ["program"]
    assert job.run(env={"AXIS": "rows"}) == {"jit__lambda": "compiled", "jit_train": "bucket"}
    assert "options" in job.why("jit__lambda"), "more devices"
    assert job.run(env={"AXIS": "columns"}) == {"jit__lambda": "compiled", "jit_train": "bucket"}
    assert job.why("jit__lambda") == ["program"], "the sharding alone"
    assert job.run(env={"AXIS": "columns"}) == HITS
    option = "xla_cpu_enable_fast_math=True"
    assert job.run(env={"OPTION": option}) == {"jit__lambda": "compiled", "jit_train": "bucket"}
    assert job.why("jit__lambda") == ["flag/xla_cpu_enable_fast_math"]

    assert job.run("--xla_cpu_enable_fast_math") == {"jit__lambda": "bucket", "jit_train": "compiled"}
    assert job.why("jit_train") == ["flag/xla_cpu_enable_fast_math"]
    # What the plugin does anyway, a flag that leaves no trace, and a client's own environment change nothing.
    client = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    assert job.run("--xla_backend_optimization_level=3", "--xla_detailed_logging=1", env=client) == HITS
    assert job.run(env={"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}) == MISSES
    assert "flag/xla_backend_optimization_level" in job.why("jit_train")


def test_the_workers_own_environment_and_plugin_count(job, tmp_path):
    assert job.run() == MISSES
    plugin = subprocess.run(
        [BINARY, "doctor"], env=base_environment(), capture_output=True, text=True, timeout=60
    ).stdout  # fmt: skip
    (plugin,) = [line.split(": ", 1)[1] for line in plugin.splitlines() if line.startswith("ok plugin: ")]
    copy = tmp_path / pathlib.Path(plugin).name
    shutil.copy(plugin, copy)
    assert job.run(f"--pjrt_plugin={copy}") == HITS, "the same file elsewhere"
    with open(copy, "ab") as file:
        file.write(b"\0")
    assert job.run(f"--pjrt_plugin={copy}") == MISSES
    assert job.why("jit_train") == ["platform/plugin"]

    # Workers inherit it. The proxy has it too, and sends it as a flag, which then says nothing new.
    assert job.run(env={"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}) == MISSES
    assert job.why("jit_train") == ["environment/XLA_FLAGS"]


def test_an_entry_of_other_rules_is_named(job):
    assert job.run() == MISSES
    notes = job.notes()
    older = [{**note, "components": [[name, "0" * 16] if name == "rules" else [name, digest]
                                     for name, digest in note["components"]]} for note in notes]  # fmt: skip
    newer = [{**note, "unix_ms": note["unix_ms"] + 1} for note in notes]
    job.history.write_text("".join(json.dumps(note) + "\n" for note in older + newer))
    assert job.why("jit_train") == ["rules"]


OTHER = pathlib.Path(os.environ.get("WAYSTATION_OTHER_PYTHON", ROOT / ".venv311/bin/python"))


@pytest.mark.skipif(not OTHER.exists(), reason="no second JAX")
def test_two_jax_versions_share_or_differ_in_the_program_alone(job):
    """Two JAX lower a program alike or not; nothing but the program itself may tell them apart."""
    assert job.run() == MISSES
    python = base_environment()["WAYSTATION_PYTHON"]
    served = job.run(python=OTHER, env={"WAYSTATION_PYTHON": python})
    assert set(served) == set(TRACED)
    for name, origin in served.items():
        assert origin == "bucket" or job.why(name) == ["program"], name


@pytest.mark.parametrize(
    ("flags", "env", "words"),
    [
        (["--xla_cpu_enabel_fast_math=1"], {}, ["--xla_cpu_enabel_fast_math", "XLA has --xla_cpu_enable_fast_math"]),
        (["--xla_backend_optimization_level=high"], {}, ["'high' is not a valid int32 value"]),
        (["--xla_tpu_enable_something"], {}, ["--xla_tpu_enable_something"]),
        (["--xla_dump_hlo_as_txt", "--xla_dump_to=/nowhere"], {}, ["--xla_dump_hlo_as_txt"]),
    ],
)
def test_a_flag_that_the_plugin_does_not_know_ends_the_start(tmp_path, flags, env, words):
    marker = tmp_path / "ran"
    ended = subprocess.run(
        [BINARY, "run", *flags, "--", "touch", marker],
        env={**base_environment(), **env}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 64, ended.stderr
    assert not marker.exists(), "no client was served"
    for word in words:
        assert word in ended.stderr, ended.stderr
