"""One job on one worker and on several: what it learns is the same."""

import json

import numpy as np
import pytest
from conftest import ROOT


def train(cluster, mesh, folder):
    command = [ROOT / "examples" / "train.py", "--steps", "40", "--mesh", mesh, "--checkpoint", folder]
    status, output = cluster.run_client(command)
    assert status == 0, output
    return json.loads(output.rsplit("RESULT ", 1)[1].splitlines()[0])


@pytest.mark.parametrize(
    "mesh,shapes", [("2x2", [(1, 4), (2, 2), (4, 1)]), ("2x3", [(1, 6), (3, 2)])], ids=["4-devices", "6-devices"]
)
def test_training_saving_and_restoring_over_several_workers_is_as_on_one(own_cluster, tmp_path, mesh, shapes):
    losses = []
    for workers, devices in shapes:
        cluster = own_cluster("--workers", str(workers), "--devices_per_worker", str(devices))
        result = train(cluster, mesh, tmp_path / f"{workers}")
        cluster.stop()
        # Not by the Python process, nor by the proxy.
        assert result["handler"] == "CloudPathwaysArrayHandler" and result["client_bytes"] < 1_000_000
        losses.append(result["losses"])
    for several in losses[1:]:
        # Sums are made in another order, and the difference grows from step to step.
        assert np.allclose(several, losses[0], rtol=1e-3), (losses[0], several)
