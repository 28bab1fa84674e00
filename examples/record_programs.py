"""Records the programs of a job without running it, so that `waystation cache warm` can compile them before its first run.

    target/release/waystation run --devices_per_worker 4 --record_programs=LOCATION --record_only -- \\
        .venv/bin/python examples/record_programs.py examples/train.py
    target/release/waystation cache warm LOCATION --gcs_scratch_location=BUCKET --devices 4

The server then stores each compile request, compiles nothing and refuses to execute. The job's file tells what it compiles:
its function `programs()` gives (name, jitted function, arguments) for each, with `jax.ShapeDtypeStruct`s in place of arrays. A
request is found again only if it is the same, so they need the shapes, types and shardings of the real arguments, and the
function needs the donation and shardings that the job gives it.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import sys
import time
import urllib.request

import pathwaysutils


def load(path):
    """The job's file as a module, not as the program to run."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=pathlib.Path, help="Python file with a function programs()")
    path = parser.parse_args().job.resolve()
    if os.environ.get("JAX_PLATFORMS") != "proxy":
        parser.error("run it as the command of `waystation run --record_programs=LOCATION --record_only`")
    pathwaysutils.initialize()

    failed = []
    for name, jitted, arguments in load(path).programs():
        start = time.monotonic()
        try:
            # The server answers when the request is stored.
            jitted.lower(*arguments).compile()
        except Exception as error:  # whatever is wrong with one program says nothing of the others
            failed.append(name)
            print(f"{name:30} not recorded: {error}", flush=True)
        else:
            print(f"{name:30} recorded in {time.monotonic() - start:.2f} s", flush=True)

    with urllib.request.urlopen(os.environ["WAYSTATION_STATUS_URL"], timeout=10) as response:
        counts = json.load(response).get("recorded")
    if counts is None:
        sys.exit("this server records nothing: give it --record_programs=LOCATION --record_only")
    print(f"{counts['stored']} programs stored, {counts['present']} were stored already")
    if failed:
        sys.exit(f"not recorded: {', '.join(failed)}")


if __name__ == "__main__":
    main()
