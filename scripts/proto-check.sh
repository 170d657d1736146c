#!/usr/bin/env bash
# Fails when the generated code is not what the protos say, or when a proto change breaks the last release's wire format.
set -euo pipefail
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
scripts/proto.sh "$scratch" >/dev/null 2>&1
if ! diff -r -q -x __pycache__ -x __init__.py "$scratch" shared/specfleet/wire; then
  echo "shared/specfleet/wire is stale: run make proto" >&2
  exit 1
fi
# protos/baseline.binpb is the image of the last release: make one with `buf build -o protos/baseline.binpb` when releasing.
.venv/bin/buf breaking --against protos/baseline.binpb
