"""`make bench`: Waystation's speed against native JAX and against the null server, on this machine, in one run.

Sides alternate: every pair of legs is taken one directly after the other, in alternating order, against processes that stay
up. A figure is the median of the paired ratios; quartiles further apart than the margin make it "not measured". The table
goes to stdout, everything to a JSON file.

  train     steps of about 20 and of about 2 ms, against the slower of JAX's own CPU backend and JAX with the worker's plugin
            in process
  dispatch  calls of a program that does nothing, against the null server (and native, shown), and the CPU seconds by process
            that a call costs beyond XLA's
  latency   calls that are waited for, against the null server, and where the time goes
  transfer  device_put and fetch, whole and cut over 8 devices, against the null server
  memory    what proxy and worker grow by while 10 GB pass
  gang      what a launch costs the proxy by the number of workers that take part, which compute nothing
  clients   16 small clients at once, and a quiet one among 15 that flood
  warm      programs from the bucket on a fresh server, against the plugin's own deserialize and JAX's persistent cache
  hits      programs from a worker's memory, against the plugin's load
  keys      the keys of programs, against what they save
  flights   one program asked for by many at once, from four workers
  cold      the CPU of a compile with the cache on, against it off
  checkpoint         saves and restores of 1 GB, against Orbax on native JAX, zstd on all cores, and the disk
  checkpoint_memory  what worker, proxy and Python grow by in one, and what each of two workers reads
  objects            2,000 small arrays on a store with 30 ms of latency, against Orbax on native JAX
  spanning  train steps, all-reduce, arrays that move and compiles over two workers, against one worker and raw TCP
"""

import argparse
import base64
import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

import figures
from cache import TINY, CacheParts
from checkpoint import CheckpointParts
from figures import Asked, number
from sides import Sides
from spanning import SpanningParts

ROOT = pathlib.Path(__file__).resolve().parents[2]
PARTS = (
    "train", "dispatch", "latency", "transfer", "memory", "gang", "clients", "warm", "hits", "keys", "flights", "cold",
    "checkpoint", "checkpoint_memory", "objects", "spanning",
)  # fmt: skip
MIB = 1 << 20
# CPU of proxy and worker that an execution may cost beyond XLA's own.
EXECUTE_CPU_US = 60
# What a waited-for call may take longer than against the null server.
BEYOND_NULL_US = {"block": 150, "fetch": 250}
# What the proxy may grow by beyond its bound for host buffers, and the worker beyond its arrays.
GROWTH_BYTES = 64 * MIB
CLIENTS = 16
# CPU of the proxy that a launch may cost for each worker more.
WORKER_CPU_US = 15


class Bench(CacheParts, CheckpointParts, SpanningParts):
    def __init__(self, sides, pairs, quick, plugin, checkpoint_bytes):
        self.sides = sides
        self.pairs = pairs
        self.quick = quick
        self.plugin_path = plugin
        self.checkpoint_bytes = checkpoint_bytes
        self.figures = []
        self.cpu = []
        self.notes = []
        self.loads = {}
        self.open = {}

    def side(self, name):
        """The side of that name that stays up for the whole run."""
        if name not in self.open:
            make = getattr(self.sides, name)
            self.open[name] = make(self.plugin_of(self.side("waystation"))) if name == "plugin" else make()
        return self.open[name]

    def close(self):
        for side in self.open.values():
            side.stop()

    def asked(self, bound, **more):
        """A quick run answers to nobody."""
        return None if self.quick else Asked(bound, **more)

    def legs(self, part, sides, setup, options):
        """`pairs` legs on each side, one after the other, the order turned by one each time."""
        for side in sides:  # set-up and the first leg, which warms up, count for nothing
            side.run(part, setup, options)
        taken = {side.name: [] for side in sides}
        for pair in range(self.pairs):
            turn = pair % len(sides)
            for side in sides[turn:] + sides[:turn]:
                taken[side.name].append(side.run(part, setup, options))
        return taken

    def compare(self, name, unit, key, taken, other, scale=1.0, **more):
        values = {side: [leg[key] * scale for leg in taken[side]] for side in ("waystation", other)}
        self.figures.append(figures.figure(name, unit, values["waystation"], values[other], against=other, **more))

    def count_cpu(self, part, taken, per, unit):
        """CPU by process in microseconds a unit of work, over all legs of a side together."""
        found = {}
        for side, legs in taken.items():
            work = sum(leg[per] for leg in legs)
            seconds = {}
            for leg in legs:
                for process, spent in leg["cpu"].items():
                    seconds[process] = seconds.get(process, 0.0) + spent
            found[side] = {
                process: {"seconds": spent, "us_per_unit": spent / work * 1e6} for process, spent in seconds.items()
            }
            self.cpu.append({"part": part, "side": side, "unit": unit, "work": work, "processes": found[side]})
        return found

    def plugin_of(self, side):
        """The plugin that the worker has loaded."""
        if self.plugin_path is None:
            workers = side.run("status")["status"]["workers"]
            workers = list(workers.values()) if isinstance(workers, dict) else workers
            self.plugin_path = next(found for found in map(plugin_path, workers) if found)
        return self.plugin_path

    def train(self):
        for milliseconds, bound in ((20, 0.95), (2, 0.70)):
            self.train_steps(milliseconds, bound)

    def train_steps(self, milliseconds, bound):
        native, ours, plugin = map(self.side, ("native", "waystation", "plugin"))
        width = 128 if milliseconds > 5 else 32
        shape, steps = {**TINY, "width": 32, "batch": 4}, 20
        if not self.quick:
            shape, steps = {"layers": 2, "width": width, "batch": 4, "sequence": 64 if width == 128 else 16}, 1500 // milliseconds
            step = min(1000 / native.run("train", shape, {"steps": 20})["steps_per_second"] for _ in range(4))
            shape["batch"] = max(1, round(shape["batch"] * milliseconds / step))
        taken = self.legs("train", [native, ours, plugin], shape, {"steps": steps})
        rate = {side: statistics.median(leg["steps_per_second"] for leg in taken[side]) for side in ("native", "plugin")}
        slower = min(rate, key=rate.get)
        for side in ("native", "plugin"):
            asked = self.asked(bound, margin=0.10) if side == slower else None
            self.compare(f"train steps, {milliseconds} ms", "steps/s", "steps_per_second", taken, side, asked=asked)
        self.count_cpu(f"train, {milliseconds} ms", taken, "steps", "step")
        ours_loss, plugin_loss = taken["waystation"][-1]["loss"], taken["plugin"][-1]["loss"]
        self.notes += [
            f"train step of {milliseconds} ms: batch {shape['batch']}, {taken['native'][0]['arrays']} arrays of state; native "
            f"{1000 / rate['native']:.1f} ms, plugin in process {1000 / rate['plugin']:.1f} ms; the slower is '{slower}'",
            f"loss at the end: {ours_loss!r} on Waystation, {plugin_loss!r} with the same plugin in process",
        ]

    def dispatch(self):
        sides = [self.side(name) for name in ("waystation", "null", "native")]
        plugin = self.side("plugin")
        taken = self.legs("dispatch", [*sides, plugin], {}, {"calls": 100} if self.quick else {})
        for other in ("null", "native"):
            for key in ("enqueued", "sustained", "chained"):
                asked = self.asked(0.70, margin=0.25) if other == "null" else None
                self.compare(f"calls {key}", "calls/s", f"{key}_per_second", taken, other, asked=asked)
        self.count_cpu("dispatch", taken, "calls", "call")

        def spent(leg, *processes):
            return sum(leg["cpu"].get(process, 0.0) for process in processes) / leg["calls"] * 1e6

        # In process, all but the Python thread's CPU is XLA's.
        xla = [max(0.0, leg["cpu"]["client"] - leg["python_thread_cpu_seconds"]) / leg["calls"] * 1e6 for leg in taken["plugin"]]
        beyond = [spent(leg, "proxy", "worker") - of_xla for leg, of_xla in zip(taken["waystation"], xla)]
        self.figures.append(
            figures.figure(
                "CPU of proxy and worker a call, beyond XLA", "us", beyond, [EXECUTE_CPU_US] * len(beyond),
                against=f"{EXECUTE_CPU_US} us", lower_is_better=True, asked=self.asked(1.0, margin=0.33, at_least=False),
            )  # fmt: skip
        )

    def latency(self):
        ours, null = self.side("waystation"), self.side("null")
        for wait, allowed in BEYOND_NULL_US.items():
            options = {"wait": wait, **({"calls": 20} if self.quick else {})}
            before = self.status(ours)
            taken = self.legs("latency", [ours, null], {}, options)
            self.hops(wait, before, self.status(ours), taken)
            what = "call and block" if wait == "block" else "call and np.asarray"
            self.compare(f"{what}, p50", "us", "p50_us", taken, "null", lower_is_better=True)
            beyond = [mine["p50_us"] - floor["p50_us"] for mine, floor in zip(taken["waystation"], taken["null"])]
            self.figures.append(
                figures.figure(
                    f"{what}, p50 beyond null", "us", beyond, [allowed] * len(beyond), against=f"{allowed} us",
                    lower_is_better=True, asked=self.asked(1.0, margin=0.33, at_least=False),
                )  # fmt: skip
            )

    def hops(self, wait, before, after, taken):
        """Where a waited-for call's mean time goes. The client's library and the wire are what the null server shows."""
        block = wait == "block"
        kind = "waits" if block else "read"
        count = after[kind]["count"] - before[kind]["count"]
        answered = after["totals"]["reads"] - before["totals"]["reads"]
        if not count or not (block or answered):
            raise RuntimeError(f"the server counted no {kind} requests")
        proxy = (after[kind]["nanos"] - before[kind]["nanos"]) / count / 1e3
        link = (after[f"{kind}_link"]["nanos"] - before[f"{kind}_link"]["nanos"]) / count / 1e3
        if block:
            # The worker tells unasked: what of the execution is over when the client asks costs nothing.
            beyond = f"link and worker with XLA, as far as not over when the client asks, {link:.0f} us"
        else:
            worker = (after["totals"]["read_seconds"] - before["totals"]["read_seconds"]) / answered * 1e6
            beyond = f"link to the worker and back {link - worker:.0f} us, worker with XLA {worker:.0f} us"
        seen = statistics.fmean(leg["mean_us"] for leg in taken["waystation"])
        floor = statistics.fmean(leg["mean_us"] for leg in taken["null"])
        total = floor + proxy
        self.notes.append(
            f"{'call and block' if block else 'call and np.asarray'}, mean by hop: client, its wire and the null server "
            f"{floor:.0f} us, proxy {proxy - link:.0f} us, {beyond}; sum {total:.0f} us of {seen:.0f} us seen by the client "
            f"({total / seen:.0%})"
        )

    def status(self, side):
        return side.run("status")["status"]

    def transfer(self):
        sizes = ((MIB, 3),) if self.quick else ((1 << 10, 100), (MIB, 20), (64 * MIB, 3), (1024 * MIB, 1))
        for shards in (1, 8):
            # An own pair of servers, which is gone before the next: their memory is not the next one's matter.
            with self.sides.waystation(devices=shards) as ours, self.sides.null(devices=shards) as null:
                for size, repeats in sizes:
                    self.transfers(ours, null, size, shards, repeats)

    def transfers(self, ours, null, size, shards, repeats):
        pairs = self.pairs
        if size > 512 * MIB:
            self.pairs = min(pairs, 4)  # minutes otherwise
        taken = self.legs("transfer", [ours, null], {"size_bytes": size, "shards": shards}, {"repeats": repeats})
        self.pairs = pairs
        for key, what, bound in (("put", "device_put", 0.75), ("fetched", "fetch", 0.90)):
            asked = self.asked(bound, margin=0.25) if size >= 64 * MIB else None
            name = f"{what} {size_name(size)}" + (f" over {shards}" if shards > 1 else "")
            self.compare(name, "MB/s", f"{key}_bytes_per_second", taken, "null", scale=1e-6, asked=asked)
        self.count_cpu(f"transfer {size_name(size)} over {shards}", taken, "moved_megabytes", "MB")

    def memory(self):
        """10 GB there and back, 64 MB at a time, while resident memory is looked at."""
        size, passes = (MIB, 4) if self.quick else (64 * MIB, 160)
        bound = 256 * MIB
        with self.sides.waystation("--host_buffer_memory", str(bound)) as ours:
            ours.run("transfer", {"size_bytes": size}, {"repeats": 1})
            before, most = ours.resident(), {}
            ours.begin("transfer", {"size_bytes": size}, {"repeats": passes})
            while not ours.has_answered():
                for role, resident in ours.resident().items():
                    most[role] = max(most.get(role, 0), resident)
                time.sleep(0.02)
            ours.end()
        allowed = {"proxy": bound + GROWTH_BYTES, "worker": 2 * size + GROWTH_BYTES}
        for role, limit in allowed.items():
            grown = max(0, most[role] - before[role])
            self.figures.append(
                figures.figure(
                    f"growth of the {role} while 10 GB pass", "MiB", [grown / MIB], [limit / MIB], lower_is_better=True,
                    against="bound" if role == "proxy" else "arrays + 64 MiB", asked=self.asked(1.0, margin=1, at_least=False),
                )  # fmt: skip
            )

    def gang(self):
        """The slope of the proxy's CPU over the number of workers, by least squares."""
        command = [str(self.sides.gang_bench), "--binary", str(self.sides.binary)]
        command += ["--workers", "1,4", "--parts", "400"] if self.quick else []
        slopes, fixed = [], []
        for _ in range(self.pairs):
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            if done.returncode != 0:
                raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr[-500:]}")
            runs = json.loads(done.stdout)
            line = statistics.linear_regression([run["workers"] for run in runs], [run["proxy_cpu_us"] for run in runs])
            slopes.append(line.slope)
            fixed.append(line.intercept)
        self.figures.append(
            figures.figure(
                "CPU of the proxy a launch, each worker more", "us", slopes, [WORKER_CPU_US] * len(slopes),
                against=f"{WORKER_CPU_US} us", lower_is_better=True, asked=self.asked(1.0, margin=0.33, at_least=False),
            )  # fmt: skip
        )
        self.notes.append(
            f"gang: {statistics.median(fixed):.0f} us a launch beside; last run: "
            + "; ".join(
                f"{run['workers']} workers {run['proxy_cpu_us']:.0f} us of CPU, {run['launches_per_second']:.0f} launches/s, "
                f"{run['message_bytes']} bytes to each"
                for run in runs
            )
        )

    def clients(self):
        """Many sessions at once. Small clients without Python make them: that many JAX processes would share out the machine's
        cores among themselves and leave the server what remains."""
        count, seconds = (3, 1) if self.quick else (CLIENTS, 2)
        with (
            self.sides.waystation(transport="tcp") as ours,
            self.sides.null(transport="tcp") as null,
            tempfile.NamedTemporaryFile(prefix="waystation-bench-") as program,
        ):
            program.write(base64.b64decode(ours.run("program")["program_base64"]))
            program.flush()
            runs = {"waystation": [], "null": []}
            for _ in range(self.pairs):
                for side in (ours, null):
                    address = side.run("address")["address"]
                    command = [
                        str(self.sides.load), "--address", address, "--clients", str(count), "--seconds", str(seconds),
                        "--program", program.name,
                    ]  # fmt: skip
                    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
                    if done.returncode != 0:
                        raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr[-500:]}")
                    runs[side.name].append(json.loads(done.stdout))

        def column(name, side="waystation"):
            return [float(run[name]) for run in runs[side]]

        def rows(name, unit, key, base, against, asked=None, **more):
            """Ours as asked; and the null server's, which shows what this machine leaves to a server that does nothing."""
            for side, title, bound in (("waystation", name, asked), ("null", f"{name}, null server alone", None)):
                values = column(key, side), column(base, side)
                self.figures.append(figures.figure(title, unit, *values, against=against, asked=bound, **more))

        rows(
            f"{count} clients, calls in all", "calls/s", "all_per_second", "one_per_second", "one client",
            asked=self.asked(1.0, margin=0.33),
        )  # fmt: skip
        rows("a quiet client's p50 among floods", "us", "among_p50_us", "alone_p50_us", "alone", lower_is_better=True)
        rows(
            "a quiet client's p99 among floods", "us", "among_p99_us", "alone_p99_us", "alone", lower_is_better=True,
            asked=self.asked(3.0, margin=3.0, at_least=False),
        )  # fmt: skip

    def take(self, part):
        before = os.getloadavg()
        getattr(self, part)()
        self.loads[part] = {"before": before, "after": os.getloadavg()}


def size_name(size):
    return f"{size >> 30} GB" if size >> 30 else f"{size >> 20} MB" if size >> 20 else f"{size >> 10} KB"


def plugin_path(worker):
    """Found wherever the status page puts a worker's counters."""
    if not isinstance(worker, dict):
        return None
    return worker.get("plugin_path") or next(filter(None, map(plugin_path, worker.values())), None)


def report(bench, errors):
    rows = [
        (
            f["name"],
            f["against"],
            f"{number(f['waystation'])}",
            f"{number(f['other'])}",
            f["unit"],
            f"{f['ratio']:.2f}",
            "{:.2f}..{:.2f}".format(*f["ratio_quartiles"]),
            f["asked"] or "",
            f["verdict"],
        )
        for f in bench.figures
    ]
    headings = ("figure", "against", "waystation", "other", "unit", "ratio", "quartiles", "asked", "")
    print("\n".join(figures.table(rows, headings)))
    rows = [
        (entry["part"], entry["side"], process, f"{spent['seconds']:.2f}", f"{spent['us_per_unit']:.4g}", entry["unit"])
        for entry in bench.cpu
        for process, spent in entry["processes"].items()
    ]
    print("\nCPU by process")
    print("\n".join(figures.table(rows, ("part", "side", "process", "seconds", "us per", "unit"))))
    print()
    for note in bench.notes:
        print(f"* {note}")
    for part, load in bench.loads.items():
        print(f"* load average, {part}: {load['before'][0]:.1f} before, {load['after'][0]:.1f} after, {os.cpu_count()} CPUs")
    for part, error in errors.items():
        print(f"* {part} FAILED: {error}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=pathlib.Path, default=ROOT / "target/release/waystation")
    parser.add_argument("--null-server", type=pathlib.Path, help="default: null_server beside the binary")
    parser.add_argument("--pairs", type=int, default=None, help="default 10; 1 with --quick")
    parser.add_argument("--only", default=",".join(PARTS), help=f"comma-separated, of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="small and few: shows that the bench works, measures nothing")
    parser.add_argument("--transport", choices=("tcp", "unix"), default="tcp", help="of both servers; default tcp")
    parser.add_argument("--plugin", help="PJRT plugin to load in process; default: the worker's own")
    parser.add_argument("--checkpoint-mb", type=int, default=1024, help="MiB of arrays that `checkpoint` saves; default 1024")
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "bench-results")
    args = parser.parse_args()
    binary = args.binary.resolve()
    null_server = (args.null_server or binary.with_name("null_server")).resolve()
    for path, what in ((binary, "make build"), (null_server, "cargo build --release --bin null_server")):
        if not path.is_file():
            parser.error(f"no binary at {path}: run `{what}` first")
    for name in ("load", "cache_bench", "checkpoint_bench", "gang_bench", "loopback_bench", "gcs_double"):
        if not null_server.with_name(name).is_file():
            parser.error(f"no {name} beside {null_server}: run `cargo build --release --bin {name}` first")
    wanted = args.only.split(",")
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")

    args.results.mkdir(parents=True, exist_ok=True)
    # Seconds are enough: nobody benches twice in one.
    taken = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    sides = Sides(binary, null_server, args.results / f"{taken}-logs", args.transport)
    bench = Bench(sides, args.pairs or (1 if args.quick else 10), args.quick, args.plugin, args.checkpoint_mb * MIB)
    errors = {}
    try:
        for part in wanted:
            print(f"... {part}", file=sys.stderr, flush=True)
            try:
                bench.take(part)
            except (RuntimeError, AssertionError, OSError) as error:
                errors[part] = str(error)
    finally:
        bench.close()
    report(bench, errors)
    result = {
        "taken": taken,
        "quick": args.quick,
        "transport": args.transport,
        "pairs": bench.pairs,
        "cpus": os.cpu_count(),
        "machine": platform.platform(),
        "python": platform.python_version(),
        "figures": bench.figures,
        "cpu": bench.cpu,
        "notes": bench.notes,
        "load_average": bench.loads,
        "errors": errors,
    }
    file = args.results / f"{taken}.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nwritten to {file}")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
