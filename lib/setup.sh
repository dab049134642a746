#!/bin/sh
# Makes .venv what pyproject.toml and lib/pins.txt say. Does nothing, and needs no network, when it already is.
# PYTHON=... chooses the interpreter, TORCH=... the torch requirement (for example TORCH=torch==2.11.0).
# CS336_VENV and CS336_PINS: another environment of other versions, for lib/bounds.sh.
set -eu
cd "$(dirname "$0")/.."
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1
venv=${CS336_VENV:-.venv}
pins=${CS336_PINS:-lib/pins.txt}
python=$venv/bin/python
stamp=$venv/cs336-stamp
pinned_torch=$(grep '^torch==' "$pins" || echo torch)  # the newest, where lib/bounds.sh pins nothing

say() { printf 'set-up: %s\n' "$*"; }
die() { printf 'set-up: %s\n' "$*" >&2; exit 1; }

suits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' >/dev/null 2>&1; }
who() { "$1" -c 'import sys; print(sys.version, sys.base_prefix)' 2>/dev/null; }
kept() {  # does .venv stand on a Python that suits, and on the one asked for?
    suits "$python" && { [ -z "${PYTHON:-}" ] || [ "$(who "$python")" = "$(who "$PYTHON")" ]; }
}

# One set-up at a time in a checkout (macOS has no flock: there it is up to the user).
exec 9<"$pins"
if command -v flock >/dev/null 2>&1; then
    flock 9 2>/dev/null || say "this file system has no locks: run one set-up at a time"
fi

gpu=no
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; then gpu=yes; fi

# What the environment depends on; the checkout's own path too, because a moved .venv points to the old place.
wanted="$(cat "$pins" pyproject.toml lib/setup.sh | cksum) ${TORCH:-} $PWD"
if [ -f "$stamp" ] && kept; then
    # A CUDA build serves a node without a GPU as well (a cluster's login node), not the other way round.
    if [ "$(cat "$stamp")" = "$wanted gpu=yes" ] || [ "$(cat "$stamp")" = "$wanted gpu=$gpu" ]; then exit 0; fi
fi

# Where uv is, it makes a new .venv. What it cannot do is done with pip below.
if ! kept && command -v uv >/dev/null 2>&1; then
    say "making $venv with uv"
    build=; [ "$gpu" = yes ] || build=--torch-backend=cpu
    uv venv -q --seed --clear --python "${PYTHON:->=3.11,<3.15}" "$venv" &&
        uv pip install -q --python "$python" $build -c "$pins" "${TORCH:-$pinned_torch}" -e '.[dev,site]' ||
        say "uv could not (reason above): pip goes on"
fi

find_python() {  # a name on the PATH is not enough: version managers leave shims that only fail
    for candidate in ${PYTHON:-python3.12 python3.13 python3.11 python3.14 python3}; do
        if suits "$candidate"; then command -v "$candidate"; return; fi
    done
    return 1
}

if ! kept || ! "$python" -m pip --version >/dev/null 2>&1; then
    base=$(find_python) || die "needs Python 3.11 to 3.14; found ${PYTHON:-python3} =" \
        "$("${PYTHON:-python3}" --version 2>/dev/null || echo none). Install one, or name it: make PYTHON=/path/to/python3.12"
    say "making $venv with $base ($("$base" --version))"
    made() { rm -rf "$venv" && "$base" -m venv "$venv"; }
    made || {  # Debian and Ubuntu keep what makes one in a package of its own
        package=python$("$base" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv
        [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 && say "installing $package" && apt-get update -qq >&2 &&
            DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$package" >&2 && made
    } || die "$base cannot make a virtual environment (reason above): sudo apt-get install $package"
fi
rm -f "$stamp"

install_torch() {
    here=torch==$("$python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null) || here=
    if [ -n "${TORCH:-}" ]; then
        say "installing $TORCH"
        "$python" -m pip install -qq "$TORCH"
    elif [ "${here%+*}" = "$pinned_torch" ] && [ "$gpu $here" != "yes $pinned_torch+cpu" ]; then
        return
    elif [ "$gpu" = yes ] || [ "$(uname -s)" != Linux ]; then
        say "installing $pinned_torch"
        "$python" -m pip install -qq --force-reinstall --no-deps "$pinned_torch"  # what it needs comes with the rest
    else
        # The plain name means a CUDA build of several GB. The CPU build is on PyTorch's own index, which uv knows.
        say "no GPU here: installing the CPU build of $pinned_torch"
        "$python" -m pip install -qq -c "$pins" "$pinned_torch+cpu" 2>/dev/null || {
            "$python" -m pip install -qq uv &&
                "$python" -m uv pip install -q --python "$python" --torch-backend=cpu -c "$pins" "$pinned_torch"
        }
    fi
}
install_torch || die "no build of $pinned_torch for this machine could be installed (reason above)." \
    "To take another one, however large: make TORCH=$pinned_torch"

# A torch that was asked for and is too old: pip would replace it, and say nothing.
[ -z "${TORCH:-}" ] || "$python" lib/cs336_systems/versions.py >/dev/null

say "installing the workbook and what it stands on"
if [ -n "${TORCH:-}" ]; then  # another torch brings its own triton: pin everything but these two
    sed -E '/^(torch|triton)==/d' "$pins" >"$venv/pins.txt"
else
    cp "$pins" "$venv/pins.txt"
fi
"$python" -m pip install -qq -c "$venv/pins.txt" -e '.[dev,site]' || die "pip failed (reason above); make continues where it stopped"
"$python" lib/cs336_systems/versions.py
printf '%s' "$wanted gpu=$gpu" >"$stamp"
say "ready: $("$python" -c 'import sys, torch; print("Python", sys.version.split()[0] + ", torch", torch.__version__)')"
