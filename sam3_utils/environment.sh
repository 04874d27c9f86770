# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by run_demo.sh and run_tests.sh. `use_environment ROOT FILE...` makes ROOT/.venv when it is missing, installs
# the requirement files that are new or have changed, and sets VENV_PYTHON. PYTHON= chooses the interpreter.

fail() { # words of one message
    echo "${0##*/}: error: $*" >&2
    exit 2
}

# "3.11 /usr": version and home of a Python or of what a virtual environment was made from; nothing if it does not start.
describe_python() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2], sys.base_prefix)' 2>/dev/null || true
}

use_environment() {
    local root=$1 venv=$1/.venv found wanted interpreter file stamp
    shift
    VENV_PYTHON="$venv/bin/python"
    found=$(describe_python "$VENV_PYTHON")
    if [ -n "${PYTHON:-}" ] || [ "${found%% *}" != 3.11 ]; then
        interpreter=${PYTHON:-$(command -v python3.11 || command -v python3 || echo python3.11)}
        wanted=$(describe_python "$interpreter")
        [ "${wanted%% *}" = 3.11 ] || fail "Python 3.11 is needed, $interpreter is ${wanted:-no Python};" \
            "install it or name it: PYTHON=/path/to/python3.11 bash ${0##*/}"
        if [ "$found" != "$wanted" ]; then
            "$interpreter" -m venv --clear "$venv" ||
                fail "$interpreter cannot make a virtual environment; on Debian: apt install python3.11-venv"
        fi
    fi
    for file in "$@"; do
        # The stamp is written last: an interrupted installation is taken up again.
        stamp="$venv/$file.cksum"
        if [ "$(cksum <"$root/$file")" != "$(cat "$stamp" 2>/dev/null)" ]; then
            "$VENV_PYTHON" -m pip --version >/dev/null 2>&1 || "$VENV_PYTHON" -m ensurepip >/dev/null 2>&1 ||
                fail "$venv has no pip; delete it, and on Debian: apt install python3.11-venv"
            echo "installing $file into $venv (the first time some minutes, about 7 GB on x86_64)" >&2
            "$VENV_PYTHON" -m pip install --quiet --disable-pip-version-check -r "$root/$file" ||
                fail "pip could not install $file, see above; give the same command again to go on"
            cksum <"$root/$file" >"$stamp"
        fi
    done
}
