"""`make bench`: Waystation against JAX without it, on this machine, in one run.

The sides take turns, so that what else the machine does falls on both. A figure is the median of the ratios of pairs; where
the quartiles lie further apart than the margin, it is reported as not measured. "Native" is JAX's own CPU backend, whose XLA
is another build than the plugin's.

Not measured here yet: JAX with the same plugin loaded into its process, the same client against a server that does nothing,
and a warm compile against the plugin's own load.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import psutil

SIDE = pathlib.Path(__file__).with_name("side.py")
ROOT = pathlib.Path(__file__).resolve().parents[2]

# (part, calls in a turn, what one call is, the margin on the quartiles' distance, the ratio wanted)
PARTS = [
    ("train_step", 25, "train step", 0.15, 0.90),
    ("dispatch", 2000, "call of a tiny program", 0.25, None),
    ("put", 2, "device_put of 64 MiB", 0.25, None),
    ("fetch", 2, "fetch of 64 MiB", 0.25, None),
]
MEGABYTES = 64


class Side:
    """A JAX process and the servers behind it, if any."""

    def __init__(self, name, command, environment):
        self.name = name
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.pid = json.loads(self.process.stdout.readline())["pid"]

    def run(self, part, count):
        self.process.stdin.write(f"{part} {count}\n")
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the {self.name} side ended with {self.process.wait()}")
        return json.loads(line)["seconds"]

    def cpu_seconds(self):
        """CPU seconds so far, by role."""
        seconds = {}
        for process in [psutil.Process(self.pid), *psutil.Process(self.process.pid).children(recursive=True)]:
            times = process.cpu_times()
            words = process.cmdline()
            role = "client" if process.pid == self.pid else words[1] if len(words) > 1 else words[0]
            seconds[role] = seconds.get(role, 0) + times.user + times.system
        return seconds

    def stop(self):
        self.process.stdin.close()
        self.process.wait(30)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=pathlib.Path, default=ROOT / "target/release/waystation")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--part", choices=[part[0] for part in PARTS], action="append")
    options = parser.parse_args()

    clean = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "WAYSTATION_"))}
    # More threads than devices: with fewer, XLA's collectives on CPU can wait for each other for ever.
    clean["NPROC"] = "16"
    python = [sys.executable, str(SIDE)]
    native = {**clean, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    served = [str(options.binary.resolve()), "run", "--workers=1", "--devices_per_worker=4", "--", *python]
    sides = [Side("waystation", served, clean), Side("native", python, native)]

    print(f"load average {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores, {options.pairs} pairs")
    print(f"{'':24} {'native':>12} {'waystation':>12} {'speed':>7} {'quartiles':>13}  {'CPU µs a call (waystation)'}")
    results = []
    for part, count, call, margin, wanted in PARTS:
        if options.part and part not in options.part:
            continue
        for side in sides:
            side.run(part, 1)  # compiles, warms up
        cpu_before = sides[0].cpu_seconds()
        seconds = {side.name: [] for side in sides}
        for turn in range(options.pairs):
            for side in sides if turn % 2 else reversed(sides):
                seconds[side.name].append(side.run(part, count) / count)
        cpu_after = sides[0].cpu_seconds()
        ratios = sorted(n / w for n, w in zip(seconds["native"], seconds["waystation"]))
        low, median, high = statistics.quantiles(ratios, n=4)
        calls = count * options.pairs
        cpu = {role: 1e6 * (cpu_after[role] - cpu_before.get(role, 0)) / calls for role in cpu_after}
        measured = high - low <= margin * max(median, 1e-9)
        result = {
            "part": part,
            "native_seconds": statistics.median(seconds["native"]),
            "waystation_seconds": statistics.median(seconds["waystation"]),
            "ratio": median,
            "quartiles": [low, high],
            "measured": measured,
            "cpu_us": cpu,
            "wanted": wanted,
        }
        results.append(result)
        spent = ", ".join(f"{role} {value:.0f}" for role, value in cpu.items() if role in ("client", "proxy", "worker"))
        speed = f"{median:6.1%}" if measured else "not measured"
        print(
            f"{call:24} {1e3 * result['native_seconds']:9.3f} ms {1e3 * result['waystation_seconds']:9.3f} ms {speed:>7} "
            f"{low:6.2f}-{high:5.2f}  {spent}" + (f"  (wanted {wanted:.0%})" if wanted else "")
        )
        if part in ("put", "fetch"):
            print(f"{'':24} {MEGABYTES / result['native_seconds']:7.0f} MiB/s {MEGABYTES / result['waystation_seconds']:7.0f} MiB/s")
    for side in sides:
        side.stop()
    folder = ROOT / "bench-results"
    folder.mkdir(exist_ok=True)
    file = folder / time.strftime("%Y-%m-%dT%H-%M-%S.json")
    file.write_text(json.dumps({"load": os.getloadavg(), "cores": os.cpu_count(), "results": results}, indent=1))
    print(f"written to {file.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
