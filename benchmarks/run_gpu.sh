#!/usr/bin/env bash
# Offline throughput of whole tables: benchmarks/run_gpu.sh OUT [SHAPE:SET,SET ...]
#
# One process and one OUT/SHAPE.json per shape (OUT/SHAPE-2.json where one comes again, the folder's
# name for a config.json); the table of all comes last, beside OUT/peer/*.json where there are some. PYTHON chooses the interpreter, FLAGS are passed on (FLAGS="--page-size 128").
set -euo pipefail

if [ $# -lt 1 ]; then
  sed -n 's/^# \(Offline.*\)/\1/p' "$0" >&2
  exit 2
fi
out=$1
shift
if [ $# -eq 0 ]; then
  sets=mixed256,b1_128_256,b32_128_256,b128_128_256,b256_1024_128,prefill64x2048
  set -- "qwen3-0.6b:$sets" "qwen3-8b:$sets,long8x16384_64"
fi
python=${PYTHON:-python3}
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/.."

files=()
declare -A seen=()
for table in "$@"; do
  shape=${table%%:*}
  name=$(basename "${shape%/config.json}" .json)
  times=$((${seen[$name]:-0} + 1))
  seen[$name]=$times
  [ "$times" -eq 1 ] || name=$name-$times
  file=$out/$name.json
  # shellcheck disable=SC2086  # FLAGS are several words
  "$python" -m tidemill bench throughput --shape "$shape" --set "${table#*:}" --dtype bfloat16 \
    --json "$file" ${FLAGS:-}
  files+=("$file")
done
peers=()
if [ -d "$out/peer" ]; then
  peers=(--peer "$out"/peer/*.json)
fi
"$python" -m benchmarks.compare "${files[@]}" ${peers[@]+"${peers[@]}"}
