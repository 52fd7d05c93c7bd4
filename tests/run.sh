#!/usr/bin/env bash
# Everything CI checks: lint, types, unit and property tests, then tests against a served small K3.
#
#   bash tests/run.sh [pytest arguments for both test stages]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
# shellcheck source=launch/steps.sh
. "$root/launch/steps.sh"

install serve dev
bin=$venv/bin
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

if ! command -v promtool >/dev/null || ! command -v prometheus >/dev/null; then
  say "installing Debian's prometheus, which brings promtool"
  { apt-get update -q && apt-get install -qy --no-install-recommends prometheus; } >/dev/null ||
    fail "prometheus and promtool are missing and apt could not install them: apt install prometheus"
fi
install_browser

say "lint"
"$bin/ruff" check .
"$bin/ruff" format --check .
say "types"
"$bin/mypy"
say "unit and property tests"
"$bin/python" -m pytest -q -m "not e2e and not gpu" -n 2 --dist loadfile "$@"
say "end to end, against a served small K3"
"$bin/python" -m pytest -q -m e2e "$@"
say "all passed"
