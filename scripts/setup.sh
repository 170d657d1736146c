#!/usr/bin/env bash
# Creates .venv and installs specfleet[$1] (local or dev) with the CPU constraints. Safe to run again.
# PYTHON=…           interpreter to use (default: the first of python3.11 … python3 that is >= 3.11)
# TORCH_INDEX_URL=…  package index to take torch from. Set it to PyTorch's own CPU index where the default index
#                    would deliver the CUDA build (several GB more, works just as well).
set -euo pipefail
cd "$(dirname "$0")/.."
extra=${1:-local}

# Mooncake's libraries need these at run time; slim images lack them.
missing=()
for library in libibverbs.so.1:libibverbs1 libcurl.so.4:libcurl4 libnuma.so.1:libnuma1; do
  /sbin/ldconfig -p 2>/dev/null | grep -q "${library%%:*}" || missing+=("${library##*:}")
done
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" = 0 ]; then as_root=""; elif sudo -n true 2>/dev/null; then as_root="sudo -n"; else as_root="none"; fi
  if [ "$as_root" = none ] || ! command -v apt-get >/dev/null; then
    echo "specfleet needs the system libraries: ${missing[*]}. Install them (apt-get install ${missing[*]}) and run this again." >&2
    exit 3
  fi
  echo "installing system libraries: ${missing[*]}"
  $as_root apt-get update -qq
  DEBIAN_FRONTEND=noninteractive $as_root apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

if [ ! -x .venv/bin/python ]; then
  for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
    if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
      interpreter=$candidate
      break
    fi
  done
  [ -n "${interpreter:-}" ] || { echo "specfleet needs Python 3.11 or newer (PYTHON=… chooses one)." >&2; exit 3; }
  "$interpreter" -m venv .venv || { echo "venv failed: on Debian and Ubuntu install python3-venv." >&2; exit 3; }
fi
torch=$(grep -E '^torch==' constraints/cpu.txt)
if ! .venv/bin/python -c "import importlib.metadata as m, sys; sys.exit(m.version('torch').split('+')[0] != '${torch#torch==}')" 2>/dev/null; then
  echo "installing $torch"
  .venv/bin/python -m pip install -q --disable-pip-version-check ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$torch"
fi
echo "installing specfleet[$extra]"
.venv/bin/python -m pip install -q --disable-pip-version-check -c constraints/cpu.txt -e ".[$extra]"
