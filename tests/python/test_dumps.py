"""Dumps of XLA in a bucket: of compiles, and of programs that the cache has. The key does not change."""

import json
import subprocess
import sys

from conftest import BINARY, CONNECT, base_environment, client_status

PROGRAM = CONNECT + """
import json, os, urllib.request

def step(x):
    return jnp.tanh(x @ x) * 2 + 1

compiled = jax.jit(step).lower(jnp.ones((8, 8))).compile()
text = compiled.as_text()
with urllib.request.urlopen(os.environ["WAYSTATION_STATUS_URL"], timeout=30) as response:
    totals = json.load(response)["totals"]
print(json.dumps({"text": text, "compiles": totals["compiles"]}))
"""


# The plugin refuses the value, and quotes it.
REFUSED = """
try:
    jax.jit(lambda x: x + 1).lower(jnp.ones(3)).compile(compiler_options={"xla_cpu_enable_fast_math": "xla_dump_to"})
except jax.errors.JaxRuntimeError as error:
    assert "INVALID_ARGUMENT" in str(error) and "option" in str(error) and "xla_dump_to" in str(error), error
else:
    raise AssertionError("the option was taken")
"""


def run(folder, *flags, program=PROGRAM):
    """Runs the program once; gives its HLO and the workers' compiles, those for its text included."""
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    ended = subprocess.run(
        [BINARY, "run", f"--gcs_scratch_location=file://{folder}/bucket", "--devices_per_worker=1", *flags, "--",
         sys.executable, "-c", program],
        env=base_environment() | {"TMPDIR": str(temporary)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert client_status(ended.returncode, ended.stderr) == 0, ended.stderr
    # An executable keeps the options it was compiled with: XLA would dump again, to the same folder, wherever it is loaded.
    assert not list(temporary.glob("waystation-text-*"))
    return json.loads(ended.stdout)


def dumps(folder):
    """The files of `step`, by what stands behind its name."""
    found = {}
    for path in folder.glob("worker-0-0-*/module_*.jit_step.*"):
        found[path.name.split(".jit_step.")[1]] = path
    return found


def test_a_compile_and_a_hit_are_dumped_and_the_key_is_the_same(tmp_path):
    cold = run(tmp_path, f"--xla_dump_to=file://{tmp_path}/cold/", "--xla_dump_hlo_as_proto")
    assert cold["compiles"] > 0
    files = dumps(tmp_path / "cold")
    assert "before_optimizations.txt" in files and "cache_hit.txt" not in files, files
    after = files["cpu_after_optimizations.txt"].read_text()
    assert "HloModule jit_step" in after
    assert after == cold["text"], "the program's text is XLA's own"
    assert any(name.endswith(".hlo.pb") for name in files), "what else was asked for"

    entries = sorted(path for path in (tmp_path / "bucket").rglob("*") if path.is_file())
    warm = run(tmp_path, f"--xla_dump_to={tmp_path}/warm")
    assert warm == {**cold, "compiles": 0}, "no compile, not for the text either"
    assert sorted(path for path in (tmp_path / "bucket").rglob("*") if path.is_file()) == entries
    files = dumps(tmp_path / "warm")
    assert set(files) == {"before_optimizations.txt", "cpu_after_optimizations.txt", "cache_hit.txt"}
    assert files["cpu_after_optimizations.txt"].read_text() == after
    assert "was not compiled" in files["cache_hit.txt"].read_text()


def test_without_kept_texts_a_hit_says_so(tmp_path):
    cold = run(tmp_path, "--nocache_keep_hlo_text")
    warm = run(tmp_path, f"--xla_dump_to={tmp_path}/warm")
    assert warm["text"] == cold["text"], "compiled once more for it"
    files = dumps(tmp_path / "warm")
    assert set(files) == {"cache_hit.txt"}
    assert "no HLO was kept" in files["cache_hit.txt"].read_text()


def test_an_option_that_a_client_has_wrong_ends_no_dumps(tmp_path):
    run(tmp_path, f"--xla_dump_to=file://{tmp_path}/dumps/", program=PROGRAM.replace("def step", REFUSED + "\ndef step"))
    files = dumps(tmp_path / "dumps")
    assert {"before_optimizations.txt", "cpu_after_optimizations.txt"} <= set(files), files
