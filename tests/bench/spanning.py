"""The bench's parts about programs and arrays over several workers: against the same in one worker, and against what this
machine's loopback gives at best."""

import contextlib
import json
import subprocess

import figures
from cache import TINY

MIB = 1 << 20
# Bytes that go at a time: collectives' chunks (waystation-collectives), over one connection between two workers, and those of
# arrays (waystation-worker, data), over several.
CHUNK, FRAME = 256 << 10, 1 << 20
CONNECTIONS = 2
# Train steps: milliseconds in one worker, the least of one worker's speed, and a model with less than 4 and 40 MB of gradients.
STEPS = (
    (20, 0.80, {"layers": 2, "width": 128, "sequence": 64}),
    (200, 0.95, {"layers": 3, "width": 512, "sequence": 64}),
)
OF_RAW = 0.60
# CPU of a compile with collectives replaced, by that of a plain one.
HOOKED_FACTOR = 1.10


class Loopback:
    """A process that does with another one, over loopback or Unix sockets, what is asked for, once each time it is told to."""

    def __init__(self, binary, what, size, buffer, connections, unix):
        command = [binary, "--what", what, "--bytes", size, "--buffer", buffer, "--connections", connections]
        command += ["--unix"] * unix
        self.process = subprocess.Popen(
            [str(word) for word in command], text=True, bufsize=1, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def seconds(self):
        self.process.stdin.write("\n")
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"loopback_bench ended with status {self.process.wait()}")
        return json.loads(line)["seconds"]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait(10)


class SpanningParts:
    """Of the bench."""

    @contextlib.contextmanager
    def two_and_one(self, devices, *flags):
        """So many devices in two workers, and in one."""
        two = self.sides.waystation(*flags, devices=devices // 2, workers=2)
        one = self.sides.waystation(*flags, devices=devices)
        one.name = "one worker"
        with two, one:
            yield two, one

    def spanning(self):
        with self.two_and_one(2) as (two, one):
            for milliseconds, bound, shape in STEPS:
                self.data_parallel(two, one, milliseconds, bound, shape)
            size = MIB if self.quick else 64 * MIB
            # Shown: what is asked is asked of TCP.
            self.against_loopback(two, "all_reduce", "all-reduce", "ring", size, CHUNK, 1, unix=True)
            size = MIB if self.quick else 1024 * MIB
            self.against_loopback(two, "moved", "reshard", "one-way", size, FRAME, CONNECTIONS)
        # As between machines.
        with self.sides.waystation("--local_transfers", "off", devices=1, workers=2) as two:
            size = MIB if self.quick else 64 * MIB
            self.against_loopback(two, "all_reduce", "all-reduce by TCP", "ring", size, CHUNK, 1)
        self.hooked_compile()

    def data_parallel(self, two, one, milliseconds, bound, shape):
        shape = {**shape, "batch": 4, "data_parallel": True}
        steps = 1500 // milliseconds
        if self.quick:
            shape, steps = {**TINY, "width": 32, "batch": 4, "data_parallel": True}, 5
        else:
            step = min(1000 / one.run("train", shape, {"steps": 10})["steps_per_second"] for _ in range(3))
            # Both devices get as many.
            shape["batch"] = max(1, round(shape["batch"] * milliseconds / step / 2)) * 2
        taken = self.legs("train", [two, one], shape, {"steps": steps})
        asked = self.asked(bound, margin=0.10)
        name = f"data-parallel steps of {milliseconds} ms, 2 workers"
        self.compare(name, "steps/s", "steps_per_second", taken, "one worker", asked=asked)
        self.count_cpu(name, taken, "steps", "step")
        last = taken["waystation"][-1]
        self.notes.append(
            f"{name}: batch {shape['batch']}, {last['parameter_bytes'] / 1e6:.1f} MB of gradients; "
            f"losses {last['loss']!r} and {taken['one worker'][-1]['loss']!r}"
        )

    def against_loopback(self, side, part, name, what, size, buffer, connections, unix=False):
        setup, ours, raw = {"size_bytes": size}, [], []
        with Loopback(self.sides.loopback_bench, what, size, buffer, connections, unix) as loopback:
            for pair in range(-1, self.pairs):
                order = [
                    lambda: ours.append(side.run(part, setup)["seconds"]),
                    lambda: raw.append(loopback.seconds()),
                ]
                for leg in order[:: 1 if pair % 2 else -1]:
                    leg()
        # The first of each has warmed up.
        rate = lambda seconds: [size / 1e6 / taken for taken in seconds[1:]]
        text = f"{size // MIB} MB" if size < 1 << 30 else "1 GB"
        self.figures.append(
            figures.figure(
                f"{name} of {text}, 2 workers", "MB/s", rate(ours), rate(raw),
                against=f"raw {'Unix socket' if unix else 'TCP'}, {what}",
                asked=None if unix else self.asked(OF_RAW, margin=0.15),
            )  # fmt: skip
        )

    def hooked_compile(self):
        """The same train step for four devices, its collectives XLA's or ours: CPU of worker and compile child."""
        shape = {**TINY, "batch": 4} if self.quick else {"layers": 2, "width": 256, "batch": 8, "sequence": 32}
        which = {"kind": "data parallel", **shape}
        spent = {}
        with self.two_and_one(4, "--cache_mode", "off") as (two, one):
            for pair in range(-1, self.pairs):
                for side in (two, one)[:: 1 if pair % 2 else -1]:
                    before = side.server_cpu()
                    side.run("compiles", which, {"first": pair + 1, "count": 1})
                    after = side.server_cpu()
                    cpu = sum(after[role] - before.get(role, 0) for role in ("worker", "compile-child"))
                    spent.setdefault(side.name, []).append(cpu)
        # The first of each has warmed up.
        ours, other = (spent[name][1:] for name in ("waystation", "one worker"))
        self.figures.append(
            figures.figure(
                "compile for 2 workers, CPU", "s", ours, other, against="for one worker", lower_is_better=True,
                asked=self.asked(HOOKED_FACTOR, margin=0.10, at_least=False),
            )  # fmt: skip
        )
