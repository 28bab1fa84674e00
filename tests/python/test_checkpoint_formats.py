"""The four formats in which workers write checkpoints: clients/formats.py against clusters of each."""

import pytest
from conftest import CLIENTS, Checks
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
