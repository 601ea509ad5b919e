#!/usr/bin/env bash
# run_instance.sh v1 CATEGORY ONNX VNNLIB RESULTS TIMEOUT: the answer stands in RESULTS before TIMEOUT seconds have
# passed since this script was started; the exit status is 0 whatever the answer.
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
check_version "${1:-}"
if [ $# -lt 6 ]; then
  say "error: usage: run_instance.sh v1 CATEGORY ONNX VNNLIB RESULTS TIMEOUT"
  exit 1
fi
onnx=$3 vnnlib=$4 results=$5 timeout=$6

# Until parverify itself writes there, the answer is `error`: that is what it means if it can't even start.
mkdir -p -- "$(dirname -- "$results")"
printf 'error\n' >"$results"
if ! tool=$(find_parverify); then
  say "error: parverify is not installed; run install_tool.sh v1"
  exit 0
fi

# What prepare_instance.sh needs to find a leftover. `exec` keeps the number and the start of this process, so the
# timeout counts from the start of this script, and signals reach parverify itself.
{ mkdir -p -- "$here/.run" && printf '%s %s\n' "$$" "$(start_of "$$")" >"$pidfile"; } 2>/dev/null || true
exec "$tool" run --exit-zero --timeout "$timeout" --results-file "$results" -- "$onnx" "$vnnlib"
