"""What TensorStore, gcsfs and Orbax do with a bucket: the scripts that record_gcs.py records and test_gcs.py runs.

Each is for a process of its own, since their settings are environment variables. The bucket is "shared".
"""

TENSORSTORE = """
import numpy as np, tensorstore as ts
data = np.arange(24, dtype=np.float32).reshape(4, 6)
chunks = ts.ChunkLayout(chunk_shape=[2, 6])
for driver in ("zarr", "zarr3"):
    spec = {"driver": driver, "kvstore": {"driver": "gcs", "bucket": "shared", "path": f"ts/{driver}/"}}
    store = ts.open(spec, create=True, dtype=ts.float32, shape=data.shape, chunk_layout=chunks).result()
    store.write(data).result()
    assert (ts.open(spec).result().read().result() == data).all()
ocdbt = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": "gs://shared/ts/ocdbt/", "path": "x/"}}
store = ts.open(ocdbt, create=True, dtype=ts.float32, shape=data.shape).result()
store.write(data).result()
store[1:2].write(data[:1]).result()
assert ts.open(ocdbt).result().read().result()[1, 0] == 0
kv = ts.KvStore.open("gs://shared/ts/kv/").result()
for name in ("a", "b", "c/d", "c/e"):
    kv.write(name, name.encode() * 10).result()
assert kv.read("a").result().value == b"a" * 10
assert kv.read("none").result().state == "missing"
assert len(kv.list().result()) == 4
kv.delete_range(ts.KvStore.KeyRange("c/", "c0")).result()
assert sorted(kv.list().result()) == [b"a", b"b"]
"""

GCSFS = """
import gcsfs
fs = gcsfs.GCSFileSystem(use_listings_cache=False)
fs.pipe("shared/fs/one", b"first")
with fs.open("shared/fs/sub/two", "wb") as file:
    file.write(b"second" * 10)
assert fs.cat("shared/fs/one") == b"first"
assert fs.cat_file("shared/fs/sub/two", start=6, end=12) == b"second"
assert fs.exists("shared/fs/one") and not fs.exists("shared/fs/none")
assert fs.isdir("shared/fs/sub") and fs.info("shared/fs/one")["size"] == 5
assert sorted(fs.ls("shared/fs", detail=False)) == ["shared/fs/one", "shared/fs/sub"]
assert len(fs.find("shared/fs")) == 2
fs.cp_file("shared/fs/one", "shared/fs/copy")
fs.mv("shared/fs/copy", "shared/fs/moved")
assert fs.cat("shared/fs/moved") == b"first"
fs.rm("shared/fs/moved")
fs.rm("shared/fs/sub", recursive=True)
assert fs.find("shared/fs") == ["shared/fs/one"]
"""

ORBAX = """
import numpy as np, orbax.checkpoint as ocp
tree = {"a": np.arange(8, dtype=np.int32), "b": {"c": np.full((1,), 2.5, np.float32)}}
options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
with ocp.CheckpointManager("gs://shared/orbax", options=options) as manager:
    for step in (1, 2):
        manager.save(step, args=ocp.args.StandardSave(tree))
    assert manager.all_steps() == [2]
    back = manager.restore(2, args=ocp.args.StandardRestore(tree))
assert (back["a"] == tree["a"]).all() and back["b"]["c"][0] == 2.5
"""

ALL = {"TensorStore": TENSORSTORE, "gcsfs": GCSFS, "Orbax": ORBAX}
