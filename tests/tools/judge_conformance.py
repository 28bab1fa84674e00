"""Says which part of JAX's tests passes: of the ids that pass natively and use nothing that jaxlib's proxy client refuses itself.

The native results are the harness's baseline (JAX 0.11.1) or, with --native, a native run of another version. Ids that fail
because the client process has no CPU backend of its own, or asks for what only a local array has, are counted apart as well: no
server can serve them with JAX_PLATFORMS=proxy alone. Exit status 0 when 99 % of the ids that count pass.
"""

import argparse
import json
import pathlib
import sys

# The harness's tags of what jaxlib's proxy client refuses by itself.
CLIENT_LIMITS = {
    "ffi_python_callback", "dlpack", "unsafe_buffer_pointer", "executable_serialization", "profiler", "client_backend_cpu",
    "client_partitioner", "client_runtime_executable", "colocated_python",
}  # fmt: skip
# What the client says before, or instead of, sending a request.
IN_THE_CLIENT = (
    "Unknown backend cpu",
    "failed to find a local CPU device",
    "Only local arrays are supported",
    "implemented for a PjRt-compatible backend only",
    "Unsupported host callback type",
)
ASKED = 0.99


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--harness", type=pathlib.Path, required=True)
    parser.add_argument("--native", type=pathlib.Path)
    parser.add_argument("results", type=pathlib.Path)
    args = parser.parse_args()
    tests = json.loads((args.harness / "baseline_jax.json").read_text())["tests"]
    results = json.loads(args.results.read_text())
    native = json.loads(args.native.read_text()) if args.native else None

    def passed(found):
        return found["outcome"] in ("passed", "xfailed")

    counted = [
        name
        for name in results
        if not CLIENT_LIMITS & set(tests.get(name, {}).get("tags", []))
        and (native is None or (name in native and passed(native[name])))
    ]
    failed = [name for name in counted if not passed(results[name])]
    client = [name for name in failed if any(text in results[name].get("error", "") for text in IN_THE_CLIENT)]
    for name in failed:
        lines = [line for line in results[name].get("error", "").splitlines() if line.strip()]
        where = "in the client" if name in client else "server"
        print(f"{where:13}  {name}: {lines[0][:160] if lines else results[name]['outcome']}")
    good = len(counted) - len(failed)
    share = good / len(counted) if counted else 0.0
    print(f"{good} of {len(counted)} ids that pass natively and carry no client-limit tag pass ({share:.2%})")
    served = len(counted) - len(client)
    if served:
        print(f"{good} of {served} ({good / served:.2%}) without the {len(client)} that fail inside the client")
    return 0 if share >= ASKED else 1


if __name__ == "__main__":
    sys.exit(main())
