"""The bench's parts about checkpoints: against Orbax and TensorStore on native JAX, and against what the machine gives at best."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import figures

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "python"))
import gcs  # noqa: E402

MIB = 1 << 20
DEVICES = 4
# What a side's four devices take on native JAX.
NATIVE = {"JAX_NUM_CPU_DEVICES": str(DEVICES)}
# (name, use_ocdbt, --checkpoint_format)
LAYOUTS = (("zarr2", False, "zarr2"), ("OCDBT", True, "ocdbt"))
# Against Orbax, by whether it is compressed.
BEYOND_ORBAX = {True: 1.15, False: 1.0}
# Of zstd at level 1 on all cores, and of writing and syncing the bytes.
OF_THE_BOUND = 0.80
# Of zstd's own.
CPU_FACTOR, STORED_FACTOR, READ_FACTOR, MEMORY_FACTOR = 1.15, 1.02, 1.10, 1.10
# What proxy and Python may grow by, whatever the size.
FLAT_BYTES = 64 * MIB
SMALL_ARRAYS, LATENCY_MS = 2000, 30
SMALL_BEYOND_ORBAX = {"zarr2": 10, "OCDBT": 4}


def stored_bytes(folder):
    return sum(path.stat().st_size for path in pathlib.Path(folder).rglob("*") if path.is_file())


class CheckpointParts:
    """Of the bench."""

    def state_bytes(self):
        return 16 * MIB if self.quick else self.checkpoint_bytes

    def folder(self):
        """On the disk of the results, which memory is not."""
        return tempfile.TemporaryDirectory(prefix="waystation-bench-", dir=self.sides.logs)

    def checkpoint(self):
        with self.folder() as folder, self.sides.native(env=NATIVE) as native:
            setup = {"folder": folder, "size_bytes": self.state_bytes()}
            # Whose chunks are the data that the bounds are taken of.
            native.run("checkpoint", setup, {"action": "save", "name": "raw", "compressed": False})
            for compressed in (True, False):
                for layout in LAYOUTS:
                    self.saves_and_restores(native, setup, layout, compressed)

    def saves_and_restores(self, native, setup, layout, compressed):
        name, ocdbt, checkpoint_format = layout
        flags = [f"--checkpoint_format={checkpoint_format}"] + ([] if compressed else ["--checkpoint_compression=none"])
        taken = {action: {"waystation": [], "native": []} for action in ("save", "restore")}
        stored, bounds = {"waystation": [], "native": []}, []
        with self.sides.waystation(*flags, devices=DEVICES) as ours:

            def both(side, check=False):
                options = {"name": side.name, "ocdbt": ocdbt, "compressed": compressed}
                legs = {action: side.run("checkpoint", setup, {"action": action, "check": check, **options}) for action in taken}
                size = stored_bytes(pathlib.Path(setup["folder"], side.name))
                side.run("checkpoint", setup, {"action": "remove", "name": side.name})
                return legs, size

            for side in (ours, native):  # warms up, and shows that what comes back is right
                both(side, check=True)
            for pair in range(self.pairs):
                for side in (ours, native) if pair % 2 else (native, ours):
                    legs, size = both(side)
                    stored[side.name].append(size)
                    for action, leg in legs.items():
                        taken[action][side.name].append(leg)
                bounds.append(self.bound(setup["folder"]))
        self.checkpoint_figures(name, compressed, taken, stored, bounds)

    def bound(self, folder):
        """What zstd and the disk do with the same bytes, now."""
        command = [self.sides.checkpoint_bench, "--checkpoint", f"{folder}/raw", "--folder", folder]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr[-500:]}")
        os.sync()
        return json.loads(done.stdout)

    def checkpoint_figures(self, name, compressed, taken, stored, bounds):
        kind = "compressed" if compressed else "as it is"
        best = {"save": ("compress", "zstd 1"), "restore": ("decompress", "zstd 1")}
        if not compressed:
            best = {"save": ("write", "write + fsync"), "restore": ("read", "read")}
        for action, legs in taken.items():
            title = f"{action}, {name}, {kind}"
            asked = self.asked(BEYOND_ORBAX[compressed], margin=0.30)
            self.compare(title, "MB/s", "bytes_per_second", legs, "native", scale=1e-6, asked=asked)
            what, against = best[action]
            ours = [leg["bytes_per_second"] / 1e6 for leg in legs["waystation"]]
            limit = [bound["bytes"] / bound[f"{what}_seconds"] / 1e6 for bound in bounds]
            # Reading from the page cache is no bound that was asked for.
            asked = None if what == "read" else self.asked(OF_THE_BOUND, margin=0.30)
            self.figures.append(figures.figure(f"{title}, of the bound", "MB/s", ours, limit, against=against, asked=asked))
            if compressed:
                spent = [leg["cpu"]["worker"] for leg in legs["waystation"]]
                own = [bound[f"{what}_cpu_seconds"] for bound in bounds]
                asked = self.asked(CPU_FACTOR, margin=0.30, at_least=False)
                self.figures.append(
                    figures.figure(
                        f"{title}, CPU of the worker", "s", spent, own, against="zstd's own", lower_is_better=True, asked=asked
                    )
                )
            self.count_cpu(title, legs, "megabytes", "MB")
        asked = self.asked(STORED_FACTOR, margin=0.05, at_least=False)
        sizes = [[size / 1e6 for size in stored[side]] for side in ("waystation", "native")]
        self.figures.append(
            figures.figure(f"stored, {name}, {kind}", "MB", *sizes, against="native", lower_is_better=True, asked=asked)
        )

    def checkpoint_memory(self):
        """Resident memory while a state four times the budget is saved and restored; and what two workers read of it."""
        size = self.state_bytes()
        budget = size // 4
        with self.folder() as folder:
            setup = {"folder": folder, "size_bytes": size}
            with self.sides.waystation(f"--checkpoint_host_memory={budget}", devices=DEVICES) as ours:
                # The first one has what a process does but once.
                ours.run("checkpoint", setup, {"action": "save", "name": "first"})
                for action, more in (("save", 0), ("restore", size)):
                    before, most = self.most(ours, setup, {"action": action, "name": "second"})
                    allowed = {"worker": MEMORY_FACTOR * budget + more, "proxy": FLAT_BYTES, "client": FLAT_BYTES}
                    for role, limit in allowed.items():
                        against = "bound" if role != "worker" else "budget + 10 %" + (" + arrays" if more else "")
                        grown = max(0, most[role] - before[role])
                        self.figures.append(
                            figures.figure(
                                f"growth of the {role} in a {action}", "MiB", [grown / MIB], [limit / MIB], against=against,
                                lower_is_better=True, asked=self.asked(1.0, margin=1, at_least=False),
                            )  # fmt: skip
                        )
            self.bytes_read(setup)

    def most(self, side, setup, options):
        """Resident bytes by role before a leg, and the most of them in it."""
        sample = lambda: {**side.resident(), "client": side.client_resident()}
        before = sample()
        most = dict(before)
        side.begin("checkpoint", setup, options)
        while not side.has_answered():
            for role, resident in sample().items():
                most[role] = max(most.get(role, 0), resident)
            time.sleep(0.005)
        side.end()
        return before, most

    def bytes_read(self, setup):
        """Each of two workers has half of every array on its devices."""
        with self.sides.native(env=NATIVE) as native:
            native.run("checkpoint", setup, {"action": "save", "name": "raw", "compressed": False})
        with self.sides.waystation(devices=DEVICES // 2, workers=2) as ours:
            for cut in ("rows", "columns"):
                ours.run("checkpoint", setup, {"action": "restore", "name": "raw", "cut": cut, "check": True})
                before = self.read_bytes(ours)
                ours.run("checkpoint", setup, {"action": "restore", "name": "raw", "cut": cut})
                read = [after - earlier for after, earlier in zip(self.read_bytes(ours), before, strict=True)]
                self.figures.append(
                    figures.figure(
                        f"read by a worker, cut in {cut}", "MB", [one / 1e6 for one in read], [setup["size_bytes"] / 2e6] * len(read),
                        against="needed", lower_is_better=True, asked=self.asked(READ_FACTOR, margin=0.1, at_least=False),
                    )  # fmt: skip
                )

    def read_bytes(self, side):
        workers = self.status(side)["workers"]
        workers = workers.values() if isinstance(workers, dict) else workers
        return [worker["checkpoints"]["read_bytes"] for worker in workers]

    def objects(self):
        """Many small arrays, on a store that takes its time to answer. Both sides' Orbax writes its own files there, too."""
        count, latency = (20, 5) if self.quick else (SMALL_ARRAYS, LATENCY_MS)
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="waystation-bench-"))
            gcs.DOUBLE = self.sides.null_binary.with_name("gcs_double")
            url = stack.enter_context(gcs.double(folder, "bench"))
            gcs.order(url, "limits", paced=False, latency_ms=latency)
            client = gcs.orbax_environment(url)
            native = stack.enter_context(self.sides.native(env={**NATIVE, **client}))
            env = {**gcs.server_environment(url), **client}
            for name, ocdbt, checkpoint_format in LAYOUTS:
                with self.sides.waystation(f"--checkpoint_format={checkpoint_format}", devices=DEVICES, env=env) as ours:
                    self.small_arrays(name, ocdbt, count, ours, native)

    def small_arrays(self, name, ocdbt, count, ours, native):
        setup = {"folder": "gs://bench/small", "count": count}
        pairs = min(self.pairs, 5)  # minutes otherwise
        taken = {action: {"waystation": [], "native": []} for action in ("save", "restore")}
        for pair in range(-1, pairs):  # the first warms up
            for side in (ours, native) if pair % 2 else (native, ours):
                for action, legs in taken.items():
                    options = {"action": action, "name": f"{name}-{side.name}-{pair + 1}", "ocdbt": ocdbt}
                    leg = side.run("objects", setup, options)
                    if pair >= 0:
                        legs[side.name].append(leg)
        for action, legs in taken.items():
            asked = self.asked(SMALL_BEYOND_ORBAX[name], margin=SMALL_BEYOND_ORBAX[name] / 2)
            self.compare(f"{action}, {count} arrays of 4 KB, {name}", "arrays/s", "arrays_per_second", legs, "native", asked=asked)
