#!/usr/bin/env bash
# Third-party clients, in an environment of their own, against one stack. Last line: `N passed, N failed`.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=build/interop
if [ ! -x "$venv/bin/python" ]; then
  .venv/bin/python -m venv "$venv"
  "$venv/bin/pip" install -q langchain-openai==1.7.4 litellm==1.110.2 llama-index-llms-openai-like==0.8.1
fi
if command -v npm >/dev/null && [ ! -d build/interop-node/node_modules/openai ]; then
  mkdir -p build/interop-node
  (cd build/interop-node && npm install --silent --no-audit --no-fund openai)
fi
exec .venv/bin/python tests/interop/run.py "$venv/bin/python" build/interop-node/node_modules
