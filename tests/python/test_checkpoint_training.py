"""Training that goes on while checkpoints are written: what steps take, and what memory the worker takes for it."""

import json
import statistics
import threading

import pytest
from conftest import CLIENTS, Cluster

STATE_MIB, SAVES = 64, 4
# Beside the budget: parts that XLA and the allocator take when they like.
LOOSE_MIB = 48


@pytest.mark.parametrize("budget", [2 * STATE_MIB, STATE_MIB // 4], ids=["twice the state", "a quarter of it"])
def test_steps_go_on_and_memory_stays_within_the_budget(tmp_path, budget):
    cluster = Cluster(tmp_path, "--devices_per_worker=4", f"--checkpoint_host_memory={budget}MiB")
    try:
        (worker,) = cluster.children("worker")
        client = cluster.start_client([CLIENTS / "stepping.py", STATE_MIB, SAVES], env={"SCRATCH": str(tmp_path)})
        watchdog = threading.Timer(300, client.kill)
        watchdog.start()
        before, most, told, lines = None, 0, {}, []
        for line in client.stdout:
            lines.append(line)
            if line.startswith("@@"):
                told |= json.loads(line[2:])
            if told.get("ready") and before is None:
                before = worker.memory_info().rss
                # The operating system notes the most by itself, from now on.
                with open(f"/proc/{worker.pid}/clear_refs", "w") as file:
                    file.write("5")
            if "milliseconds" in told and not most:
                status = dict(row.split(":", 1) for row in open(f"/proc/{worker.pid}/status"))
                most = int(status["VmHWM"].split()[0]) << 10
        client.wait(60)
        watchdog.cancel()
    finally:
        cluster.stop()
    assert told.get("equal") is True, "".join(lines)[-3000:]
    grown = max(0, most - before) / (1 << 20)
    steps = told["milliseconds"]
    print(
        f"\nstate {STATE_MIB} MiB, budget {budget} MiB: the worker grew by {grown:.0f} MiB over {before / (1 << 20):.0f}; a step "
        f"took {statistics.median(steps)} ms at the median and {max(steps)} at most: {steps}"
    )
    assert grown <= 1.1 * budget + LOOSE_MIB, grown
