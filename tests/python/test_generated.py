"""Programs made at random whose collectives cross workers (clients/generated.py): the same results as in one process, and the
same bits in every run and wherever the parts of a program lie."""

import collections
import math
import pickle

import ml_dtypes
import numpy as np
import pytest
from conftest import CLIENTS, run_plainly

CASES = [
    pytest.param(2, 4, 16, id="16 programs, 2x4"),
    pytest.param(3, 2, 8, id="8 programs, 3x2"),
    pytest.param(2, 4, 200, id="200 programs, 2x4", marks=pytest.mark.slow),
    pytest.param(3, 2, 100, id="100 programs, 3x2", marks=pytest.mark.slow),
]
# What the sum of a group may be away from another order of adding it up: units in the last place, by halvings of the group.
ULPS = 4


def load(path):
    with open(path, "rb") as file:
        return pickle.load(file)


def ulps(one, other):
    """The largest distance, in units in the last place of the larger."""
    eps = float(ml_dtypes.finfo(one.dtype).eps)
    one, other = one.astype(np.float64), other.astype(np.float64)
    largest = np.maximum(np.abs(one), np.abs(other))
    unit = eps * 2.0 ** np.floor(np.log2(np.maximum(largest, 1e-30)))
    return float((np.abs(one - other) / unit).max())


def same(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def table(counts):
    """Collectives by kind, element type, members of a group and place in the program, as text."""
    groups = sorted({cell[2] for cell in counts})
    inside = list(dict.fromkeys(cell[3] for cell in counts))
    lines = [f"groups of {groups}, at {'/'.join(inside)} each"]
    rows = collections.defaultdict(list)
    for (kind, dtype, group, place), count in counts.items():
        rows[kind, dtype].append((groups.index(group), inside.index(place), count))
    for (kind, dtype), cells in rows.items():
        numbers = [str(count) for _, _, count in sorted(cells)]
        parts = [" ".join(numbers[i : i + len(inside)]) for i in range(0, len(numbers), len(inside))]
        lines.append(f"{kind:21} {dtype:10} {' | '.join(parts)}")
    return "\n".join(lines)


@pytest.mark.parametrize("workers,devices,count", CASES)
def test_generated_programs_over_workers_are_those_of_one_process(clusters, tmp_path, workers, devices, count):
    program, timeout = CLIENTS / "generated.py", 120 + 15 * count
    paths = {name: tmp_path / name for name in ("native", "run", "again", "placed")}
    status, output = run_plainly([program, count, workers, paths["native"]], devices=workers * devices, timeout=timeout)
    assert status == 0, output[-3000:]
    cluster = clusters(workers, devices)
    for name, placement in (("run", []), ("again", []), ("placed", [5])):
        status, output = cluster.run_client([program, count, workers, paths[name], *placement], timeout=timeout)
        assert status == 0, output[-3000:]
    native, run, again, placed = (load(paths[name]) for name in ("native", "run", "again", "placed"))
    assert len(native["results"]) == count and native["counts"] == run["counts"]
    wrong, farthest = [], 0.0
    for index, here in native["results"].items():
        there = run["results"][index]
        for part in ("exact", "rounded"):
            for number, values in enumerate(zip(*(r["results"][index][part] for r in (run, again, placed)), strict=True)):
                if not all(same(values[0], value) for value in values[1:]):
                    wrong.append(f"program {index}: {part} result {number} differs between runs or placements")
        for number, values in enumerate(zip(here["exact"], there["exact"], strict=True)):
            if not same(*values):
                wrong.append(f"program {index}: exact result {number} is not that of one process")
        for group, one, other in zip(here["groups"], here["rounded"], there["rounded"]):
            away = ulps(one, other)
            farthest = max(farthest, away / math.log2(group))
            if away > ULPS * math.log2(group):
                wrong.append(f"program {index}: sums of {group} are {away} ulp from those of one process")
        assert len(here["rounded"]) == len(there["rounded"])
    print(f"\n{table(native['counts'])}\nrounded sums: at most {farthest:.2f} ulp x log2(members) from those of one process")
    assert not wrong, "\n".join(wrong)
    reached = sum(map(bool, native["counts"].values()))
    # All of the many; of the few, one after the other.
    assert reached == len(native["counts"]) or reached >= 4 * count, f"{reached} of {len(native['counts'])} cells"
