"""Makes a CUDA-built torchvision importable beside a CPU torch. Run by scripts/setup.sh with the interpreter to repair.

SGLang imports torchvision even for text models. Where an index has only the CUDA build, its C++ part does not load, its
operators stay unregistered, and `import torchvision` fails at the first of them. Their two schemas are all the import
needs. With a CPU build of torchvision nothing is installed, and this file can go once every index serves one.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

_MODULE = '''\
"""Installed by specfleet's scripts/torchvision_shim.py."""
import importlib.abc
import sys


class _Schemas(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                self.library.define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _keep.append(self)
        return None


_keep = []
sys.meta_path.insert(0, _Schemas())
'''


def _imports() -> bool:
    return subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True).returncode == 0


def main() -> int:
    if _imports():
        return 0
    site = Path(sysconfig.get_path("purelib"))
    (site / "_torchvision_schemas.py").write_text(_MODULE)
    (site / "_torchvision_schemas.pth").write_text("import _torchvision_schemas\n")
    if _imports():
        print("torchvision: a CUDA build; its operators' schemas are declared for the CPU")
        return 0
    print("torchvision cannot be imported even with its schemas declared", file=sys.stderr)
    return 3


if __name__ == "__main__":
    sys.exit(main())
