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

# One set-up at a time in a checkout. macOS and some file systems have no flock: there it is up to the user.
exec 9<"$pins"
flock 9 2>/dev/null || true

gpu=no
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; then gpu=yes; fi
builds=${TORCH:-} cpu=no
if [ "$gpu$builds" = no ] && [ "$(uname -s)" = Linux ]; then
    cpu=yes
    builds=$(sed -n 's/^# without a GPU: //p' "$pins")
fi
builds=${builds:-$pinned_torch}

# What the environment depends on; the checkout's own path too, because a moved .venv points to the old place.
wanted="$(cat "$pins" pyproject.toml lib/setup.sh | cksum) ${TORCH:-} $PWD"
if [ -f "$stamp" ] && kept; then
    # A CUDA build serves a node without a GPU as well (a cluster's login node), not the other way round.
    if [ "$(cat "$stamp")" = "$wanted gpu=yes" ] || [ "$(cat "$stamp")" = "$wanted gpu=$gpu" ]; then exit 0; fi
fi

# What is pinned beside torch; another torch brings its own triton.
others=$(mktemp)
trap 'rm -f "$others"' EXIT
if [ -n "${TORCH:-}" ]; then
    sed -E '/^(torch|triton)==/d' "$pins"
else
    sed '/^torch==/d' "$pins"
fi >"$others"

# uv, where it is, brings a Python too. What it cannot do is done with venv below.
if ! kept && command -v uv >/dev/null 2>&1; then
    uv venv -q --seed --clear --python "${PYTHON:->=3.11,<3.15}" "$venv" || say "uv could not (reason above)"
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
    here=$("$python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null) || here=none
    case "$gpu $here, $builds " in
        "yes "*+cpu,*) ;;
        *" torch==${here%+*} "*) return ;;
    esac
    say "installing the first that can be had of $builds"
    if [ "$cpu" = no ]; then
        "$python" -m pip install -qq --force-reinstall --no-deps "$builds"  # what it needs comes with the rest
        return
    fi
    for torch in $builds; do  # PyPI has no CPU builds, other indexes some; PyTorch's own, which uv knows, each
        "$python" -m pip install -qq "$torch+cpu" 2>/dev/null && return
    done
    "$python" -m pip install -qq uv
    "$python" -m uv pip install -q --python "$python" --torch-backend=cpu "${builds%% *}"
}
install_torch || die "no build of torch for this machine could be installed (reason above)." \
    "The CUDA build runs on a CPU as well, and takes about 6 GB: make TORCH=$pinned_torch"

# A torch that was asked for and is too old: pip would replace it, and say nothing.
[ -z "${TORCH:-}" ] || "$python" lib/cs336_systems/versions.py >/dev/null

say "installing the workbook and what it stands on"
"$python" -m pip install -qq -c "$others" -e '.[dev,site]' || die "pip failed (reason above); make continues where it stopped"
"$python" lib/cs336_systems/versions.py
"$python" -m pip check >/dev/null || say "versions that do not belong together: $("$python" -m pip check)"
printf '%s' "$wanted gpu=$gpu" >"$stamp"
say "ready: $("$python" -c 'import sys, torch; print("Python", sys.version.split()[0] + ", torch", torch.__version__)')"
