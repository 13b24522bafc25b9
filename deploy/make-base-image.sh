#!/usr/bin/env bash
# Makes, from Debian's packages, a base for the images that replaces BASE_IMAGE's default: for machines that can pull no
# image. Needs root, debootstrap and a docker engine; takes a minute.
#
#     deploy/make-base-image.sh NAME
#
# The certificates that this machine trusts are copied, so that builds can reach the package registries as it does.
set -euo pipefail
name=${1:?usage: deploy/make-base-image.sh NAME}

command -v debootstrap >/dev/null || {
  echo "error: debootstrap is missing: apt-get install debootstrap" >&2
  exit 1
}
root=$(mktemp -d)
trap 'rm -rf --one-file-system "$root"' EXIT

debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv bookworm "$root" >"$root.log" ||
  { tail -20 "$root.log" >&2; exit 1; }
rm -f "$root.log"

# As the slim images do: nothing that is only to be read.
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/cache/debconf/*-old "$root"/var/lib/apt/lists/* \
  "$root"/var/log/*.log "$root"/usr/share/doc/* "$root"/usr/share/man/* "$root"/usr/share/info/* \
  "$root"/usr/share/locale/* "$root"/usr/share/lintian
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"

# pip, too, should trust what the system trusts.
tar --directory "$root" --one-file-system --create . |
  docker import --change 'ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt' --change 'CMD ["bash"]' - "$name" >/dev/null
