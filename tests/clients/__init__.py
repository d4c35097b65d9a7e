"""Programs that people already run, as they are and with torch_sink's lines added: the table of docs/works_with.md.

| file | programs |
|---|---|
| `client.py` | what a program is, and what comparing its two runs tells |
| `scripts.py` | in the manner of public scripts: ImageNet, transfer learning, MAE |
| `crops.py` | in the manner of public scripts: several crops of an image (DINO, MoCo, SimCLR, BYOL, VICReg) |
| `references.py` | in the manner of torchvision's references: classification, segmentation, detection |
| `tutorials.py` | in the manner of PyTorch's tutorials and of pytorch/examples, one technique each |
| `timm_programs.py` | in the manner of timm's train script, ConvNeXt |
| `trainers.py` | libraries that own the loop |
| `loaders.py` | libraries that own the data |
| `augmentations.py` | libraries that own the transforms |
| `alone.py` | runs one program in a process of its own |
"""

import os
from importlib import import_module

from .client import CLIENTS

# Some libraries ask the network for their newest release when they are imported, or for data that are here.
for _name in ("NO_ALBUMENTATIONS_UPDATE", "HF_HUB_OFFLINE"):
    os.environ.setdefault(_name, "1")

# In the order of the table: each enters its programs.
for _module in ("scripts", "crops", "references", "tutorials", "timm_programs", "trainers", "loaders", "augmentations"):
    import_module(f"{__name__}.{_module}")

__all__ = ["CLIENTS"]
