#!/usr/bin/env bash
# Runs the client programs of tests/python/clients against the release binary with other JAX versions: smoke.sh 0.8.3 0.9.2 ...
# Then looks at which programs of that JAX and of .venv's the compile cache takes for the same.
# Each version has a virtual environment of its own (.venv-jax<version>), from the pinned file requirements/jax<version>.txt;
# 0.10.2 is the one of the second Python, .venv311. Ends in a line a version; exit status 0 only if all passed.
set -uo pipefail
cd "$(dirname "$0")/../.."

failed=0 summary=()
for version in "$@"; do
    printf '\n==== JAX %s\n' "$version"
    start=$SECONDS
    if [ "$version" = 0.10.2 ]; then
        venv=.venv311
        requirements/make_venv.sh $venv 3.11
    else
        pins=jax${version//./}.txt venv=.venv-jax$version
        if [ ! -f "requirements/$pins" ]; then
            summary+=("JAX $version: FAILED, there is no requirements/$pins") failed=1
            continue
        fi
        PINS=$pins requirements/make_venv.sh "$venv" 3.13 3.12 3.11
    fi && $venv/bin/python -m pytest -q -p no:cacheprovider tests/python/test_clients.py tests/python/test_checkpoints.py &&
        WAYSTATION_OTHER_PYTHON=$PWD/$venv/bin/python .venv/bin/python -m pytest -q -p no:cacheprovider \
            tests/python/test_cache_keys.py -k two_jax
    if [ $? = 0 ]; then result=passed; else result=FAILED failed=1; fi
    summary+=("JAX $version: $result, $((SECONDS - start)) s")
done
printf '\n==== summary\n'
printf '%s\n' "${summary[@]}"
exit $failed
