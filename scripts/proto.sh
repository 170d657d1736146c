#!/usr/bin/env bash
# Generates shared/specfleet/wire/ from protos/. The generated code is committed, so that installing needs no compiler;
# `make lint` fails when it is stale. Imports are rewritten from the proto package (specfleet.v1) to its home (specfleet.wire).
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-shared/specfleet/wire}
bin=${BIN:-.venv/bin}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
PATH="$bin:$PATH" "$bin/python" -m grpc_tools.protoc -Iprotos --python_out="$scratch" --pyi_out="$scratch" \
  --grpc_python_out="$scratch" --mypy_grpc_out="$scratch" protos/specfleet/v1/*.proto
mkdir -p "$out"
find "$out" -name '*_pb2*' -delete
for file in "$scratch"/specfleet/v1/*; do
  sed -e 's/from specfleet\.v1 import/from specfleet.wire import/g' -e 's/import specfleet\.v1\./import specfleet.wire./g' \
      -e 's/specfleet\.v1\.\([a-z]*_pb2\)/specfleet.wire.\1/g' "$file" > "$out/$(basename "$file")"
done
[ -f "$out/__init__.py" ] || printf '"""Generated from protos/ by scripts/proto.sh. Do not edit."""\n' > "$out/__init__.py"
