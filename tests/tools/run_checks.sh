#!/usr/bin/env bash
# What `make test` runs. Every check runs even if one before it failed (but the Python tests need the binary), so that
# one run tells everything; the summary at the end says what passed, and the exit status is 0 only if all did.
set -uo pipefail
cd "$(dirname "$0")/../.."

names=() results=() seconds=()
failed=0

record() { # NAME RESULT SECONDS
    names+=("$1") results+=("$2") seconds+=("$3")
}

check() { # NAME COMMAND...
    local name=$1 start=$SECONDS
    shift
    printf '\n==== %s\n' "$name"
    if "$@"; then
        record "$name" passed $((SECONDS - start))
    else
        record "$name" FAILED $((SECONDS - start))
        failed=1
        return 1
    fi
}

# A check beside the others, whose output comes when it is waited for.
beside_name="" beside_pid="" beside_output=""
trap '[ -z "$beside_pid" ] || kill "$beside_pid" 2>/dev/null; rm -rf "$beside_output"' EXIT
start_beside() { # NAME COMMAND...
    beside_name=$1 beside_output=$(mktemp -d)
    shift
    (
        # Of its own: bash lets what runs in the background ignore Ctrl-C.
        trap 'kill $!' TERM
        "$@" >"$beside_output/log" 2>&1 &
        wait $!
        status=$?
        echo "$SECONDS" >"$beside_output/end"
        exit $status
    ) &
    beside_pid=$!
    beside_since=$SECONDS
}

finish_beside() {
    local result=passed
    wait "$beside_pid" || { result=FAILED failed=1; }
    beside_pid=""
    printf '\n==== %s\n' "$beside_name"
    cat "$beside_output/log"
    record "$beside_name" $result $(($(cat "$beside_output/end") - beside_since))
}

skip() { # NAME REASON
    record "$1" "not run: $2" 0
}

if ! command -v cargo >/dev/null; then
    echo "make test: no cargo on PATH: install Rust (stable, 1.88 or newer) from https://rustup.rs" >&2
    exit 1
fi

check "python environment (.venv)" requirements/make_venv.sh .venv 3.13 3.12 3.11
venv=$?

# The second Python: absent is a fact that the summary tells, broken is a failure.
second=0
if requirements/find_python.sh 3.11 >/dev/null; then
    check "second python environment (.venv311)" requirements/make_venv.sh .venv311 3.11
    second=$?
    [ $second = 0 ] && export WAYSTATION_TEST_VENVS="$PWD/.venv:$PWD/.venv311"
else
    skip "second python environment (.venv311)" "no Python 3.11 on PATH or under pyenv"
    second=1
    export WAYSTATION_TEST_VENVS="$PWD/.venv"
fi
# Where the Rust tests and the binary look for PJRT plugins.
export WAYSTATION_PYTHON="$PWD/.venv/bin/python" WAYSTATION_TEST_PYTHON="$PWD/.venv/bin/python"

check "format" cargo fmt --all --check
check "lints" cargo clippy --workspace --all-targets --locked --quiet -- -D warnings
RUSTDOCFLAGS="-D warnings" check "documentation" cargo doc --workspace --no-deps --locked --quiet
check "rust tests" cargo test --workspace --locked --no-fail-fast --quiet

end_to_end_name() { # VENV
    "$1/bin/python" -c 'import sys, jax; print("end to end, Python %d.%d, JAX %s" % (*sys.version_info[:2], jax.__version__))'
}

if check "release binaries" cargo build --release --locked --bin waystation --bin null_server --bin load --bin cache_bench --bin checkpoint_bench --bin gang_bench --bin loopback_bench --bin gcs_double && [ $venv = 0 ]; then
    # Both at once: they wait more than they compute, and each has clusters and folders of its own.
    suite=(-m pytest -q -p no:cacheprovider --durations=25 tests/python)
    [ $second = 0 ] && start_beside "$(end_to_end_name .venv311)" .venv311/bin/python "${suite[@]}"
    check "$(end_to_end_name .venv)" .venv/bin/python "${suite[@]}"
    if [ $second = 0 ]; then
        finish_beside
    else
        skip "end to end, second Python" "no second environment"
    fi
else
    skip "end to end" "it needs the release binary and .venv"
fi

printf '\n==== summary\n'
for i in "${!names[@]}"; do
    printf '%-45s %-8s %5d s\n' "${names[$i]}" "${results[$i]}" "${seconds[$i]}"
done
if [ $failed = 0 ]; then
    printf 'all checks that ran passed, in %d min\n' $((SECONDS / 60))
else
    printf 'at least one check FAILED, see above\n'
fi
exit $failed
