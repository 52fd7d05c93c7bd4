# Shared by quickstart.sh, tests/run.sh and .ci/run: a virtual environment and progress lines.
# Source it with $root set to the checkout.
# shellcheck shell=bash

venv=${root:?set it to the checkout}/.venv

fail() {
  printf '\nFAILED  %s\n' "$*" >&2
  exit 1
}

# say TEXT: one progress line.
say() { printf '[%4ds] %s\n' "$SECONDS" "$*"; }

# slow LABEL LOG COMMAND...: run a command with its output in LOG, and show that it lives.
slow() {
  local label=$1 log=$2 started=$SECONDS status=0
  shift 2
  say "$label"
  "$@" >"$log" 2>&1 &
  local job=$!
  while kill -0 "$job" 2>/dev/null; do
    sleep 1
    if (((SECONDS - started) % 15 == 14)); then
      say "  ... $(grep -av WARNING "$log" | tail -n 1 | sed 's/^ *//' | cut -c1-90)"
    fi
  done
  wait "$job" || status=$?
  if ((status)); then
    tail -n 25 "$log" >&2
    fail "$label (exit $status; whole output in $log)"
  fi
}

# find_python: a Python that SGLang 0.5.23 runs on, by name or path.
find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3 python3.12 python3.13 python3.11; do
    [ -n "$candidate" ] || continue
    if "$candidate" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
      2>/dev/null; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  fail "no Python 3.11 to 3.13 with the venv module: install one, or set PYTHON=/path/to/python3"
}

# installed EXTRA: whether .venv holds this extra of this pyproject.toml.
installed() { sha256sum --status --check "$venv/.installed-$1" 2>/dev/null; }

# install EXTRAS...: make .venv hold this project with its extras; a second call finds it done.
install() {
  local extra missing=0 python
  for extra in "$@"; do installed "$extra" || missing=1; done
  ((missing)) || return 0
  if ! [ -x "$venv/bin/python" ]; then
    python=$(find_python)
    say "creating .venv with $("$python" --version)"
    "$python" -m venv "$venv" || fail "creating .venv (on Debian: apt install python3-venv)"
  fi
  local list
  list=$(IFS=,; printf '%s' "$*")
  # Not compiled ahead: most of SGLang is never imported here, and compiling takes minutes.
  slow "installing sgl-kimi-k3[$list] with pip (SGLang and PyTorch are 11 GB: some minutes)" \
    "$venv/install.log" "$venv/bin/python" -m pip install --disable-pip-version-check --no-color \
    --progress-bar off --no-compile -e "${root}[$list]"
  for extra in "$@"; do sha256sum "$root/pyproject.toml" >"$venv/.installed-$extra"; done
}

# install_browser: a Chromium for the tests of the dashboard's page: the system's, else Debian's,
# else the one that playwright downloads.
install_browser() {
  if command -v chromium >/dev/null || command -v google-chrome >/dev/null; then return; fi
  if grep -qs '^ID=debian' /etc/os-release && [ "$(id -u)" = 0 ]; then
    slow "installing Debian's Chromium" "$venv/chromium.log" \
      sh -c 'apt-get update -q && apt-get install -qy --no-install-recommends chromium'
  else
    slow "installing playwright's Chromium" "$venv/chromium.log" \
      "$venv/bin/playwright" install --with-deps chromium
  fi
}
