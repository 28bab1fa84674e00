"""The other side of the format tests: TensorStore's OCDBT driver, as it is on PyPI.

    peer.py read FOLDER    reads every database FOLDER/NAME that has FOLDER/NAME.json beside it, and adds a key to each
    peer.py merge FOLDER   merges the databases FOLDER/theirs/ocdbt.process_w*/ into FOLDER/theirs, as Orbax does
    peer.py write FOLDER   writes databases of several shapes, and their pairs beside them

FOLDER/NAME.json holds the pairs of a database: {hex of key: hex of value}.
"""

import json
import pathlib
import sys

import tensorstore as ts

ORBAX = {
    "max_inline_value_bytes": 1024,
    "max_decoded_node_bytes": 100_000_000,
    "manifest_kind": "single",
    "version_tree_arity_log2": 4,
    "compression": {"id": "zstd", "level": 0},
}

# One for all, or nothing can be copied from one database to another.
CONTEXT = ts.Context()


def open_database(path: pathlib.Path, config=None) -> ts.KvStore:
    spec = {"driver": "ocdbt", "base": f"file://{path}/"}
    return ts.KvStore.open(spec | ({"config": config} if config else {}), context=CONTEXT).result()


def contents(store: ts.KvStore) -> dict[str, str]:
    keys = store.list().result()
    assert len(keys) == len(set(keys))
    values = [store.read(key) for key in keys]
    return {key.hex(): value.result().value.hex() for key, value in zip(keys, values, strict=True)}


def read(folder: pathlib.Path) -> None:
    names = [path.stem for path in folder.glob("*.json")]
    assert names
    for name in names:
        expected = json.loads((folder / f"{name}.json").read_text())
        assert contents(open_database(folder / name)) == expected, name
        store = open_database(folder / name)
        store.write(b"params.layers_1.new", b"added").result()
        expected[b"params.layers_1.new".hex()] = b"added".hex()
        assert contents(open_database(folder / name)) == expected, name
    print(f"read {len(names)} databases")


def merge(folder: pathlib.Path) -> None:
    parent = folder / "theirs"
    store = open_database(parent, ORBAX)
    transaction = ts.Transaction(atomic=True)
    for child in sorted(parent.glob("ocdbt.process_*")):
        open_database(child).experimental_copy_range_to(store.with_transaction(transaction)).result()
    transaction.commit_async().result()


def pairs(count: int) -> dict[bytes, bytes]:
    made = {}
    for number in range(count):
        length = 3000 if number % 4 == 0 else number % 90
        key = f"params.layers_{number // 50}.kernel/{number // 7}.{number % 7}".encode()
        made[key] = bytes(at * number % 256 for at in range(length))
    return made


def write(folder: pathlib.Path) -> None:
    shapes = {
        "orbax": (pairs(400), ORBAX),
        "inline": (pairs(200), ORBAX | {"max_inline_value_bytes": 1 << 20, "compression": None}),
        "out_of_line": (pairs(200), ORBAX | {"max_inline_value_bytes": 0}),
        "levels": (pairs(400), ORBAX | {"max_decoded_node_bytes": 4000}),
        "small": (pairs(400), ORBAX | {"max_decoded_node_bytes": 500, "compression": None}),
        "numbered": (pairs(100), ORBAX | {"manifest_kind": "numbered"}),
        "odd": ({b"": b"1", b"\0\xff": b"2" * 2000, b"\xff" * 300: b""}, ORBAX),
        "empty": ({}, ORBAX),
    }
    for name, (made, config) in shapes.items():
        store = open_database(folder / name, config)
        # In batches, so that there are many versions, and more than the manifest holds.
        keys = sorted(made)
        batches = [keys[at::20] for at in range(20)] if len(keys) > 20 else [keys]
        for batch in batches:
            with ts.Transaction() as transaction:
                for key in batch:
                    store.with_transaction(transaction).write(key, made[key]).result()
        if not made:
            store.write(b"gone", b"soon").result()
            store.delete_range(ts.KvStore.KeyRange()).result()
        expected = {key.hex(): value.hex() for key, value in made.items()}
        assert contents(store) == expected, name
        (folder / f"{name}.json").write_text(json.dumps(expected))
    print(f"wrote {len(shapes)} databases")


if __name__ == "__main__":
    {"read": read, "merge": merge, "write": write}[sys.argv[1]](pathlib.Path(sys.argv[2]).resolve())
