#!/usr/bin/env bash
# sglang_release.sh VERSION  creates .venv-sglang-VERSION: another release of SGLang on a CPU, over the packages of .venv-sglang
#                            (make sglang). To test the capture plugin with it: make test-sglang SGLANG_PYTHON=THAT/bin/python
set -euo pipefail
cd "$(dirname "$0")/.."
version=${1:?usage: sglang_release.sh VERSION}
base=.venv-sglang venv=.venv-sglang-$version
$base/bin/python -m venv --without-pip "$venv"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
below=$("$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "import site; site.addsitedir('$below')" > "$site/zz_base.pth"
install="$base/bin/python -m pip install -q --disable-pip-version-check --no-deps --upgrade --target $site"
$install "sglang==$version"
# Since 0.5.17 these are imported whether they are used or not, and so is sgl_kernel, which exists for GPUs only.
for package in xgrammar apache-tvm-ffi; do
  $install "$("$venv/bin/python" - "$package" <<'PYTHON'
import importlib.metadata
import re
import sys

requirements = importlib.metadata.requires("sglang") or []
print(next(each for each in requirements if re.match(rf"{sys.argv[1]}\b", each)).partition(";")[0])
PYTHON
)"
done
mkdir -p "$site/sgl_kernel"
cat > "$site/sgl_kernel/__init__.py" <<'PYTHON'
"""Stands in for the GPU package: importing works, calling does not."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} exists on a GPU only")

    return missing
PYTHON
echo "$venv/bin/python"
