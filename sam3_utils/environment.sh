# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
# Sourced by run_demo.sh and run_tests.sh. `use_environment ROOT FILE...` makes ROOT/.venv when it is missing, installs
# the requirement files that are new or have changed, and sets VENV_PYTHON. PYTHON= chooses the interpreter.

fail() { # words of one message
    echo "${0##*/}: error: $*" >&2
    exit 2
}

use_environment() {
    local venv=$1/.venv root=$1 interpreter version base file stamp
    shift
    VENV_PYTHON="$venv/bin/python"
    if [ -n "${PYTHON:-}" ] || [ ! -x "$VENV_PYTHON" ] || [ ! -f "$venv/base" ]; then
        interpreter=${PYTHON:-$(command -v python3.11 || command -v python3 || echo python3.11)}
        version=$("$interpreter" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || version="no Python"
        [ "$version" = 3.11 ] || fail "Python 3.11 is needed, $interpreter is $version;" \
            "install it or name it: PYTHON=/path/to/python3.11 bash ${0##*/}"
        base=$("$interpreter" -c 'import sys; print(sys.base_prefix)')
        if [ "$base" != "$(cat "$venv/base" 2>/dev/null)" ]; then
            "$interpreter" -m venv --clear "$venv" && "$VENV_PYTHON" -m pip --version >/dev/null ||
                fail "$interpreter cannot make a virtual environment with pip; on Debian: apt install python3.11-venv"
            echo "$base" >"$venv/base"
        fi
    fi
    for file in "$@"; do
        # The stamp is written last: an interrupted installation is taken up again.
        stamp="$venv/$file.cksum"
        if [ "$(cksum <"$root/$file")" != "$(cat "$stamp" 2>/dev/null)" ]; then
            echo "installing $file into $venv" >&2
            "$VENV_PYTHON" -m pip install --quiet --disable-pip-version-check -r "$root/$file" ||
                fail "pip could not install $file, see above; give the same command again to go on"
            cksum <"$root/$file" >"$stamp"
        fi
    done
}
