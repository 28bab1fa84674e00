"""`waystation checkpoint verify` finds one mutation of every field and of every kind of chunk, in every layout: counted."""

import collections
import copy
import json
import re
import shutil

import pytest
from checkpoint_fixtures import LAYOUTS
from test_checkpoint_tools import tool, verify

# What nothing else in a checkpoint tells, and what is of no consequence for its arrays. By file and way to the field.
UNTOLD = [re.compile(pattern) for pattern in (
    r"_METADATA custom_metadata.*",
    r"_METADATA store_array_data_equal_to_fill_value( gone)?",
    # Whether a node is a list or a dictionary.
    r"_METADATA tree_metadata\..*\.key_metadata\.\d+\.key_type",
    # What is not skipped need not say so.
    r"_METADATA tree_metadata\.[^.]+\.value_metadata\.skip_deserialize gone",
    r"_METADATA use_zarr3 gone",
    r"_METADATA use_ocdbt gone",
    r"_CHECKPOINT_METADATA .*",
    # Files of one array's shardings and writers may lack it.
    r"_sharding [^.]+ gone",
    r"_sharding [^.]+\.(axis_types\.\d+|device_mesh|device_mesh\.mesh(\.\d+)*\.id|axis_types|partition_spec|device_str)( .*)?",
    r"_sharding [^.]+\.partition_spec\.\d+ gone",
    r"array_metadatas/process_0 array_metadatas\.\d+\.array_metadata\.(write_shape|chunk_shape|ext_metadata)(\.random_key_impl)? gone",
    r"array_metadatas/process_0 array_metadatas\.\d+\.array_metadata\.ext_metadata$",
    r"array_metadatas/process_0 array_metadatas\.\d+ gone",
    r"_strings.json [^.]+",
    # Readers need neither.
    r".*/\.zarray (fill_value|compressor\.level|dimension_separator gone).*",
    r".*/\.zarray .* more",
    r".*/zarr\.json .*(checksum|level|fill_value).*",
    # What is left out is what it is by default.
    r".*/zarr\.json .*(configuration|endian|index_codecs\.\d+|codecs\.\d+\.configuration\.codecs\.\d+) gone",
)]  # fmt: skip


def fields(value, way=()):
    """The ways to all fields of a JSON document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, field in inner:
        yield way + (key,)
        yield from fields(field, way + (key,))


def changed(value):
    """Another value of the same kind; None where there is none to be had."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return value + "x" if value else "x"
    return "x" if value is None else None


def mutations(document):
    """(what, document) with one field changed or gone."""
    for way in fields(document):
        for what in ("changed", "gone"):
            mutant = copy.deepcopy(document)
            parent = mutant
            for key in way[:-1]:
                parent = parent[key]
            if what == "gone":
                del parent[way[-1]]
            else:
                other = changed(parent[way[-1]])
                if other is None:
                    continue
                parent[way[-1]] = other
            yield ".".join(map(str, way)) + ("" if what == "changed" else " gone"), mutant


class Bench:
    """A checkpoint that is changed again and again, and what was found."""

    def __init__(self, path):
        self.path = path
        self.counts = collections.Counter()
        self.missed = []
        assert verify(path)["faults"] == 0

    def look(self, what, kind, may_pass=False):
        report = json.loads(tool("verify", self.path, "--json", status=None))
        found = report["faults"] > 0
        self.counts[kind, "found" if found else "passed"] += 1
        if not found and not may_pass:
            self.missed.append(what)
        return found

    def with_bytes(self, file, content, what, kind, may_pass=False):
        whole = file.read_bytes()
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        try:
            return self.look(f"{file.relative_to(self.path)} {what}", kind, may_pass)
        finally:
            file.write_bytes(whole)

    def damage(self, file, kind, step, may_pass=False):
        """Gone, short, empty, long, and one flipped bit in every `step`th byte."""
        whole = file.read_bytes()
        for what, content in (("gone", None), ("short", whole[:-1]), ("empty", b""), ("long", whole + b"\0")):
            # Behind what is referred to, a data file may have anything.
            self.with_bytes(file, content, what, f"{kind} {what}", (kind, what) == ("data file", "long"))
        for at in range(0, len(whole), step):
            flipped = bytearray(whole)
            flipped[at] ^= 1 << at % 8
            self.with_bytes(file, bytes(flipped), f"bit in byte {at} of {len(whole)}", f"{kind} flipped", may_pass)

    def fields(self, file, every=1):
        name = str(file.relative_to(self.path))
        document = json.loads(file.read_text())
        if name == "_sharding":
            document = {key: json.loads(text) for key, text in document.items()}
        for number, (what, mutant) in enumerate(mutations(document)):
            if number % every:
                continue
            if name == "_sharding":
                mutant = {key: json.dumps(text) for key, text in mutant.items()}
            untold = any(pattern.fullmatch(f"{name} {what}") for pattern in UNTOLD)
            self.with_bytes(file, json.dumps(mutant).encode(), what, f"field of {file.name}" + " (untold)" * untold, untold)


def run(checkpoints, tmp_path, step, every):
    folder, _ = checkpoints
    total = collections.Counter()
    missed = []

    def bench(path, work):
        one = Bench(path)
        work(one)
        total.update(one.counts)
        missed.extend(f"{path.name}: {what}" for what in one.missed)
        assert verify(path)["faults"] == 0, "all was put back"

    def plain(one):
        about = [file for file in one.path.rglob("*") if file.name in (".zarray", "zarr.json")]
        for file in about:
            one.fields(file, every)
            for what, content in (("gone", None), ("short", file.read_bytes()[:-1])):
                one.with_bytes(file, content, what, f"{file.name} {what}")
        chunk = next(file for file in sorted(about[0].parent.rglob("*")) if file.is_file() and file not in about)
        checked = verify(one.path)["chunks_without_checksum"] == 0
        one.damage(chunk, "chunk" if checked else "chunk without checksum", step, may_pass=not checked)
        extra = chunk.with_name("99.99" if "." in chunk.name else "99")
        extra.write_bytes(chunk.read_bytes())
        one.look(f"{extra} beyond the grid", "chunk beyond the grid")
        extra.unlink()

    def database(one):
        one.damage(one.path / "manifest.ocdbt", "manifest", step)
        for file in (one.path / "d").iterdir():
            one.damage(file, "data file", step)

    def said(one):
        for name in ("_METADATA", "_sharding", "array_metadatas/process_0", "_strings.json"):
            if (one.path / name).exists():
                one.fields(one.path / name, every)
                one.with_bytes(one.path / name, b"{", "cut short", f"{name} cut short")
        one.with_bytes(one.path / "_METADATA", None, "gone", "_METADATA gone")

    for layout, options in LAYOUTS.items():
        path = tmp_path / layout
        shutil.copytree(folder / "chunked" / layout, path)
        bench(path, said)
        # Merged by Orbax: the tree alone is in the data file, so every bit of it has a checksum.
        bench(path, database if options["use_ocdbt"] else plain)
        # Written by Waystation: frames with checksums, values and tree in one file.
        path = tmp_path / f"ours-{layout}"
        tool("convert", folder / "chunked" / layout, path, "--compression=1")
        bench(path, database if options["use_ocdbt"] else plain)
    for layout in ("zarr2", "zarr3"):
        path = tmp_path / f"raw-{layout}"
        shutil.copytree(folder / "raw" / layout, path)
        bench(path, plain)
    # Values out of line.
    path = tmp_path / "large"
    tool("convert", folder / "two_processes/zarr2", path, "--compression=1", "--layout=ocdbt")
    bench(path, database)
    # Keys and texts.
    path = tmp_path / "keys"
    tool("convert", folder / "v1/state", path, "--layout=zarr2")
    bench(path, said)
    for kind, count in sorted(total.items()):
        print(f"{count:6} {kind[0]}: {kind[1]}")
    assert not missed, f"{len(missed)} of {total.total()}: " + "\n".join(missed[:80])
    sought = sum(count for (kind, _), count in total.items() if "untold" not in kind and "without checksum flipped" not in kind)
    print(f"{sought} mutations that something stored tells, all found")


def test_a_mutation_of_each_kind_is_found(checkpoints, tmp_path):
    run(checkpoints, tmp_path, step=97, every=7)


@pytest.mark.slow
def test_every_mutation_is_found(checkpoints, tmp_path):
    run(checkpoints, tmp_path, step=1, every=1)
