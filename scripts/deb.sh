#!/usr/bin/env bash
# deb.sh FOLDER: builds a Debian package of the server and the command line into FOLDER, for the Debian release and the
# architecture on which it is built. A virtual environment with all Python packages goes to /opt/kvstore; it uses the
# system's Python, so the package depends on exactly that version. PYTHON (default: /usr/bin/python3) is the system's
# interpreter.
set -euo pipefail
mkdir -p "$1"
folder=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-/usr/bin/python3}
for program in dpkg-deb gzip; do
    command -v "$program" >/dev/null || { echo "deb: no $program; on Debian: apt-get install dpkg gzip" >&2; exit 1; }
done
"$python" -c 'import ensurepip, venv' 2>/dev/null || {
    echo "deb: $python cannot make virtual environments; on Debian: apt-get install python3-venv python3-dev gcc" >&2
    exit 1
}
unset PYTHONPATH VIRTUAL_ENV
# /usr/bin/python3 belongs to another package than the required interpreter, and may later link to another Python.
python=$(readlink -f "$(command -v "$python")")

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
chmod 755 "$root"
venv=$root/opt/kvstore
# Check the installed package; if Python ran here, it would import this checkout's modules.
installed() { (cd "$root" && PYTHONDONTWRITEBYTECODE=1 "$venv/bin/python" "$@"); }
"$python" -m venv "$venv"
PYTHON=$venv/bin/python scripts/wheel.sh "$root/wheels"
wheel=$(echo "$root"/wheels/llm_kvstore-*.whl)
"$venv/bin/python" -m pip install -q --no-compile -c requirements/test.txt "${wheel}[cluster]" \
    2> >(grep -v "is ignored: it is neither a file nor a directory" >&2)
python_version=$(installed -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
version=$(installed -c 'import kvstore; print(kvstore.__version__)')
install -d "$root/usr/share/man/man1"
installed "$PWD/scripts/shell_files.py" man "$root/usr/share/man/man1"
installed "$PWD/scripts/shell_files.py" completion "$root/completion"
"$venv/bin/python" -m pip uninstall -q -y pip setuptools
rm -rf "$root/wheels"
find "$venv" -name __pycache__ -type d -prune -exec rm -rf {} +
# Scripts name the folder in which the environment was made.
grep -rlI "$venv" "$venv" | xargs -r sed -i "s|$venv|/opt/kvstore|g"

install -D -m 644 packaging/kvstore-server.service "$root/usr/lib/systemd/system/kvstore-server.service"
install -D -m 644 packaging/server.toml "$root/etc/kvstore/server.toml"
install -D -m 644 LICENSE "$root/usr/share/doc/llm-kvstore/copyright"
install -D -m 644 CHANGELOG.md "$root/usr/share/doc/llm-kvstore/changelog"
install -d "$root/usr/bin" "$root/usr/share/bash-completion/completions" "$root/usr/share/zsh/vendor-completions" \
    "$root/usr/share/fish/vendor_completions.d"
for command in kvstore kvstore-server; do
    ln -s "/opt/kvstore/bin/$command" "$root/usr/bin/$command"
done
mv "$root"/completion/bash/* "$root/usr/share/bash-completion/completions/"
mv "$root"/completion/zsh/* "$root/usr/share/zsh/vendor-completions/"
mv "$root"/completion/fish/* "$root/usr/share/fish/vendor_completions.d/"
rm -rf "$root/completion"
gzip -9n "$root"/usr/share/man/man1/*.1 "$root/usr/share/doc/llm-kvstore/changelog"

install -d "$root/DEBIAN"
sed -e "s/@VERSION@/$version/" -e "s/@ARCHITECTURE@/$(dpkg --print-architecture)/" -e "s/@PYTHON@/$python_version/" \
    packaging/deb/control.in >"$root/DEBIAN/control"
echo /etc/kvstore/server.toml >"$root/DEBIAN/conffiles"
for script in postinst prerm postrm; do
    install -m 755 "packaging/deb/$script" "$root/DEBIAN/$script"
done
chmod -R u+rwX,go+rX,go-w "$root"
dpkg-deb --root-owner-group -Zxz --build "$root" "$folder"
