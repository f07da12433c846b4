#!/usr/bin/env bash
# Everything that takes a GPU: run.sh --help.
set -uo pipefail
export LC_ALL=C  # times with a decimal point

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
repository="$(cd "$here/../.." && pwd)"
build="${ZEROSHARD_BUILD:-$repository/build}"

# Where CMake puts what gpu_programs builds.
programs=(
  tests/worker/device/cuda/cuda_runtime_test tests/worker/ops/cuda/gpu/ops_gpu_test
  tests/gpu/gpu_ops_test tests/gpu/gpu_comm_test tests/gpu/gpu_model_test tests/gpu/gpu_train_test
  tests/gpu/gpu_bench
)

# name, seconds at most, command: a program's name and arguments, or a function below.
stages=(
  "probe 30 gpu_bench --probe"
  "device 40 cuda_runtime_test"
  "products-attention 60 ops_gpu_test"
  "ops 90 gpu_ops_test"
  "collectives 40 gpu_comm_test"
  "models 60 gpu_model_test"
  "training 150 gpu_train_test --gtest_filter=-*GpuMesh*"
  "mesh 60 gpu_train_test --gtest_filter=*GpuMesh*"
  "benchmark 170 benchmark"
  "memcheck 120 memcheck"
  "racecheck 60 racecheck"
)

usage() {
  cat <<'TEXT'
Checks and measures the CUDA backend on GPU 0 of this machine.

  run.sh [options]                 build the programs and run them (takes the project's dependencies,
                                   the CUDA toolkit, NCCL and a GPU)
  run.sh --pack FILE               build the programs and pack them with the libraries and values that
                                   they need (takes no GPU); FILE ends with .tar.zst (the smallest, 25 MiB),
                                   .tar.xz or .tar.gz
  run.sh --packed FILE [options]   run what was packed (takes the CUDA toolkit, NCCL and a GPU)

Options:
  --only NAME[,NAME]   these stages
  --seconds N          of all stages together (default 470); what does not fit is cut or skipped
  --output text|json   json: one object on standard output, everything else on standard error
  --llama-blocks N     blocks of the benchmark's largest model, at most (default 8)
  --help

Stages, in order; each runs whatever became of the ones before:
  probe               which GPU there is; where there is none nothing else is run
  device              the CUDA runtime, memory and streams
  products-attention  matrix products and attention against the CPU's
  ops                 every other operation against the CPU's, bit by bit where that is promised
  collectives         NCCL's own calls and our collectives with one rank; two ranks that share the
                      GPU, through Gloo
  models              gradients and logits against PyTorch's and transformers' (tests/reference)
  training            20-step curves against the CPU's at ZeRO stages 0 to 3 with one and two ranks,
                      the same bits where that is promised, offload, save and resume
  mesh                20-step curves of four ranks that share the GPU, through Gloo: two tensor ranks by two
                      pipeline stages, beside a single rank's; pipelines alone have its bits
  benchmark           rates of kernels and training steps; memory against the planner's prediction
  memcheck            products, attention and ops under compute-sanitizer's memcheck
  racecheck           attention under compute-sanitizer's racecheck, as far as its time allows

The table at the end has stage, result and seconds; the exit status is 0 where nothing failed, 1 where
something did, 2 for wrong arguments or a failed build, 3 without a GPU.
TEXT
}

die() {
  echo "run.sh: $1" >&2
  exit "${2:-2}"
}

pack="" packed="" only="" seconds=470 output=text llama_blocks=8
while (($#)); do
  case "$1" in
    --help) usage; exit 0 ;;
    --pack | --packed | --only | --seconds | --output | --llama-blocks)
      (($# > 1)) || die "$1 takes a value; run.sh --help"
      name="${1#--}"
      declare "${name//-/_}=$2"
      shift 2
      ;;
    *) die "unknown argument \"$1\"; run.sh --help" ;;
  esac
done
[[ $output == text || $output == json ]] || die "--output $output; wanted text or json"
[[ $seconds =~ ^[1-9][0-9]*$ ]] || die "--seconds $seconds; wanted a whole number above 0"
[[ $llama_blocks =~ ^[1-9][0-9]*$ ]] || die "--llama-blocks $llama_blocks; wanted 1 to 32"
[[ -z $pack || -z $packed ]] || die "--pack and --packed are for two machines; give one"
for wanted in ${only//,/ }; do
  printf '%s\n' "${stages[@]}" | grep -q "^$wanted " || die "--only $wanted: no such stage"
done

build_programs() {
  if [[ ! -f $build/CMakeCache.txt ]]; then
    cmake -S "$repository" -B "$build" -DZEROSHARD_CUDA=ON >&2 || return 1
  fi
  cmake --build "$build" --parallel "${ZEROSHARD_JOBS:-$(nproc)}" --target gpu_programs >&2
}

# What is on every machine with the CUDA toolkit, or must be that machine's own.
left_out='^(linux-vdso|ld-linux.*|libc|libm|libdl|librt|libpthread|libresolv|libutil|libcuda|libcudart|libcublas|libcublasLt|libnccl|libnvidia-.*)\.so'
# Only where the machine has none: its own is newer, and CUDA's tools want it.
compilers='^(libstdc\+\+|libgcc_s)\.so'

make_pack() {
  local file="$1" folder name path compress=(--auto-compress)
  [[ $file != *.zst ]] || compress=(--use-compress-program "zstd --long=27")
  folder="$(mktemp -d)" || return 1
  trap 'rm -rf "$folder"' RETURN
  mkdir -p "$folder/bin" "$folder/lib" "$folder/compilers" "$folder/reference" || return 1
  for name in "${programs[@]}"; do
    strip -o "$folder/bin/$(basename "$name")" "$build/$name" || return 1
  done
  if ldd "$folder"/bin/* | grep "not found" >&2; then
    echo "run.sh: the libraries above are missing here" >&2
    return 1
  fi
  while read -r name path; do
    [[ $name =~ $left_out ]] && continue
    if [[ $name =~ $compilers ]]; then
      cp -L "$path" "$folder/compilers/$name" || return 1
    else
      strip -o "$folder/lib/$name" "$path" || return 1
    fi
  done < <(ldd "$folder"/bin/* | awk '$2 == "=>" && $3 ~ /^\// {print $1, $3}' | sort -u)
  cp "$repository"/tests/reference/*.{json,safetensors} "$folder/reference/" || return 1
  # The programs hold the same kernels: a window that spans several of them.
  ZSTD_CLEVEL=12 XZ_OPT="-6 -T0" tar --create --file "$file" --directory "$folder" \
    "${compress[@]}" . || return 1
  echo "$file: $(($(stat -c %s "$file") >> 20)) MiB" >&2
}

if [[ -n $pack ]]; then
  build_programs || die "the build failed"
  make_pack "$pack" || die "packing $pack failed"
  exit 0
fi

work="$(mktemp -d)" || die "no temporary folder"
child=""
trap 'if [[ -n $child ]]; then kill -KILL -- "-$child" 2>/dev/null; fi; rm -rf "$work"' EXIT

cuda="${CUDA_HOME:-/usr/local/cuda}"
libraries="$cuda/lib64:$cuda/lib"
declare -A program
if [[ -n $packed ]]; then
  tar --extract --file "$packed" --directory "$work" ||
    die "cannot unpack $packed (a .tar.zst takes zstd; --pack makes .tar.xz and .tar.gz too)"
  libraries="$work/lib:$libraries"
  ldconfig -p 2>/dev/null | grep -q 'libstdc++\.so\.6' || libraries="$work/compilers:$libraries"
  export ZEROSHARD_REFERENCE_DIR="$work/reference"
  for name in "${programs[@]}"; do program[$(basename "$name")]="$work/bin/$(basename "$name")"; done
else
  build_programs || die "the build failed"
  for name in "${programs[@]}"; do program[$(basename "$name")]="$build/$name"; done
fi
export LD_LIBRARY_PATH="$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"

sanitizer="$(command -v compute-sanitizer || echo "$cuda/bin/compute-sanitizer")"
# What stages name and run_stage calls.
# shellcheck disable=SC2317
memcheck() {
  "$sanitizer" --tool memcheck --error-exitcode 99 "${program[gpu_ops_test]}" &&
    "$sanitizer" --tool memcheck --error-exitcode 99 "${program[ops_gpu_test]}" \
      --gtest_filter='CudaOpsOnGpu.*-*AnErrorWithoutAStatusStays'
}
# shellcheck disable=SC2317
racecheck() {
  "$sanitizer" --tool racecheck --error-exitcode 99 "${program[ops_gpu_test]}" \
    --gtest_filter='CudaOpsOnGpu.*Attention*'
}
# shellcheck disable=SC2317
benchmark() {
  "${program[gpu_bench]}" --llama-blocks "$llama_blocks" --json "$work/benchmark.json"
}

# run_stage NAME SECONDS COMMAND...: output to standard error and to $work/NAME.log.
run_stage() {
  local name="$1" limit="$2" begin=$EPOCHREALTIME status log="$work/$1.log"
  shift 2
  local left=$((seconds - SECONDS))
  result=pass detail=""
  if ((left < 5)); then
    result=skipped detail="no time left" took=0
    return
  fi
  ((limit <= left)) || limit=$left
  if [[ $name == memcheck || $name == racecheck ]] && [[ ! -x $sanitizer ]]; then
    result=skipped detail="no compute-sanitizer" took=0
    return
  fi
  echo "== $name, $limit s at most" >&2
  # A group of its own, so that at the limit everything in it is ended.
  if [[ $(type -t "$1") == function ]]; then
    set -m
    "$@" >"$log" 2>&1 &
  else
    set -m
    "${program[$1]}" "${@:2}" >"$log" 2>&1 &
  fi
  child=$!
  set +m
  while kill -0 "$child" 2>/dev/null; do
    if awk "BEGIN {exit !($EPOCHREALTIME - $begin > $limit)}"; then
      kill -KILL -- "-$child" 2>/dev/null
      result=fail detail="not done after $limit s"
      break
    fi
    sleep 0.1
  done
  wait "$child" 2>/dev/null
  status=$?
  child=""
  took="$(awk "BEGIN {printf \"%.1f\", $EPOCHREALTIME - $begin}")"
  cat "$log" >&2
  local passed skipped
  passed="$(awk '/^\[  PASSED  \]/ {n += $4} END {print n + 0}' "$log")"
  skipped="$(awk '/^\[  SKIPPED \] [0-9]+ test/ {n += $4} END {print n + 0}' "$log")"
  if [[ $detail == "" ]] && ((passed + skipped > 0)); then detail="$passed tests passed"; fi
  if [[ $result == pass ]] && ((status != 0)); then
    result=fail
    detail="exit status $status${detail:+, $detail}"
  elif [[ $result == pass ]] && ((passed == 0 && skipped > 0)); then
    result=skipped detail="all $skipped tests skipped"
  elif [[ $name == racecheck && $detail == "not done after"* ]] &&
    ! grep -q '========= .*Race reported\|ERROR SUMMARY: [1-9]' "$log"; then
    result=skipped detail="$detail; no race until then"
  fi
}

SECONDS=0
failed=0 gpu=1
names=() results=() times=() details=()
for stage in "${stages[@]}"; do
  read -r name limit command <<<"$stage"
  if [[ -n $only && $name != probe && ,$only, != *,"$name",* ]]; then continue; fi
  # shellcheck disable=SC2086  # a command and its arguments
  run_stage "$name" "$limit" $command
  names+=("$name") results+=("$result") times+=("$took") details+=("$detail")
  [[ $result != fail ]] || failed=1
  if [[ $name == probe && $result != pass ]]; then
    gpu=0
    break
  fi
done

table() {
  printf '%-20s %-8s %8s  %s\n' stage result seconds detail
  for i in "${!names[@]}"; do
    printf '%-20s %-8s %8s  %s\n' "${names[$i]}" "${results[$i]}" "${times[$i]}" "${details[$i]}"
  done
}
json() {
  local comma=""
  printf '{"stages": ['
  for i in "${!names[@]}"; do
    printf '%s\n {"stage": "%s", "result": "%s", "seconds": %s, "detail": "%s"}' "$comma" \
      "${names[$i]}" "${results[$i]}" "${times[$i]}" "${details[$i]}"
    comma=","
  done
  printf '\n], "benchmark": '
  if [[ -s $work/benchmark.json ]]; then cat "$work/benchmark.json"; else printf 'null\n'; fi
  printf '}\n'
}
if [[ $output == json ]]; then
  table >&2
  json
else
  table
fi
((gpu)) || die "no usable GPU: nothing was checked" 3
exit "$failed"
