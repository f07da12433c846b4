#!/bin/sh
# Configures without a CUDA compiler: with ZEROSHARD_CUDA=ON that is an error which says what is
# missing and what to do; with AUTO a build without the CUDA backend.
# usage: cuda_missing_test.sh CMAKE SOURCE GENERATOR
set -eu

cmake=$1 source=$2 generator=$3
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# Where CMake is to look, and nowhere else.
export CUDACXX="$folder/none/nvcc"
unset CUDA_PATH CUDAToolkit_ROOT

fail() {
  echo "$1; the output was:" >&2
  cat "$folder/log" >&2
  exit 1
}

configure() { # VALUE
  "$cmake" -G "$generator" -S "$source" -B "$folder/$1" "-DZEROSHARD_CUDA=$1" \
    -DZEROSHARD_TESTS=OFF -DZEROSHARD_BENCH=OFF >"$folder/log" 2>&1
}

if configure ON; then fail "configured with ZEROSHARD_CUDA=ON and no compiler for it"; fi
# A message may be broken into lines.
text=$(tr -s ' \n' '  ' <"$folder/log")
case $text in
  *"ZEROSHARD_CUDA=ON, but not found: the CUDA toolkit (nvcc)"*"-DZEROSHARD_CUDA=OFF"*) ;;
  *) fail "the error does not say what is missing and what to do" ;;
esac
errors=$(grep -c '^CMake Error' "$folder/log")
[ "$errors" = 1 ] || fail "$errors errors, wanted one"

configure AUTO || fail "ZEROSHARD_CUDA=AUTO does not configure without CUDA"
grep -q 'Without the CUDA backend: not found: the CUDA toolkit (nvcc)' "$folder/log" ||
  fail "ZEROSHARD_CUDA=AUTO does not say that the CUDA backend is left out"
