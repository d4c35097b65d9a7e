"""What is seldom asked for is recorded, and made on the CPU path with stock torchvision's bits."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import _functional_tensor as F_tensor
from torchvision.transforms import functional as F
from torchvision.transforms.v2 import functional as F2

import torch_sink
from image.cases import gray_images, rgb_images
from image.check import check_pipeline
from image.uncommon_cases import UNCOMMON
from torch_sink.damage.report import decode_errors, policy_of_thread
from torch_sink.image import reroute
from torch_sink.image.core import settings

pytestmark = pytest.mark.halved


@pytest.mark.parametrize("name", UNCOMMON)
def test_rgb(name: str) -> None:
    check_pipeline(UNCOMMON[name](), rgb_images()[:4], seed=3)


@pytest.mark.parametrize("name", ["v1 mirrored as a whole", "v2 three statistics of a gray image"])
def test_gray(name: str) -> None:
    check_pipeline(UNCOMMON[name](), gray_images(), seed=3)


def test_what_tv_tensors_share() -> None:
    """`tv_tensors.Image(tensor)` is a view of the tensor, also where both are handles."""
    values = []
    for backend, options in (("PIL", {}), ("device", {"device": "cpu"})):
        with torch_sink.image_backend(backend, **options):
            tensor = v1.PILToTensor()(rgb_images()[0]())
            image = tv_tensors.Image(tensor)
            tensor[0, 0, 0] = 77
            values.append((image * 1, image.contiguous() * 1, type(image.contiguous() * 1)))
    assert torch.equal(values[0][0], values[1][0])
    assert torch.equal(values[0][1], values[1][1])
    assert values[0][2] is values[1][2]


WRITES = {
    "normalize": lambda image: F2.normalize(image, [0.5], [0.25], inplace=True),
    "erase": lambda image: F2.erase(image, 0, 0, 2, 2, torch.tensor([[[7.0]]]), inplace=True),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_to_channels_that_share_memory(name: str) -> None:
    """Stock code refuses to write to a gray image of three channels, also to a part of it, but not to what follows."""
    refused = []
    for backend, options in (("PIL", {}), ("device", {"device": "cpu"})):
        with torch_sink.image_backend(backend, **options):
            gray = F2.rgb_to_grayscale(v1.ToTensor()(rgb_images()[0]()), 3)
            for image in (gray, F2.crop(gray, 1, 2, 9, 8), F2.invert(gray)):
                try:
                    WRITES[name](image)
                    refused.append(None)
                except RuntimeError as error:
                    refused.append(str(error))
    assert refused[:3] == refused[3:]
    assert refused[0] is not None
    assert refused[1] is not None
    assert refused[2] is None


SCRIPTED = {
    "AugMix": v1.AugMix,
    "RandAugment": v1.RandAugment,
    "RandomResizedCrop": lambda: v1.RandomResizedCrop([8, 9]),
    "a preprocessing chain": lambda: torch.nn.Sequential(
        v1.Resize([9, 8]), v1.ConvertImageDtype(torch.float32), v1.Normalize([0.5], [0.25])
    ),
}


@pytest.mark.parametrize("name", SCRIPTED)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_scripting_while_the_backend_is_on(name: str) -> None:
    transform = SCRIPTED[name]()
    pixels = torch.randint(0, 256, (3, 14, 17), dtype=torch.uint8)
    with torch_sink.image_backend("device", device="cpu"):
        before, replaced = settings.active, [(place.name, place.stock) for place in reroute._patches.places]
        scripted = torch.jit.script(transform)
        assert settings.active == before
        assert [(place.name, place.stock) for place in reroute._patches.places] == replaced
        torch.manual_seed(5)
        made = scripted(pixels)
        torch.manual_seed(5)
        of_a_handle = scripted(v1.PILToTensor()(rgb_images()[0]()))
    torch.manual_seed(5)
    assert torch.equal(made, transform(pixels))
    torch.manual_seed(5)
    assert torch.equal(of_a_handle, transform(v1.PILToTensor()(rgb_images()[0]())))


FUNCTIONALS = [
    (module, name)
    for module in (F, F2, F_tensor)
    for name, value in sorted(vars(module).items())
    if inspect.isfunction(value) and value.__module__.startswith("torchvision.transforms") and name[0] != "_"
]


def scripted(function: Any) -> str:
    """The type of the error, as of functionals on Pillow images; "" where there is none."""
    try:
        torch.jit.script(function)
    except Exception as error:
        return type(error).__name__
    return ""


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_scripting_functionals_that_were_looked_up_while_the_backend_is_on() -> None:
    with torch_sink.image_backend("device", device="cpu"):
        functions = [getattr(*key) for key in FUNCTIONALS]
        while_on = [scripted(function) for function in functions]
    expected = [scripted(getattr(*key)) for key in FUNCTIONALS]
    assert dict(zip(FUNCTIONALS, while_on, strict=True)) == dict(zip(FUNCTIONALS, expected, strict=True))
    assert [scripted(function) for function in functions] == expected
    assert expected.count("") > 40


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_scripting_what_calls_functionals_that_were_looked_up_while_the_backend_is_on() -> None:
    with torch_sink.image_backend("device", device="cpu"):
        vflip, brightness = F_tensor.vflip, F_tensor.adjust_brightness

        def darker(values: torch.Tensor) -> torch.Tensor:
            return brightness(vflip(values), 0.5)

        within = torch.jit.script(darker)
    pixels = torch.randint(0, 256, (3, 14, 17), dtype=torch.uint8)
    for compiled in (within, torch.jit.script(darker)):
        assert torch.equal(compiled(pixels), darker(pixels))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_scripting_leaves_the_policy_of_a_thread_to_it() -> None:
    with torch_sink.image_backend("device", device="cpu"):
        with policy_of_thread("skip"):
            torch.jit.script(torch.nn.Linear(2, 2))
            assert decode_errors.policy == "skip"
        assert decode_errors.policy == "raise"
        assert settings.active is not None
        assert settings.active.on_decode_error == "raise"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_scripting_a_function_beside_others() -> None:
    """A scripted function finds what stands beside it, whatever stands between it and the compiler."""
    with torch_sink.image_backend("device", device="cpu"):

        def doubled(values: torch.Tensor) -> torch.Tensor:
            return values * 2

        @torch.jit.script
        def twice(values: torch.Tensor) -> torch.Tensor:
            return doubled(doubled(values))

        assert twice(torch.ones(2)).tolist() == [4, 4]
