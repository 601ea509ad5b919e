#!/usr/bin/env bash
# install_tool.sh v1: install parverify into an environment of its own beside the sources, or, with PARVERIFY_ACTIVE=1,
# into the Python that is active. PYTHON names the interpreter (default python3). Asks nothing; may be run again.
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
check_version "${1:-}"

python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
  say "error: $python must be Python 3.10 or later; set PYTHON to one"
  exit 1
fi
export PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

if [ "${PARVERIFY_ACTIVE:-0}" != 1 ]; then
  if ! "$python" -m venv "$venv"; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
      say "python3-venv is missing; installing it"
      DEBIAN_FRONTEND=noninteractive apt-get update -q
      DEBIAN_FRONTEND=noninteractive apt-get install -q -y python3-venv
      "$python" -m venv --clear "$venv"
    else
      say "error: $python can't make an environment; install python3-venv, or set PARVERIFY_ACTIVE=1"
      exit 1
    fi
  fi
  python="$venv/bin/python"
fi
"$python" -m pip install --quiet "$root"
"$python" -m parverify --version
