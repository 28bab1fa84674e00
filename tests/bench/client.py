"""One side's JAX client: takes commands on stdin, one JSON object a line, and answers each with one on stdout.

The same program runs on every side; its environment says against what (see sides.py). It stays up over the whole bench, so
that no figure holds the start of a process or a first compile that the figure does not name.
"""

import json
import os
import sys
import time

import parts

def main():
    # Whatever else writes to stdout must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    if os.environ.get("JAX_PLATFORMS") == "proxy":
        import pathwaysutils

        pathwaysutils.initialize()
    import jax

    device = jax.devices()[0]
    hello = {"platform": device.platform, "runtime": getattr(device.client, "runtime_type", ""), "jax": jax.__version__}
    print(json.dumps(hello), file=answers)
    known = {}
    for line in sys.stdin:
        command = json.loads(line)
        part, options = command["part"], command.get("options", {})
        setup = json.dumps([part, command.get("setup", {})])
        try:
            if setup not in known:
                known[setup] = parts.PARTS[part](**command.get("setup", {}))
            answer = measured(known[setup], options)
        except Exception as error:  # the bench tells it and goes on with the other parts
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


def measured(leg, options):
    """Runs one leg; adds the CPU seconds that this process spent on it."""
    before, before_here = time.process_time(), time.thread_time()
    answer = leg(**options)
    answer["cpu_seconds"] = time.process_time() - before
    answer["python_thread_cpu_seconds"] = time.thread_time() - before_here
    return answer


if __name__ == "__main__":
    main()
