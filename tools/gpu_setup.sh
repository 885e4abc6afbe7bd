#!/usr/bin/env bash
# Unpacks what a GPU machine without a network lacks, and prints the PYTHONPATH that finds it.
#   usage: export PYTHONPATH=$(tools/gpu_setup.sh SITE)     SITE: a folder to be made, such as /tmp/site
# Takes wheels from .whl/ and .whl_rl/ (reasoning-gym and its needs) and a Transformer Engine built
# for the GPU from .te/*.tar.xz, and TileLang with what it needs from .tl/*.txz (fla's backward pass of
# Gated DeltaNet on Hopper), all in the root of the repository and carried there by whoever runs it.
# Torch itself must be installed.
# Transformer Engine stands before the wheels and needs torch imported first and LD_BIND_NOW unset.
set -euo pipefail
site=${1:?usage: export PYTHONPATH=\$(tools/gpu_setup.sh SITE)}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
path=$root
shopt -s nullglob
bundles=("$root"/.te/*.tar.xz)
wheels=("$root"/.whl/*.whl "$root"/.whl_rl/*.whl)
if ((${#bundles[@]} > 1)); then
    echo "gpu_setup.sh: more than one Transformer Engine in .te: ${bundles[*]}" >&2
    exit 1
fi
for bundle in "${bundles[@]}"; do
    mkdir -p "$site/te"
    tar -xJf "$bundle" -C "$site/te"
    path=$path:$site/te
done
for bundle in "$root"/.tl/*.txz; do
    mkdir -p "$site/tl"
    tar -xJf "$bundle" -C "$site/tl"
    path=$path:$site/tl
done
if ((${#wheels[@]})); then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$site/wheels" "${wheels[@]}" >&2
    path=$path:$site/wheels
fi
echo "$path"
