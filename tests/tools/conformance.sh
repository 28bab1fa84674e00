#!/usr/bin/env bash
# JAX's own tests against a Waystation server with 8 devices: conformance.sh BINARY JAX_SRC HARNESS SET JAX_VERSION
#
# JAX_SRC is a JAX source tree whose tests/ folder is that of the commit the harness names; HARNESS the folder with
# run_conformance.py, its sets and its baseline. Neither is part of this project: both are copied below target/conformance.
# The baseline is of JAX 0.11.1. For another version the same ids are run natively first, and only those that pass there count.
set -euo pipefail
cd "$(dirname "$0")/../.."
binary=$1 source=$2 harness=$3 set=$4 version=$5
root=$PWD

if [ -z "$source" ] || [ ! -f "$source/tests/array_test.py" ]; then
    echo "make conformance: JAX_SRC names no JAX source tree ('$source' has no tests/array_test.py); give JAX_SRC=DIR" >&2
    exit 2
fi
if [ ! -f "$harness/run_conformance.py" ]; then
    echo "make conformance: no harness in '$harness'; give HARNESS=DIR, the folder with run_conformance.py" >&2
    exit 2
fi
python=$(requirements/find_python.sh 3.12 3.13) || { echo "make conformance: it needs Python 3.12 or 3.13" >&2; exit 2; }

folder=$root/target/conformance/$version
stamp="$python $(cat "$harness/requirements.lock" | sha256sum) $version"
if [ "$(cat "$folder/.stamp" 2>/dev/null)" != "$stamp" ]; then
    rm -rf "$folder"
    mkdir -p "$folder"
    cp -r "$harness/." "$folder/"
    chmod -R u+w "$folder"
    sed -i "s/^\(jax\|jaxlib\)==.*/\1==$version/" "$folder/requirements.lock"
    "$folder/prepare.sh" "$(realpath "$source")" "$python"
    echo "$stamp" > "$folder/.stamp"
fi

cd "$folder"
run=("$folder/venv/bin/python" run_conformance.py --set "$set")
judge=()
if [ "$version" != 0.11.1 ]; then
    "${run[@]}" --native --out "$folder/native-$set" > "native-$set.log" || true
    tail -n 3 "native-$set.log"
    judge=(--native "$folder/native-$set/results.json")
fi
# The plugin and the LAPACK library come from this project's own environment.
WAYSTATION_PYTHON=$root/.venv/bin/python "$root/$binary" run --devices_per_worker 8 -- \
    env -u WAYSTATION_PYTHON sh -c "exec \"\$0\" \"\$@\" --target \$JAX_BACKEND_TARGET --out '$folder/target-$set'" "${run[@]}" || true
"$folder/venv/bin/python" "$root/tests/tools/judge_conformance.py" --harness "$folder" "${judge[@]}" "$folder/target-$set/results.json"
