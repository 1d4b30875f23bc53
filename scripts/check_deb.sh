#!/usr/bin/env bash
# Builds the Debian package, unpacks it and tries its files, its server and its manual pages. The package is not
# installed, because that would make a user and write to /etc on this machine. `make check-service` installs it in a
# separate system.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scratch=$(mktemp -d)
server=
trap '[[ -z $server ]] || kill "$server" 2>/dev/null || true; rm -rf "$scratch"' EXIT
unset PYTHONPATH VIRTUAL_ENV

fail() { echo "deb: $*" >&2; exit 1; }

scripts/deb.sh "$scratch"
package=$(echo "$scratch"/llm-kvstore_*.deb)
echo "deb: ${package##*/}, $(du -h "$package" | cut -f1)"
dpkg-deb -x "$package" "$scratch/root"
dpkg-deb -e "$package" "$scratch/control"
grep -qx /etc/kvstore/server.toml "$scratch/control/conffiles" || fail "/etc/kvstore/server.toml is no conffile"
for script in postinst prerm postrm; do
    sh -n "$scratch/control/$script"
done
for file in opt/kvstore/bin/kvstore-server opt/kvstore/bin/kvstore etc/kvstore/server.toml \
    usr/lib/systemd/system/kvstore-server.service usr/share/man/man1/kvstore-server.1.gz usr/share/man/man1/kvstore-top.1.gz \
    usr/share/bash-completion/completions/kvstore usr/share/zsh/vendor-completions/_kvstore-server \
    usr/share/fish/vendor_completions.d/kvstore.fish; do
    [[ -e $scratch/root/$file ]] || fail "it lacks /$file"
done
[[ $(readlink "$scratch/root/usr/bin/kvstore") == /opt/kvstore/bin/kvstore ]] || fail "/usr/bin/kvstore leads elsewhere"
head -1 "$scratch/root/opt/kvstore/bin/kvstore-server" | grep -q '^#!/opt/kvstore/bin/python' || fail "wrong interpreter"
if grep -rIl "$scratch" "$scratch/root/opt/kvstore" | grep .; then
    fail "these files contain the name of the folder in which the package was built"
fi

# An environment runs in any folder if its interpreter is called directly.
python=$scratch/root/opt/kvstore/bin/python
cd "$scratch"
"$python" -m kvstore --config root/etc/kvstore/server.toml --port 0 --memory 64MiB --segment 4MiB --check-config
"$python" -c 'import requests'
"$python" -m kvstore --port 0 --memory 64MiB --segment 4MiB >ready 2>log &
server=$!
for _ in {1..300}; do
    [[ -s ready ]] && break
    sleep 0.1
done
endpoint=$(sed -n 's/^kvstore-server ready \(tcp:[^ ]*\) .*/\1/p' ready)
[[ -n $endpoint ]] && "$python" -m kvstore_cli ping --endpoint "$endpoint" || { cat log; fail "its server does not answer"; }
kill "$server"
wait "$server" || { cat log; fail "its server ended with status $?"; }
server=
echo "deb: ok"
