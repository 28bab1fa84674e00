#!/bin/sh
# Makes a virtual environment from the pinned requirement files: make_venv.sh FOLDER VERSION...
# The newest of the VERSIONs that is installed is taken. 3.12 and newer take py312.txt, 3.11 takes py311.txt, unless PINS names
# another file of this folder.
# Does nothing when FOLDER was made by the same interpreter from the same files. Exit 3: no such Python here.
set -eu

here=$(dirname "$0")
folder=$1
shift

if ! python=$("$here/find_python.sh" "$@"); then
    echo "make_venv: no usable Python of version $(echo "$*" | sed 's/ /, /g') on PATH or under pyenv; install one with its venv module, e.g. 'pyenv install $1' (looked for $folder)" >&2
    exit 3
fi
case $("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') in
    3.11) pins=$here/${PINS:-py311.txt} ;;
    *) pins=$here/${PINS:-py312.txt} ;;
esac

wanted="$python $(cat "$pins" "$here/plugins.txt" | sha256sum | cut -d' ' -f1)"
if [ "$(cat "$folder/.stamp" 2>/dev/null)" = "$wanted" ] && [ -x "$folder/bin/python" ]; then
    exit 0
fi

echo "make_venv: $folder from $python and $pins"
rm -rf "$folder"
"$python" -m venv "$folder"
pip="$folder/bin/python -m pip --disable-pip-version-check install --quiet --no-input --require-hashes"
$pip -r "$pins"
# The plugins' own requirements name an older JAX and are not needed to load them.
$pip --no-deps -r "$here/plugins.txt"
echo "$wanted" > "$folder/.stamp"
