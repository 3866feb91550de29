#!/usr/bin/env bash
# Install a wheel into an environment of its own, with no compiler on the PATH, and run the suite there: all fast tests of
# what is computed, that is without those of the sources' own shape, of pages and of other packages. A wheel of
# partita-theory in the same folder is installed with it, and the tests of its mathematics run too.
#
#   tools/clean_install.sh dist/partita-0.1.0-py3-none-any.whl
#   BASE=.venv/lib/python3.11/site-packages tools/clean_install.sh WHEEL     torch and pytest from there, not anew
#   TESTS=tests/test_gibbs.py tools/clean_install.sh WHEEL                    only these
#
# The sources are not within reach: the tests are copied away from them.
set -euo pipefail
wheel=$(realpath "$1")
theory=$(find "$(dirname "$wheel")" -name 'partita_theory-*.whl')
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
base=${BASE:+$(realpath "$BASE")}
place=$(mktemp -d)
remove=$(command -v rm) # the PATH will not have it
trap '"$remove" -rf "$place"' EXIT
"${PYTHON:-python3}" -m venv "$place/env"
if [ -n "$base" ]; then
  "$place/env/bin/python" -m pip install -q --no-deps --no-index "$wheel" $theory
  echo "$base" > "$(echo "$place"/env/lib/python3*/site-packages)/base.pth" # afterwards: pip must not find partita there
else
  PIP_CONSTRAINT=$root/constraints.txt "$place/env/bin/python" -m pip install -q "$wheel[test]" $theory
fi
cp -r "$root"/tests "$root"/conftest.py "$root"/pyproject.toml "$root"/constraints.txt "$root"/CHANGELOG.md "$root"/CITATION.cff "$root"/docs "$root"/examples "$place"
cd "$place"
export PATH="$place/env/bin" OMP_NUM_THREADS=1
unset PYTHONPATH
for compiler in cc gcc c++ g++ clang; do
  if command -v $compiler; then echo "a compiler is within reach"; exit 1; fi
done
python -c "import partita, sys, torch; assert partita.__file__.startswith(sys.prefix), partita.__file__; print(partita.explain(partita.Gibbs(torch.zeros(9, 8), torch.zeros(9, 8))))"
computed="defaults empty gibbs look opinfo packaging patterns rim scale score state support terms"
folders="tests/attention tests/conformance tests/losses tests/monitor tests/native"
if [ -n "$theory" ]; then
  mkdir theory && cp -r "$root"/theory/tests theory
  mathematics="contrast critical_scale entropy geometry information law layer loss_shapes policies robustness sharpness spectrum"
  folders="$folders $(printf 'theory/tests/test_%s.py ' $mathematics)"
fi
python -m pytest -q -p no:cacheprovider -m "not slow and not gpu" ${TESTS:-$(printf 'tests/test_%s.py ' $computed) $folders}
