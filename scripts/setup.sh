#!/usr/bin/env bash
# setup.sh local|dev  creates .venv and installs specfleet[local] or specfleet[dev] with the CPU constraints.
# setup.sh sglang     creates .venv-sglang: SGLang on a CPU, whose pins contradict ours, with specfleet's plugin beside it.
# Safe to run again.
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

if [ "$extra" = sglang ]; then venv=.venv-sglang constraints=constraints/sglang-cpu.txt; else venv=.venv constraints=constraints/cpu.txt; fi
if [ ! -x $venv/bin/python ]; then
  for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
    if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
      interpreter=$candidate
      break
    fi
  done
  [ -n "${interpreter:-}" ] || { echo "specfleet needs Python 3.11 or newer (PYTHON=… chooses one)." >&2; exit 3; }
  "$interpreter" -m venv $venv || { echo "venv failed: on Debian and Ubuntu install python3-venv." >&2; exit 3; }
fi
pip="$venv/bin/python -m pip install -q --disable-pip-version-check"
torch=$(grep -E '^torch==' $constraints)
if ! $venv/bin/python -c "import importlib.metadata as m, sys; sys.exit(m.version('torch').split('+')[0] != '${torch#torch==}')" 2>/dev/null; then
  echo "installing $torch"
  $pip ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$torch"
fi
if [ "$extra" = sglang ]; then
  echo "installing SGLang for CPU"
  # The list is complete and tested; SGLang's own requirements ask for CUDA packages that a CPU never uses.
  $pip --no-deps -r $constraints
  $pip --no-deps -e .
  $venv/bin/python scripts/torchvision_shim.py
else
  echo "installing specfleet[$extra]"
  $pip -c $constraints -e ".[$extra]"
fi
