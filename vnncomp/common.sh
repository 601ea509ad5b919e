# Sourced by the three scripts: where things are, and which parverify is used. Nothing here depends on the working
# directory, and nothing is read from the category.

# The harness may export SHELLOPTS with xtrace (or errexit, nounset); keep it to itself, here and in child shells.
set +x
export -n SHELLOPTS 2>/dev/null || true
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" >/dev/null && pwd -P)
root=$(dirname -- "$here")
venv="$here/.venv"
pidfile="$here/.run/pid"

say() { printf '%s: %s\n' "$(basename -- "$0")" "$*" >&2; }

check_version() {
  if [ "${1:-}" != v1 ]; then
    say "error: the first argument must be v1, got '${1:-}'"
    exit 1
  fi
}

# The command of the environment that install_tool.sh made, else the one that is active.
find_parverify() {
  if [ -x "$venv/bin/parverify" ]; then
    printf '%s\n' "$venv/bin/parverify"
  else
    command -v parverify
  fi
}

# The start of a process in clock ticks after boot: with the number of the process it names it uniquely. Nothing for a
# process that has ended and only waits to be collected.
start_of() {
  local stat
  stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 0
  set -- ${stat##*) }
  [ "$1" != Z ] || return 0
  printf '%s\n' "${20}"
}
