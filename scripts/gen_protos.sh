#!/usr/bin/env bash
# Regenerates the committed gRPC code beside the .proto files. CI runs it and fails on a difference.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-.venv/bin/python}"
bin="$(dirname "$python")"
find protos/paceline/v1 \( -name '*_pb2.py' -o -name '*_pb2.pyi' -o -name '*_pb2_grpc.py' -o -name '*_pb2_grpc.pyi' \) -delete
PATH="$bin:$PATH" "$python" -m grpc_tools.protoc -I protos \
  --python_out=protos --grpc_python_out=protos --mypy_out=quiet:protos --mypy_grpc_out=quiet:protos \
  protos/paceline/v1/*.proto
