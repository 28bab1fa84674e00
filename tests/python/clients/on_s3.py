"""Arrays saved to and restored from S3 by the workers. Orbax's own files would take s3fs, so the requests are its handler's:
pathwaysutils writes and reads arrays by them without Orbax."""

import datetime
import os

import jax
import jax.numpy as jnp
import numpy as np
import pathwaysutils
import tensorstore as ts
from harness import check, main
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from pathwaysutils.persistence import helper

pathwaysutils.initialize()

LOCATION, ENDPOINT = os.environ["SCRATCH"], os.environ["S3_ENDPOINT"]
TIMEOUT = datetime.timedelta(seconds=60)


def values():
    random = np.random.default_rng(7)
    return {
        "params.w": random.normal(size=(512, 96)).astype(np.float32),
        "params.half": random.normal(size=(32, 16)).astype(jnp.bfloat16),
        "step": np.int32(17),
    }


def sharding(rows, *spec):
    mesh = Mesh(np.array(jax.devices()).reshape(rows, -1), ("x", "y"))
    return NamedSharding(mesh, P(*spec))


@check
def saved_and_restored():
    specs = {"params.w": ("x", "y"), "params.half": ("y",), "step": ()}
    arrays = {name: jax.device_put(value, sharding(2, *specs[name])) for name, value in values().items()}
    helper.write_arrays(LOCATION, list(arrays), list(arrays.values()), TIMEOUT).result()
    others = {"params.w": ("y",), "params.half": (None, "x"), "step": ()}
    to = {name: sharding(4, *spec) for name, spec in others.items()}
    names = list(values())
    restored, done = helper.read_arrays(
        LOCATION, names,
        [array.dtype for array in arrays.values()], [array.shape for array in arrays.values()],
        [to[name] for name in names], jax.devices(), TIMEOUT,
    )  # fmt: skip
    done.result()
    for name, array in zip(names, restored, strict=True):
        assert array.sharding == to[name]
        np.testing.assert_array_equal(np.asarray(array), values()[name])


@check
def read_plainly():
    """By TensorStore's own S3 driver."""
    bucket, path = LOCATION.removeprefix("s3://").split("/", 1)
    for name, value in values().items():
        kvstore = {
            "driver": "s3", "bucket": bucket, "path": f"{path}/{name}/", "endpoint": ENDPOINT, "aws_region": "nowhere",
            "aws_credentials": {"type": "anonymous"},
        }  # fmt: skip
        stored = ts.open({"driver": "zarr", "kvstore": kvstore}).result()
        np.testing.assert_array_equal(stored.read().result(), value)


if __name__ == "__main__":
    main()
