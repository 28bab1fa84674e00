"""The bench's parts about the compile cache."""

import json
import pathlib
import statistics
import subprocess
import tempfile
import time

import figures

# The smallest transformer.
TINY = {"layers": 2, "width": 8, "batch": 1, "sequence": 8, "vocabulary": 16}
# Compiles for well over half a second.
LARGE = {"layers": 4, "width": 128, "batch": 4}
# Has some ten thousand ops.
MANY_OPS = {"layers": 32, "width": 64, "batch": 2, "sequence": 16}

# What a warm start may take: so many times the plugin's own deserialize, and for a tiny program some milliseconds more.
WARM_FACTOR = 1.15
WARM_MORE_MS = {"tiny": 2, "train step": 0}
# What a hit in memory may add to the plugin's load.
HIT_MS = 1
# What a key may take of the compile that it saves.
KEY_SHARE = 0.02
KEY_OPS_PER_SECOND = 1e6
KEY_BYTES_PER_SECOND = 500e6
# What the cache may cost of a compile's CPU.
COLD_FACTOR = 1.03
FLIGHT_WORKERS, FLIGHT_REQUESTS = 4, 64


class CacheParts:
    """Of the bench."""

    def kinds(self):
        """The programs by kind: what is measured, and how many of them a leg takes."""
        return (("tiny", {}, 2 if self.quick else 20), ("train step", TINY if self.quick else LARGE, 1 if self.quick else 3))

    def warm(self):
        """Each pair of legs in new processes: servers and clients, plugin, JAX."""
        kinds = [(kind, {"kind": kind, **shape}, {"count": count}) for kind, shape, count in self.kinds()]
        with tempfile.TemporaryDirectory(prefix="waystation-bench-") as folder:
            folder = pathlib.Path(folder)
            jax_caches = {side: folder / f"jax-{side}" for side in ("native", "plugin")}
            (folder / "serialized").mkdir()
            flags = ["--gcs_scratch_location", f"file://{folder}/bucket"]
            cold = {}
            with self.sides.waystation(*flags) as ours:
                path = self.plugin_of(ours)
                for kind, which, options in kinds:
                    cold[kind] = ours.run("compiles", which, options)["compile_seconds"]
                totals = self.written(ours)
                assert totals["compiles"] > 0, f"nothing was compiled by an empty bucket's server: {totals}"
            serialized = {}
            for side, cache in jax_caches.items():
                with self.jax_side(side, path, cache) as jax:
                    for kind, which, options in kinds:
                        jax.run("compiles", which, options)
            with self.sides.plugin(path) as plugin:
                for kind, which, options in kinds:
                    write = {**options, "write": True}
                    answer = plugin.run("deserialize", {"folder": f"{folder}/serialized", **which}, write)
                    serialized[kind] = answer["serialized_bytes"]
            names = ("waystation", "plugin", "null", "jax native", "jax plugin")
            taken = {kind: {name: [] for name in names} for kind, *_ in kinds}

            def from_the_bucket():
                with self.sides.waystation(*flags) as ours:
                    for kind, which, options in kinds:
                        # The process's first program is not measured, here and on every other side.
                        ours.run("compiles", which, {"count": 0})
                        before = self.status(ours)["totals"]
                        leg = ours.run("compiles", which, options)
                        leg["totals"] = after = self.status(ours)["totals"]
                        for counted in ("program_seconds", "load_seconds", "key_seconds"):
                            leg[counted] = (after[counted] - before[counted]) / options["count"]
                        hits = after["bucket_hits"] - before["bucket_hits"]
                        assert hits == options["count"] and after["compiles"] == 0, f"not served from the bucket: {after}"
                        taken[kind]["waystation"].append(leg)

            def by_the_plugin():
                with self.sides.plugin(path) as plugin:
                    for kind, which, options in kinds:
                        setup = {"folder": f"{folder}/serialized", **which}
                        taken[kind]["plugin"].append(plugin.run("deserialize", setup, options))

            def by_jax(side):
                with self.jax_side(side, path, jax_caches[side]) as jax:
                    for kind, which, options in kinds:
                        jax.run("compiles", which, {"count": 0})
                        leg = jax.run("compiles", which, options)
                        assert leg["jax_hits"] == options["count"], f"not served from JAX's cache: {leg}"
                        taken[kind][f"jax {side}"].append(leg)

            def by_null():
                with self.sides.null() as null:
                    for kind, which, options in kinds:
                        null.run("compiles", which, {"count": 0})
                        taken[kind]["null"].append(null.run("compiles", which, options))

            takes = [from_the_bucket, by_the_plugin, by_null, lambda: by_jax("native"), lambda: by_jax("plugin")]
            for pair in range(self.pairs):
                for take in takes if pair % 2 else reversed(takes):
                    take()
        for kind, *_ in kinds:
            self.warm_figures(kind, taken[kind], cold[kind], serialized[kind])

    def jax_side(self, side, path, cache):
        return self.sides.native(cache) if side == "native" else self.sides.plugin(path, cache)

    def warm_figures(self, kind, taken, cold, serialized):
        column = lambda side, key: [leg[key] * 1e3 for leg in taken[side]]
        seen, floor = column("waystation", "compile_seconds"), column("null", "compile_seconds")
        alone = column("plugin", "deserialize_seconds")
        more = WARM_MORE_MS[kind]
        allowed = [WARM_FACTOR * one + more for one in alone]
        # What a client does before it sends a program, and how it sends it, is not the server's.
        server = [mine - null for mine, null in zip(seen, floor)]
        bound = f"{WARM_FACTOR} deserialize" + (f" + {more} ms" if more else "")
        jax = {side: column(f"jax {side}", "compile_seconds") for side in ("native", "plugin")}
        slower = max(jax, key=lambda side: statistics.median(jax[side]))
        # A tiny program loads in less than a round trip to any server takes.
        judged = slower if kind == "train step" else None
        asked = self.asked(1.0, margin=0.15, at_least=False)
        show = {"unit": "ms", "lower_is_better": True}
        name = f"warm {kind}"
        self.figures += [
            figures.figure(f"{name}, server", ours=server, theirs=allowed, against=bound, asked=asked, **show),
            figures.figure(f"{name}, server", ours=server, theirs=alone, against="deserialize", **show),
            figures.figure(f"{name}, worker", ours=column("waystation", "program_seconds"), theirs=alone, against="deserialize", **show),
            figures.figure(f"{name}, its load", ours=column("waystation", "load_seconds"), theirs=alone, against="deserialize", **show),
            *(
                figures.figure(
                    f"{name}, client", ours=seen, theirs=theirs, against=f"JAX's cache, {side}",
                    asked=asked if side == judged else None, **show,
                )
                for side, theirs in jax.items()
            ),
        ]  # fmt: skip
        self.count_cpu(f"warm {kind}", taken, "programs", "program")
        key = statistics.median(column("waystation", "key_seconds"))
        self.notes.append(
            f"warm {kind}: cold {cold * 1e3:.1f} ms as the client sees it; {serialized} bytes as the plugin serializes it; 'client' "
            "is what the client sees, its own serialization of the program in it; 'server' is that less the time against the "
            f"null server ({statistics.median(floor):.1f} ms); 'worker' is from the op to its answer, {key:.2f} ms of it the key"
        )

    def hits(self):
        """Programs whose executables have gone and whose entries are in memory."""
        ours, null = self.side("waystation"), self.side("null")
        for kind, shape, count in self.kinds():
            which, options = {"kind": kind, **shape}, {"count": count}
            legs = {"waystation": [], "null": []}
            ours.run("compiles", which, {"count": 0})
            others = self.status(ours)["totals"]["executables"]
            for side in (ours, null):
                side.run("compiles", which, options)
            for pair in range(self.pairs):
                for side in (ours, null)[:: 1 if pair % 2 else -1]:
                    before = self.unloaded(ours, others)
                    leg = side.run("compiles", which, options)
                    after = self.status(ours)["totals"]
                    if side is ours:
                        # Those that found the program loaded are not among them.
                        hits = after["cache"]["memory_hits"] - before["cache"]["memory_hits"]
                        assert hits == count, f"{hits} hits in memory instead of {count}"
                        spent = {key: after[key] - before[key] for key in ("program_seconds", "load_seconds", "key_seconds")}
                        leg.update({key: seconds / count for key, seconds in spent.items()})
                    legs[side.name].append(leg)
            pairs = list(zip(legs["waystation"], legs["null"]))
            by_worker = [(mine["program_seconds"] - mine["load_seconds"]) * 1e3 for mine, _ in pairs]
            by_client = [
                (mine["compile_seconds"] - mine["load_seconds"] - null["compile_seconds"]) * 1e3 for mine, null in pairs
            ]
            asked = self.asked(1.0, margin=0.33, at_least=False)
            for seen, added in (("worker", by_worker), ("client", by_client)):
                self.figures.append(
                    figures.figure(
                        f"hit in memory, {kind}, beyond load, {seen}", "ms", added, [HIT_MS] * len(added), against=f"{HIT_MS} ms",
                        lower_is_better=True, asked=asked,
                    )  # fmt: skip
                )
            self.notes.append(
                f"hit in memory, {kind}: load {statistics.median(mine['load_seconds'] for mine, _ in pairs) * 1e3:.2f} ms, key "
                f"{statistics.median(mine['key_seconds'] for mine, _ in pairs) * 1e3:.2f} ms; 'client' is beyond the null server too"
            )

    def unloaded(self, side, others):
        """Waits until the worker has let go of all executables but those of other parts."""
        deadline = time.monotonic() + 60
        while (totals := self.status(side)["totals"])["executables"] > others:
            assert time.monotonic() < deadline, f"executables stay: {totals['executables']} instead of {others}"
            time.sleep(0.02)
        return totals

    def recorded(self, folder, shape, constant_bytes):
        """Has programs recorded; gives what is known of each by name, and what compiling all of them took."""
        with self.sides.waystation("--record_programs", f"file://{folder}") as ours:
            programs = ours.run("keyed", shape, {"constant_bytes": constant_bytes})["programs"]
            deadline = time.monotonic() + 60
            while self.status(ours)["recorded"]["stored"] < len(programs):
                assert time.monotonic() < deadline, f"programs are not recorded: {self.status(ours)['recorded']}"
                time.sleep(0.05)
            totals = self.status(ours)["totals"]
        return {program["name"]: program for program in programs}, totals

    def keys(self):
        shape = TINY if self.quick else MANY_OPS
        with tempfile.TemporaryDirectory(prefix="waystation-bench-") as folder:
            programs, totals = self.recorded(folder, shape, 1 << 16 if self.quick else 64 << 20)
            files = [str(path) for path in pathlib.Path(folder).rglob("*") if path.is_file()]
            runs = [self.cache_bench("keys", "--milliseconds", "100" if self.quick else "1000", *files) for _ in range(self.pairs)]
        times = {name: [] for name in programs}
        for run in runs:
            for program in run["programs"]:
                if program["name"] in times:
                    times[program["name"]].append(program["seconds"])
                    programs[program["name"]]["bytes"] = program["bytes"]
        ops, constant = programs["jit_many_ops"], programs["jit_one_constant"]
        asked = self.asked(1.0, margin=0.33)
        for name, amount, per_second, unit in (
            ("jit_many_ops", ops["ops"], KEY_OPS_PER_SECOND, "ops/s"),
            ("jit_one_constant", constant["bytes"] / 1e6, KEY_BYTES_PER_SECOND / 1e6, "MB/s"),
        ):
            rates = [amount / seconds for seconds in times[name]]
            bound = [per_second] * len(rates)
            self.figures.append(figures.figure(f"keys, {unit}", unit, rates, bound, against="asked", asked=asked))
        self.figures.append(
            figures.figure(
                "keys of cold compiles", "s", [totals["key_seconds"]], [totals["compile_seconds"] * KEY_SHARE],
                against=f"{KEY_SHARE:.0%} of the compiles", lower_is_better=True, asked=self.asked(1.0, margin=1.0, at_least=False),
            )  # fmt: skip
        )
        self.notes.append(
            f"keys, CPU time: a train step of {ops['ops']} ops in {ops['bytes']} bytes, {statistics.median(times['jit_many_ops']) * 1e3:.2f} "
            f"ms; a program of {constant['bytes']} bytes, nearly all one constant, "
            f"{statistics.median(times['jit_one_constant']) * 1e3:.2f} ms; compiled cold with the small ones around them they took "
            f"{totals['compile_seconds']:.2f} s in the plugin and {totals['key_seconds'] * 1e3:.1f} ms in keys"
        )

    def cache_bench(self, *words):
        command = [str(self.sides.cache_bench), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr[-500:]}")
        return json.loads(done.stdout)

    def flights(self):
        """What is counted here is exact, so that a few times are enough."""
        workers, requests = FLIGHT_WORKERS, FLIGHT_REQUESTS
        counted = {"compiles": [], "bucket_writes": []}
        with tempfile.TemporaryDirectory(prefix="waystation-bench-") as folder:
            self.recorded(folder, TINY, 1 << 16)
            recording = max((path for path in pathlib.Path(folder).rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
            for run in range(min(self.pairs, 3)):
                flags = ["--gcs_scratch_location", f"file://{folder}/bucket-{run}"]
                with self.sides.waystation(*flags, workers=workers, transport="tcp") as ours:
                    address = ours.run("address")["address"]
                    took = self.cache_bench(
                        "flights", "--address", address, "--recording", str(recording), "--requests", str(requests)
                    )
                    # None but the compiler waits for the upload, unless others wait for its claim.
                    totals = self.written(ours)
                for name, numbers in counted.items():
                    numbers.append(totals[name])
        for name, numbers in counted.items():
            self.figures.append(
                figures.figure(
                    f"{requests} first requests, {workers} workers, {name.replace('_', ' ')}", "", numbers, [1] * len(numbers),
                    against="one", lower_is_better=True, asked=self.asked(1.0, margin=0.5, at_least=False),
                )  # fmt: skip
            )
        self.notes.append(f"flights: {requests} requests for one program were answered within {took['seconds'] * 1e3:.0f} ms")

    def cold(self):
        """The same compiles by two servers; what the cache does behind them is waited for."""
        kind, shape, count = self.kinds()[1]
        which = {"kind": kind, **shape}
        with tempfile.TemporaryDirectory(prefix="waystation-bench-") as folder:
            on = self.sides.waystation("--gcs_scratch_location", f"file://{folder}")
            off = self.sides.waystation("--cache_mode", "off", "--cache_keep_hlo_text=false")
            with on, off:
                spent, walls = {on: [], off: []}, {on: [], off: []}
                for pair in range(-1, self.pairs):
                    for side in (on, off)[:: 1 if pair % 2 else -1]:
                        before = side.server_cpu()
                        # New programs every time.
                        leg = side.run("compiles", which, {"first": (pair + 1) * count, "count": count})
                        if side is on:
                            self.written(on)
                        after = side.server_cpu()
                        if pair >= 0:
                            cpu = sum(after[role] - before.get(role, 0) for role in ("worker", "compile-child"))
                            spent[side].append(cpu / count)
                            walls[side].append(leg["compile_seconds"])
                totals = self.status(off)["totals"]
                assert totals["compiles"] >= (self.pairs + 1) * count, f"not compiled with the cache off: {totals}"
        asked = self.asked(COLD_FACTOR, margin=0.03, at_least=False)
        self.figures += [
            figures.figure(
                "cold compile, CPU of worker", "s", spent[on], spent[off], against="cache off", lower_is_better=True, asked=asked
            ),
            figures.figure("cold compile, client", "s", walls[on], walls[off], against="cache off", lower_is_better=True),
        ]

    def written(self, side, seconds=60):
        """Waits until all that was compiled is in the bucket."""
        deadline = time.monotonic() + seconds
        while True:
            totals = self.status(side)["totals"]
            if totals["bucket_writes"] >= totals["compiles"]:
                return totals
            if time.monotonic() > deadline:
                raise RuntimeError(f"after {seconds} s the bucket lacks programs: {totals}")
            time.sleep(0.1)
