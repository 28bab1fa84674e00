#!/bin/sh
# Prints the path of the newest Python of the wanted versions: find_python.sh 3.13 3.12 3.11
# Looks on PATH, then under pyenv. A candidate counts only if it starts (a pyenv shim of a version that is not
# switched on does not), says that version itself, and can make a virtual environment with pip in it.
# Exit 1, with nothing on stdout, when none is there.
set -u

usable() {
    [ -x "$1" ] && [ "$("$1" -c 'import ensurepip, sys, venv; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$2" ]
}

for version in "$@"; do
    saved_ifs=$IFS
    IFS=:
    for folder in $PATH; do
        if usable "$folder/python$version" "$version"; then
            "$folder/python$version" -c 'import sys; print(sys.executable)'
            exit 0
        fi
    done
    IFS=$saved_ifs
    for root in "${PYENV_ROOT:-}" "$HOME/.pyenv" /root/.pyenv /opt/pyenv; do
        [ -n "$root" ] || continue
        # The newest patch release of this version first.
        for python in $(ls -d "$root/versions/$version".*/bin/python"$version" 2>/dev/null | sort -rV); do
            if usable "$python" "$version"; then
                "$python" -c 'import sys; print(sys.executable)'
                exit 0
            fi
        done
    done
done
exit 1
