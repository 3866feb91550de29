#!/usr/bin/env bash
# The kernels on ARM: cross-compiled, run under emulation, compared with sums in long double. Says nothing about speed.
#
#   apt-get install g++-aarch64-linux-gnu qemu-user && tools/check_arm.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
cmake -B build/arm -S native -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DPARTITA_CHECK=ON
cmake --build build/arm --parallel 2
for isa in neon_bf16 neon baseline; do
  PARTITA_ISA=$isa qemu-aarch64 -L /usr/aarch64-linux-gnu build/arm/partita_check
done
