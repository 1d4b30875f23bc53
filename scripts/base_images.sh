#!/usr/bin/env bash
# base_images.sh: makes stand-ins, under the same names, for the two official base images of docker/Dockerfile and for
# the Prometheus image of docker/compose.yaml. Stand-ins are for machines that can reach a Debian archive but no
# registry of images. image.sh runs this script if BASE_IMAGES=stand-in.
#
# A stand-in has the parts of its image that docker/ uses, from Debian's packages of the same release
# (docker/stand-ins). Python and Prometheus have the versions of that release, whatever the names of the images say. If
# the archive lacks the release, this machine's release is used. Stand-ins also have this machine's certificates and its
# settings of apt, and the label io.kvstore.stand-in, which all images that are made from them inherit. They are for
# tests only.
#
# They are made once, and again when their recipe changes. Needs root, mmdebstrap, and $IMAGE_BUILDER.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
debian=docker.io/library/$(sed -n 's/^ARG DEBIAN_IMAGE=//p' docker/Dockerfile)
python=docker.io/library/$(sed -n 's/^ARG PYTHON_IMAGE=//p' docker/Dockerfile)
prometheus=docker.io/$(sed -nE 's/^ +image: (prom\/prometheus:.*)$/\1/p' docker/compose.yaml)
release=$(sed -E 's/.*:([a-z]+)-slim$/\1/' <<<"$debian")
recipe=$(cat scripts/base_images.sh docker/stand-ins/* | sha256sum | cut -c1-16)

say() { echo "image: $*" >&2; }

made() { "$IMAGE_BUILDER" inspect --type image "$1" 2>/dev/null | grep "io.kvstore.recipe.*$recipe" >/dev/null; }

# Lines of sources.list: the archives of this machine's distribution that apt uses here.
archives() {
    apt-get indextargets 'Created-By: Packages' | awk '
        { field[$1] = $2 }
        /^Target-Of:/ && field["Origin:"] ~ /^(Debian|Ubuntu)$/ {
            print "deb", field["Repo-URI:"], field["Release:"], field["Component:"]
        }' | sort -u
}

# CODENAME: succeeds if the archive of this machine has the release, and prints its line of sources.list.
archive_of() {
    local uri
    uri=$(archives | awk -v codename="$VERSION_CODENAME" '$3 == codename { print $2; exit }')
    /usr/lib/apt/apt-helper download-file "${uri%/}/dists/$1/InRelease" "$scratch/InRelease" >/dev/null 2>&1 &&
        echo "deb $uri $1 main"
}

build() { # NAME FILE
    "$IMAGE_BUILDER" build --quiet --tag "$1" --build-arg "DEBIAN_IMAGE=$debian" --file "docker/stand-ins/$2" \
        --label "io.kvstore.stand-in=Debian $release" --label "io.kvstore.recipe=$recipe" "$scratch" >/dev/null
}

if made "$debian" && made "$python" && made "$prometheus"; then
    exit
fi
started=$SECONDS
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# shellcheck source=/dev/null
. /etc/os-release
[[ -n $(archives) ]] || apt-get -qq update
if ! sources=$(archive_of "$release"); then
    say "the archive of this machine has no $release: the stand-ins are of $VERSION_CODENAME"
    release=$VERSION_CODENAME
    sources=$(archives)
fi
say "making stand-ins for $debian, $python and $prometheus of the packages of Debian $release: one to three minutes," \
    "mostly downloads"
cp docker/stand-ins/apt.conf "$scratch"
apt-config dump | grep -E '^Acquire::(http|https|Check-)' >>"$scratch/apt.conf" || true
cp -L "${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}" "$scratch/certificates"
mmdebstrap --quiet --mode=root --variant=minbase --aptopt="$scratch/apt.conf" \
    --dpkgopt='path-exclude=/usr/share/'{doc,info,locale,man}'/*' "$release" "$scratch/system.tar" - <<<"$sources"
build "$debian" debian.Dockerfile
build "$python" python.Dockerfile
build "$prometheus" prometheus.Dockerfile
say "made the stand-ins in $((SECONDS - started)) s"
