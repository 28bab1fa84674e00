"""Runs the client programs of `clients/` against clusters; every check of theirs is a test here."""

import re
import signal

import pytest
from conftest import ABORT_AT_EXIT, CLIENTS, Checks

# (program, workers, devices per worker)
RUNS = [
    ("devices", 1, 8),
    ("arrays", 1, 8),
    ("layouts", 1, 8),
    ("memories", 1, 8),
    ("programs", 1, 8),
    ("errors", 1, 8),
    ("contexts", 1, 8),
    ("training", 1, 8),
    ("linalg", 1, 8),
    ("persistence", 1, 8),
    ("resharding", 1, 8),
    ("replicas", 1, 8),
    ("devices", 2, 4),
    ("arrays", 2, 4),
    ("programs", 2, 4),
    ("errors", 2, 4),
    ("training", 2, 4),
    ("spanning", 2, 4),
    ("collectives", 2, 4),
    ("replicas", 2, 4),
    ("resharding", 2, 4),
    ("persistence", 2, 4),
]


def checks_of(program):
    text = (CLIENTS / f"{program}.py").read_text()
    return re.findall(r"^@check\n(?:@\w+\n)*def (\w+)", text, re.MULTILINE)


CASES = [(program, shape, name) for program, *shape in RUNS for name in checks_of(program)]


@pytest.fixture(scope="session")
def results(clusters, tmp_path_factory):
    """Runs each program once for each shape, when first asked; gives its checks' results."""
    done = {}

    def get(program, shape):
        key = (program, *shape)
        if key not in done:
            cluster = clusters(*shape)
            scratch = tmp_path_factory.mktemp(program)
            arguments = [CLIENTS / f"{program}.py"]
            done[key] = Checks(*cluster.run_client(arguments, timeout=600, env={"SCRATCH": str(scratch)}))
        return done[key]

    return get


@pytest.mark.parametrize(
    "program,shape,name", CASES, ids=[f"{program}-{shape[0]}x{shape[1]}-{name}" for program, shape, name in CASES]
)
def test_client(results, program, shape, name):
    results(program, tuple(shape)).judge(name)


@pytest.mark.parametrize("program,workers,devices", RUNS)
def test_client_ends_cleanly(results, program, workers, devices):
    checks = results(program, (workers, devices))
    failed = any(line["result"] == "failed" for line in checks.by_name.values())
    assert checks.status == (1 if failed else 0), checks.output[-3000:]


ABORTS = "import os, sys; print('\\n'.join(sys.argv[1:]), flush=True); os.abort()"


def test_only_jaxlibs_abort_at_the_end_of_a_good_client_is_forgiven(cluster):
    with pytest.warns(UserWarning, match="aborted at the end"):
        status, output = cluster.run_client(["-c", ABORTS, "a result", *ABORT_AT_EXIT])
    assert status == 0 and "a result" in output
    for words in (ABORT_AT_EXIT[1:], ABORT_AT_EXIT[:2], ["Traceback (most recent call last)", *ABORT_AT_EXIT]):
        assert cluster.run_client(["-c", ABORTS, *words])[0] == -signal.SIGABRT
