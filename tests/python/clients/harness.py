"""A client program is a set of small checks that share one JAX process.

A process has one JAX backend, so the checks run in a process of their own, started by pytest with the environment of a
cluster (or natively, with 8 virtual CPU devices, to show that the checks themselves are right). Each result is one line on
stdout, so that pytest can report every check by its name even if a later one kills the process.
"""

import json
import os
import sys
import time
import traceback
import urllib.request

import jax

MARK = "@@check "

NATIVE = os.environ.get("JAX_PLATFORMS") != "proxy"

if jax.version.__version_info__ < (0, 12):
    # Older JAX does not know the "proxy" platform by itself; pathwaysutils registers it.
    import pathwaysutils

    pathwaysutils.initialize()

# What a pipe takes at once, so that nothing that libraries log comes in between (PIPE_BUF of Linux).
AT_ONCE = 4096

_checks = []


def say(line):
    """Tells what a check came to, in a line of its own; of a long detail, its end."""
    sys.stdout.flush()
    while len(text := f"\n{MARK}{json.dumps(line)}\n".encode()) > AT_ONCE and line["detail"]:
        detail = line["detail"]
        line = {**line, "detail": detail[len(detail) // 8 + 1 :]}
    os.write(sys.stdout.fileno(), text)


class Skip(Exception):
    """Raised by a check that does not apply here."""


def check(function):
    _checks.append(function)
    return function


def server_only(function):
    """Marks a check that asks something of the server that native JAX does not have. Goes below @check."""

    def wrapped():
        if NATIVE:
            raise Skip("native")
        function()

    wrapped.__name__ = function.__name__
    return wrapped


def raises(expected, function, *fragments):
    """Calls the function, which must raise `expected` with all the fragments in its text; gives the text."""
    try:
        function()
    except expected as error:
        text = str(error)
        for fragment in fragments:
            assert fragment in text, f"{fragment!r} is not in {text!r}"
        return text
    raise AssertionError(f"{expected.__name__} was not raised")


def status():
    """What the server's status page says."""
    with urllib.request.urlopen(os.environ["WAYSTATION_STATUS_URL"], timeout=10) as response:
        return json.load(response)


def main():
    """Runs the checks named on the command line, or all."""
    wanted = set(sys.argv[1:])
    failed = 0
    for function in _checks:
        if wanted and function.__name__ not in wanted:
            continue
        start = time.monotonic()
        try:
            function()
            result, detail = "passed", ""
        except Skip as skip:
            result, detail = "skipped", str(skip)
        except BaseException:  # pylint: disable=broad-exception-caught
            result, detail = "failed", traceback.format_exc()
            failed += 1
        say({"name": function.__name__, "result": result, "detail": detail, "seconds": round(time.monotonic() - start, 2)})
    # Not sys.exit: an exception at the interpreter's shutdown must not hide behind a clean status.
    sys.stdout.flush()
    return 1 if failed else 0
