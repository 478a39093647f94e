#!/usr/bin/env bash
# Packs wheels, on Linux on x86-64, for a GPU machine of that kind with CPython 3.12 that can install nothing; as small as they get:
#   bench/pack_wheels.sh bench/requirements-gpu-peers.txt OUT          # OUT/requirements-gpu-peers.tar.xz.part00, …, of 45 MB
#   bench/pack_wheels.sh bench/requirements-gpu-plaudit.txt OUT
# There:
#   mkdir -p SITE/site-packages && cat requirements-gpu-peers.tar.xz.part* | tar xJf - -C SITE/site-packages
set -euo pipefail
[ $# = 2 ] || { sed -n '2,6s/^# //p' "$0" >&2; exit 2; }
name=$(basename "$1" .txt) out=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"

platforms=()
for glibc in 2_35 2_34 2_31 2_28 2_27 2_17; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
"${PYTHON:-python3}" -m pip install --quiet --no-compile --target "$work/site" --requirement "$1" --no-deps --only-binary :all: --python-version 3.12 \
    --implementation cp --abi cp312 --abi abi3 --abi none "${platforms[@]}" --platform manylinux2014_x86_64 --platform any

# What no benchmark loads on a Hopper GPU: kernels of older ones and of mixtures of experts, servers' pages, tests, word lists.
cd "$work/site"
rm -rf bin vllm/vllm_flash_attn/_vllm_fa2_C* vllm/_moe_C* vllm/vllm-rs vllm/third_party/deep_gemm/include \
    vllm/entrypoints/serve/instrumentator/static pyarrow/tests pyarrow/libarrow_flight* pyarrow/_flight* pyarrow/include \
    pandas/tests mistral_common/data pycountry/locales
find . -name '*.so*' -type f -exec strip --strip-unneeded {} + 2> /dev/null || true # some have nothing to strip
cd - > /dev/null

rm -f "$out/$name".tar.xz.part*
tar cf - -C "$work/site" . | xz -6 -T0 | split --bytes 45000000 --numeric-suffixes - "$out/$name.tar.xz.part"
ls -l "$out/$name".tar.xz.part*
