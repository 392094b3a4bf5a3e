# Sourced by .ci/run and .ci/full: README's own commands, in a fresh copy of the checkout. Needs bash, git, tar and python3.

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# Print the command that README.md shows below the marker <!-- command: NAME -->.
readme_command() {
    local found
    found=$(sed -n "/^<!-- command: $1 -->\$/,/^\`\`\`\$/ { /^<!--/d; /^\`\`\`/d; p; }" "$checkout/README.md")
    if [ -z "$found" ]; then
        echo "README.md shows no command below <!-- command: $1 -->" >&2
        return 1
    fi
    printf '%s\n' "$found"
}

# Copy what git tracks, or would track, to a new folder, removed on exit, and go there.
enter_fresh_copy() {
    fresh=$(mktemp -d)
    trap 'rm -rf "$fresh"' EXIT
    cd "$checkout"
    git ls-files -z --cached --others --exclude-standard |
        while IFS= read -r -d '' file; do
            if [ -e "$file" ] || [ -L "$file" ]; then printf '%s\0' "$file"; fi
        done |
        tar --null --files-from=- --create --file=- | tar --extract --file=- --directory="$fresh"
    cd "$fresh"
    unset PYTHONPATH VIRTUAL_ENV PYTHONDONTWRITEBYTECODE
}

# Run one command as a user would type it, showing it first.
typed() {
    printf '\n$ %s\n' "$1"
    bash -euo pipefail -c "$1"
}
