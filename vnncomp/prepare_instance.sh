#!/usr/bin/env bash
# prepare_instance.sh v1 CATEGORY ONNX VNNLIB: exit 0 if the instance can be run, 1 if it is to be skipped.
# Ends what an earlier run_instance.sh of this folder may have left behind, and nothing else.
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
check_version "${1:-}"
if [ $# -lt 4 ]; then
  say "error: usage: prepare_instance.sh v1 CATEGORY ONNX VNNLIB"
  exit 1
fi
onnx=$3 vnnlib=$4

end_leftover() {
  local pid='' start=''
  [ -f "$pidfile" ] && read -r pid start <"$pidfile" || return 0
  rm -f -- "$pidfile"
  # Another process may have the number by now: only one that began at the same moment is ours.
  [[ $pid =~ ^[0-9]+$ && -n $start && $(start_of "$pid") == "$start" ]] || return 0
  say "ending process $pid of an earlier instance"
  kill -TERM "$pid" 2>/dev/null || return 0
  for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30; do
    [ "$(start_of "$pid")" == "$start" ] || return 0
    sleep 0.1
  done
  kill -KILL "$pid" 2>/dev/null || true
}

end_leftover
for file in "$vnnlib" "$onnx"; do
  if [ ! -f "$file" ] && [ ! -f "$file.gz" ] && [[ $file != *=* ]]; then
    say "skipped: no such file: $file"
    exit 1
  fi
done
if ! tool=$(find_parverify) || ! "$tool" --version >&2; then
  say "skipped: parverify is not installed; run install_tool.sh v1"
  exit 1
fi
exit 0
