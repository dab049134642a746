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
torch=${TORCH:-}
pinned_torch=$(grep '^torch==' "$pins" || echo torch)  # the newest, where lib/bounds.sh pins nothing

say() { printf 'set-up: %s\n' "$*"; }
die() { say "$@" >&2; exit 1; }

is_supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' >/dev/null 2>&1; }
identity() { "$1" -c 'import sys; print(sys.version, sys.base_prefix)' 2>/dev/null; }
venv_has_right_python() {  # a supported one, and the one asked for
    is_supported "$python" && { [ -z "${PYTHON:-}" ] || [ "$(identity "$python")" = "$(identity "$PYTHON")" ]; }
}

# One set-up at a time in a checkout. macOS and some file systems have no flock: there it is up to the user.
exec 9<"$pins"
flock 9 2>/dev/null || true

gpu=no
if nvidia-smi >/dev/null 2>&1; then gpu=yes; fi

# What the environment depends on; the checkout's own path too, because a moved .venv points to the old place.
wanted="$(cat "$pins" pyproject.toml lib/setup.sh | cksum) $torch $PWD"
if [ -f "$stamp" ] && venv_has_right_python; then
    # A CUDA build serves a node without a GPU as well (a cluster's login node), not the other way round.
    case $(cat "$stamp") in "$wanted gpu=yes" | "$wanted gpu=$gpu") exit 0 ;; esac
fi

# uv, where it is, brings a Python too. What it cannot do is done with venv below.
if ! venv_has_right_python && command -v uv >/dev/null 2>&1; then
    uv venv -q --seed --clear --python "${PYTHON:->=3.11,<3.15}" "$venv" || say "uv could not (reason above)"
fi

find_python() {  # a name on the PATH is not enough: version managers leave shims that only fail
    for candidate in ${PYTHON:-python3.12 python3.13 python3.11 python3.14 python3}; do
        if is_supported "$candidate"; then command -v "$candidate"; return; fi
    done
    return 1
}

make_venv() { rm -rf "$venv" && "$base" -m venv "$venv"; }

install_venv_package() {  # Debian and Ubuntu keep what makes a venv in a package of its own
    package=python$("$base" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 && say "installing $package" && apt-get update -qq >&2 &&
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$package" >&2
}

if ! venv_has_right_python || ! "$python" -m pip --version >/dev/null 2>&1; then
    base=$(find_python) || die "needs Python 3.11 to 3.14; found ${PYTHON:-python3} =" \
        "$("${PYTHON:-python3}" --version 2>/dev/null || echo none). Install one, or name it: make PYTHON=/path/to/python3.12"
    say "making $venv with $base ($("$base" --version))"
    make_venv || { install_venv_package && make_venv; } ||
        die "$base cannot make a virtual environment (reason above): sudo apt-get install $package"
fi
rm -f "$stamp"

install_cpu_build() {  # PyPI has none, other indexes some; PyTorch's own, which uv knows, has each
    for build in $1; do
        "$python" -m pip install -qq "$build+cpu" 2>/dev/null && return
    done
    "$python" -m pip install -qq uv
    "$python" -m uv pip install -q --python "$python" --torch-backend=cpu "${1%% *}"
}

install_torch() {
    builds=${torch:-$pinned_torch}
    cpu=no
    if [ "$gpu" = no ] && [ -z "$torch" ] && [ "$(uname -s)" = Linux ]; then
        cpu=yes
        listed=$(sed -n 's/^# without a GPU: //p' "$pins")
        builds=${listed:-$builds}
    fi
    installed=$("$python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null) || installed=none
    # On a GPU a CPU build counts as none.
    case "$gpu $installed" in "yes "*+cpu) installed=none ;; esac
    case " $builds " in *" torch==${installed%+*} "*) return ;; esac
    say "installing the first that can be had of $builds"
    if [ "$cpu" = yes ]; then
        install_cpu_build "$builds"
    else
        "$python" -m pip install -qq --force-reinstall --no-deps "$builds"  # what it needs comes with the rest
    fi
}
install_torch || die "no build of torch for this machine could be installed (reason above)." \
    "The CUDA build runs on a CPU as well, and takes about 6 GB: make TORCH=$pinned_torch"

# A torch that was asked for and is too old: pip would replace it, and say nothing.
[ -z "$torch" ] || "$python" lib/cs336_systems/versions.py >/dev/null

# The pins but torch's; a torch that was asked for brings its own triton, too.
others=$(mktemp)
trap 'rm -f "$others"' EXIT
sed -E "/^(torch${torch:+|triton})==/d" "$pins" >"$others"

say "installing the workbook and what it stands on"
"$python" -m pip install -qq -c "$others" -e '.[dev,site]' || die "pip failed (reason above); make continues where it stopped"
"$python" lib/cs336_systems/versions.py
"$python" -m pip check >/dev/null || say "versions that do not belong together: $("$python" -m pip check)"
printf '%s' "$wanted gpu=$gpu" >"$stamp"
say "ready: $("$python" -c 'import sys, torch; print("Python", sys.version.split()[0] + ", torch", torch.__version__)')"
