"""Arrays to put, meshes to put them on, and what has to come back."""

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh


def grid(rows, columns, names=("x", "y"), devices=None):
    devices = jax.devices() if devices is None else devices
    return Mesh(np.array(devices[: rows * columns]).reshape(rows, columns), names)


def sample(dtype, shape):
    count = int(np.prod(shape))
    values = np.random.default_rng(7).integers(-8, 8, count)
    if np.dtype(dtype) == np.bool_:
        values = values > 0
    elif np.dtype(dtype).kind == "u" or dtype == ml_dtypes.uint4:
        values = np.abs(values)
    elif np.dtype(dtype).kind == "c":
        values = values + 1j * values[::-1]
    return values.astype(dtype).reshape(shape)


def same(array, expected):
    """Bit for bit, shape and type included."""
    fetched = np.asarray(array)
    assert fetched.dtype == expected.dtype, (fetched.dtype, expected.dtype)
    assert fetched.shape == expected.shape, (fetched.shape, expected.shape)
    assert np.ascontiguousarray(fetched).tobytes() == np.ascontiguousarray(expected).tobytes()


def fresh(array):
    """The same array without the value that the client keeps of it."""
    return jax.make_array_from_single_device_arrays(
        array.shape, array.sharding, [shard.data for shard in array.addressable_shards]
    )
