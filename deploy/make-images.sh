#!/usr/bin/env bash
# Builds the images of deploy/docker-compose.yml (all but Spark's, or those that are named), and prints their sizes.
#
# BASE_IMAGE names the base. Unset, it is the default of the Dockerfile; where that can be neither found nor pulled, a
# base made from Debian's packages (made once, then found again). Builds use the network of this machine.
set -euo pipefail
cd "$(dirname "$0")/.."
default_base=python:3.11-slim-bookworm
own_base=minibroker-base

docker version --format 'docker engine {{.Server.Version}}' || {
  echo "error: no docker engine answers: start one (dockerd, or systemctl start docker)" >&2
  exit 1
}
has_image() { docker image inspect "$1" >/dev/null 2>&1; }

base=${BASE_IMAGE:-}
if [[ -z $base ]]; then
  base=$default_base
  if ! has_image "$base" && ! docker pull --quiet "$base"; then
    base=$own_base
    if ! has_image "$base"; then
      echo "$default_base cannot be pulled: making $base from Debian's packages ..." >&2
      deploy/make-base-image.sh "$base"
    fi
  fi
fi

# Spark's image is 1.2 GB, so it is made only where it is asked for.
targets=("$@")
((${#targets[@]})) || targets=(zookeeper broker)
for target in "${targets[@]}"; do
  docker build --network host --build-arg "BASE_IMAGE=$base" --file deploy/Dockerfile --target "$target" \
    --tag "minibroker-$target" .
done
for image in "$base" "${targets[@]/#/minibroker-}"; do
  printf '%-28s %4d MB\n' "$image" $(($(docker image inspect --format '{{.Size}}' "$image") / 1000000))
done
