# Shared by the scripts that start a deployment: source it with $root set to the checkout.
# shellcheck shell=bash

command -v sgl-kimi-k3 >/dev/null || PATH=${root:?set it to the checkout}/.venv/bin:$PATH

# usage: the comment at the top of the script, without its marks.
usage() { awk 'NR > 1 && !/^#/ { exit } NR > 1 { sub(/^# ?/, ""); print }' "$0"; }

# begin ARGUMENTS...: sets dry_run, and flags=(what goes to SGLang as it is).
begin() {
  dry_run=0 flags=()
  while (($#)); do
    case $1 in
      -h | --help) usage; exit 0 ;;
      --dry-run) dry_run=1 ;;
      *) flags+=("$1") ;;
    esac
    shift
  done
}

# show COMMAND...: one line that can be pasted.
show() { printf '+'; printf ' %q' "$@"; printf '\n'; }

# become COMMAND...: show it, then be it; with --dry-run only show it.
become() {
  show "$@"
  ((dry_run)) || exec "$@"
}
