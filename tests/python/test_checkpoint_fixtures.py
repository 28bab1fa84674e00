"""The checkpoints that the other tests read: what their list says they hold is what TensorStore finds in them."""

import json
import pathlib

import checkpoint_fixtures
import tensorstore


def opened(folder, name):
    about = json.loads((folder / "_METADATA").read_text())
    store = {"driver": "file", "path": f"{folder}/{name}/"}
    if about["use_ocdbt"]:
        store = {"driver": "ocdbt", "base": f"file://{folder}", "path": f"{name}/"}
    spec = {"driver": "zarr3" if about["use_zarr3"] else "zarr", "kvstore": store}
    return tensorstore.open(spec, open=True).result()


def test_they_hold_what_is_expected(checkpoints):
    folder, expected = checkpoints
    assert json.loads((folder / "expected.json").read_text()) == expected
    for checkpoint, arrays in expected.items():
        for name, about in arrays.items():
            array = opened(folder / checkpoint, name)
            found = {"shape": list(array.shape), "dtype": array.dtype.name, "hex": array.read().result().tobytes().hex()}
            assert found == {key: about[key] for key in found}, (checkpoint, name)


def test_they_have_what_they_are_named_for(checkpoints):
    folder, expected = checkpoints
    assert set(checkpoint_fixtures.LAYOUTS) < set(expected)
    dtypes = {about["dtype"] for about in expected["zarr2"].values()}
    assert dtypes >= {"bool", "int2", "int4", "float16", "bfloat16", "complex128", "float8_e5m2", "float4_e2m1fn", "uint64"}
    for layout in checkpoint_fixtures.LAYOUTS:
        assert opened(folder / "chunked" / layout, "by_bytes").chunk_layout.read_chunk.shape == (1, 12)
        assert opened(folder / "chunked" / layout, "by_axes").chunk_layout.read_chunk.shape == (4, 1)
        assert "zstd" not in str(opened(folder / "raw" / layout, "w").spec().to_json()["metadata"])
    children = [path.name for path in pathlib.Path(folder, "two_processes/zarr2_ocdbt").glob("ocdbt.process_*")]
    assert sorted(children) == ["ocdbt.process_0", "ocdbt.process_1"]
