"""Runs the client programs of `clients/` against clusters; every check of theirs is a test here."""

import re

import pytest
from conftest import CLIENTS, Checks

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
