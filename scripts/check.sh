#!/usr/bin/env bash
# Static checks: lint, types, import rules, protos, Dockerfiles, compose.yaml, the documentation's commands.
# Runs all of them, prints each one's outcome, and fails if any failed.
set -uo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-.venv/bin/python}"
bin="$(dirname "$python")"
failed=()

check() {
  local name="$1"
  shift
  printf '== %s\n' "$name"
  "$@" || failed+=("$name")
}

buf_lint() { (cd protos && "../$bin/buf" lint); }

# In a copy, so that a failed check leaves the working tree as it was.
protos_regenerate() {
  local copy status=0
  copy="$(mktemp -d)" || return 1
  mkdir "$copy/scripts" && cp -r protos "$copy/protos" && cp scripts/gen_protos.sh "$copy/scripts/" &&
    PYTHON="$PWD/$python" bash "$copy/scripts/gen_protos.sh" &&
    diff --recursive --brief --exclude=__pycache__ protos "$copy/protos" || status=1
  rm -rf "$copy"
  return "$status"
}

# The binary itself: the command that its wheel installs hides the exit code.
compose_valid() {
  local binary
  binary="$("$python" -c 'import compose, pathlib; print(pathlib.Path(compose.__file__).with_name("docker-compose"))')" || return 1
  "$binary" -f compose.yaml config --quiet &&
    "$binary" -f compose.yaml --profile cpu config --quiet &&
    "$binary" -f compose.yaml --profile gpu config --quiet
}

check "ruff check" "$bin/ruff" check .
check "ruff format" "$bin/ruff" format --check .
check "mypy" "$bin/mypy"
check "import rules" "$bin/lint-imports" --no-logo
check "buf lint" buf_lint
check "protos regenerate without a difference" protos_regenerate
check "hadolint" "$bin/hadolint" gateway/Dockerfile services/*/Dockerfile
check "compose.yaml" compose_valid
check "documentation" "$python" scripts/check_docs.py

if [ "${#failed[@]}" -gt 0 ]; then
  printf 'failed: %s\n' "${failed[@]}"
  exit 1
fi
echo "all checks passed"
