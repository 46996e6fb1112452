"""Networks of timm, torchvision and MONAI by name: exact when cut, and helpful when there is none of that name."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import ModelError
from shoal.verdict import Verdict
from shoal.zoo import packages
from tests.conftest import RunOnRanks

SMALL_UNETS = {
    "monai:UNet": {"channels": [4, 8], "strides": [2]},
    "monai:DynUNet": {
        "kernel_size": [3] * 3,
        "strides": [1, 2, 2],
        "upsample_kernel_size": [2, 2],
        "filters": [4, 8, 16],
    },
    "monai:SegResNet": {"init_filters": 8, "blocks_down": [1, 2], "blocks_up": [1]},
    "monai:BasicUNet": {"features": [4, 4, 8, 8, 8, 4]},
}


def need(package: str) -> None:
    try:
        import_module(packages.PACKAGES[package].home)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"{package} cannot be imported ({error}): pip install '.[{package}]' to have it tested")


def verdict(spec: str, input: tuple[int, ...], options: dict[str, Any], plan: str) -> Verdict:
    """Of a rank."""
    torch.manual_seed(0)
    model = shoal.zoo.build(spec, input=input, classes=3, options=options)
    return shoal.verify(model, (2, *input), plan, steps=1)


@pytest.mark.parametrize(
    ("spec", "input", "plan"),
    [
        ("timm:convnext_atto", (1, 32, 32), "data"),
        ("timm:resnet10t", (1, 32, 32), "spatial"),
        ("torchvision:resnet18", (3, 32, 32), "owt"),
        ("torchvision:mobilenet_v3_small", (3, 32, 32), "spatial"),
    ],
)
def test_classifiers(on_ranks: RunOnRanks, spec: str, input: tuple[int, ...], plan: str) -> None:
    need(spec.split(":")[0])
    found = on_ranks(2, verdict, spec, input, {}, plan)[0]
    print(spec, plan, found.worst)
    assert found.passed, found.culprit


@pytest.mark.parametrize("spec", SMALL_UNETS)
def test_volumes_cut_in_space(on_ranks: RunOnRanks, spec: str) -> None:
    need("monai")
    found = on_ranks(
        2,
        verdict,
        spec,
        (1, 32, 16, 16) if spec != "monai:BasicUNet" else (1, 32, 32, 32),
        SMALL_UNETS[spec],
        "spatial",
    )[0]
    print(spec, found.worst)
    assert found.passed, found.culprit
    assert any("d2" in row.cut or "h2" in row.cut or "w2" in row.cut for row in found.rows)


@pytest.mark.parametrize("package", packages.PACKAGES)
def test_an_absent_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, packages.PACKAGES[package].home, None)
    with pytest.raises(ModelError, match=rf"needs {package}, which cannot be imported(.|\n)*pip install {package}"):
        shoal.zoo.build(f"{package}:anything")


def test_another_build_of_torchvision_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_name: str) -> ModuleType:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr("shoal.zoo.packages.importlib.import_module", broken)
    with pytest.raises(
        ModelError, match=r"torchvision::nms(.|\n)*builds of torch and torchvision that belong together"
    ):
        packages.factory("torchvision", "resnet18")


class Segmenter(nn.Module):
    def __init__(self, spatial_dims: int, in_channels: int, out_channels: int, width: int = 4) -> None:
        super().__init__()
        self.given = (spatial_dims, in_channels, out_channels, width)


def test_a_network_is_given_what_it_takes_and_a_wrong_name_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    nets = ModuleType("nets")
    nets.Segmenter, nets.helper = Segmenter, len  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "monai.networks.nets", nets)
    for parent in ("monai", "monai.networks"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    model = shoal.zoo.build("monai:Segmenter", input=(2, 8, 8, 8), classes=5, options={"width": 9})
    assert isinstance(model, Segmenter)
    assert model.given == (3, 2, 5, 9)
    with pytest.raises(ModelError, match=r"monai has no network 'segmenter'\.\nDid you mean 'Segmenter'\?"):
        shoal.zoo.build("monai:segmenter")
    with pytest.raises(ModelError, match=r"'helper'\.\nLook it up"):
        shoal.zoo.build("monai:helper")
