"""The four formats in which workers write checkpoints: clients/formats.py against clusters of each."""

import pytest
from conftest import CLIENTS, CONNECT, Checks
from test_clients import checks_of

FORMATS = ["zarr2", "zarr3", "ocdbt", "ocdbt_zarr3"]
# On several workers each writes a part of every array.
SHAPES = [(2, 4)]


@pytest.fixture(scope="session")
def results(clusters, tmp_path_factory):
    done = {}

    def get(checkpoint_format, shape):
        key = (checkpoint_format, shape)
        if key not in done:
            cluster = clusters(*shape, f"--checkpoint_format={checkpoint_format}")
            scratch = tmp_path_factory.mktemp(f"formats-{checkpoint_format}")
            environment = {
                "SCRATCH": str(scratch), "FORMAT": checkpoint_format, "WORKERS": str(shape[0]), "JAX_ENABLE_X64": "1",
            }  # fmt: skip
            done[key] = Checks(*cluster.run_client([CLIENTS / "formats.py"], env=environment))
        return done[key]

    return get


@pytest.mark.parametrize("shape", SHAPES, ids=["2x4"])
@pytest.mark.parametrize("checkpoint_format", FORMATS)
@pytest.mark.parametrize("name", checks_of("formats"))
def test_workers_write_what_tensorstore_reads(results, checkpoint_format, shape, name):
    results(checkpoint_format, shape).judge(name)


def test_a_save_that_its_client_cannot_restore_is_warned_of_once(own_cluster, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    cluster = own_cluster("--workers", "1", "--devices_per_worker", "1", "--log_dir", str(logs))
    code = CONNECT + (
        "import datetime, numpy as np\n"
        "from pathwaysutils.persistence import helper\n"
        "for dtype in (np.float32, np.float16, np.bool_):\n"
        "    values = [jax.device_put(np.ones((8,), dtype))]\n"
        "    helper.write_arrays(sys.argv[1], [np.dtype(dtype).name], values, datetime.timedelta(seconds=60)).result()\n"
    )
    status, output = cluster.run_client(["-c", code, tmp_path / "saved"])
    assert status == 0, output[-3000:]
    lines = "".join(file.read_text() for file in logs.iterdir()).splitlines()
    (warning,) = [line for line in lines if "Orbax's client cannot ask for arrays of this type" in line]
    assert "float16" in warning and "F16" in warning, warning
