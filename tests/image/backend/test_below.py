"""What calls torch below Python, or looks at tensors before it calls: it finds the values that stock code has."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import joblib
import numpy as np
import pytest
import torch
from functorch.compile import aot_function, nop
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch.utils.weak import WeakTensorKeyDictionary
from torchvision import tv_tensors
from torchvision.transforms import functional as F
from torchvision.transforms import v2

import torch_sink
from image.cases import encoded, opener
from image.check import assert_same_bits
from torch_sink.image.core import settings
from torch_sink.image.handles.lazy import Lazy
from torch_sink.image.handles.tensor import HANDLES

pytestmark = pytest.mark.halved

OPEN = opener(encoded(31, 27, 4))


def image() -> torch.Tensor:
    return F.to_tensor(F.resize(OPEN(), [20, 20]))


def tv_image() -> torch.Tensor:
    return v2.functional.to_dtype(v2.functional.to_image(F.resize(OPEN(), [20, 20])), torch.float32, True)


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "image": image,
    "tv_tensors.Image": tv_image,
    "batch": lambda: next(iter(DataLoader([image(), image()], 2))),  # type: ignore[arg-type]
    "batch of one": lambda: image()[None],
    "stack": lambda: torch.stack([image(), image()]),
    "part of a stack": lambda: torch.stack([image(), image()])[1],
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def unmoved(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Makes images and batches that wait for a device."""
    with torch_sink.image_backend("device", device="cpu"):
        monkeypatch.setattr(type(settings.settled()), "executes_at_once", False)

        def make(kind: str) -> Any:
            made = KINDS[kind]()
            assert isinstance(made, Lazy)
            return made

        yield make


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


def with_data(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    tensor.data = data
    return tensor.detach().clone()


def gradient_through(function: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Any:
    x.requires_grad_()
    function(x).sum().backward()
    return x.grad


def loaded(x: torch.Tensor) -> torch.Tensor:
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(x.shape))
    module.load_state_dict({"weight": x}, assign=True)
    return module.weight.detach()


def used_then_with_gradient(x: torch.Tensor) -> Any:
    """C++ code holds the image while its values are made."""
    return Twice.apply(x) + 0, gradient_through(Twice.apply, x)


def blurred_under_autocast(x: torch.Tensor) -> torch.Tensor:
    blurred = F.gaussian_blur(x, 3)
    with torch.autocast("cpu"):
        return blurred.flatten()


def made_without_gradients(x: torch.Tensor) -> Any:
    with torch.inference_mode():
        x.sum()
    return gradient_through(torch.sin, x)


def written_under_vmap(x: torch.Tensor) -> Any:
    torch.vmap(lambda row: row * 2)(x)
    x.mul_(3)
    return torch.from_dlpack(torch._C._to_dlpack(x)).clone(), x.clone()  # type: ignore[attr-defined]


def saved(x: torch.Tensor) -> Any:
    buffer = io.BytesIO()
    torch.save({"x": x}, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)["x"].flatten()


def swapped(x: torch.Tensor) -> Any:
    other = torch.zeros(2)
    torch.utils.swap_tensors(x, other)
    return x, other + 0


def held_weakly(x: torch.Tensor) -> Any:
    held, seen = weakref.ref(x), WeakTensorKeyDictionary({x: "seen"})
    x.sum()
    return held() is x, seen[x]


def through_a_queue(x: torch.Tensor) -> Any:
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    queue.put(x)
    return queue.get() + 0


def differentiated(x: torch.Tensor) -> Any:
    """Inside of a transform of functions, whose wrappers end with it."""
    tangent = torch.func.jvp(lambda y: (y * x).sum(), (torch.ones(x.shape),), (x,))
    return tangent, torch.func.grad(lambda y: (y * x).sum())(torch.ones(x.shape)), x + 0


def graph_of(x: torch.Tensor) -> str:
    """What `SummaryWriter.add_graph` writes."""
    from torch.utils.tensorboard import _pytorch_graph as pytorch_graph  # which loads TensorBoard

    return str(pytorch_graph.graph(nn.Conv2d(3, 2, 3), x)[0])


USES: dict[str, Callable[[Any], Any]] = {
    "questions with names": lambda x: [torch.numel(input=x), torch.is_complex(input=x), torch.is_floating_point(input=x)],
    "derivatives": differentiated,
    "a derivative of itself": lambda x: torch.func.jvp(torch.sin, (x,), (x,)),
    "vmap": lambda x: torch.func.vmap(torch.sin)(x),
    "vmap of a gradient": lambda x: torch.func.vmap(torch.func.grad(lambda y: (y * y).sum()))(x),
    "forward mode": lambda x: torch.autograd.functional.jvp(torch.sin, x, torch.ones(x.shape), strict=True),
    "another type": lambda x: torch.Tensor.as_subclass(x, tv_tensors.Mask) + 0,
    "swapped": swapped,
    "copied": lambda x: [copy.deepcopy(x) + 0, copy.copy(x) + 0, x + 0],
    "pickled": lambda x: [pickle.loads(pickle.dumps(x, protocol)) + 0 for protocol in (2, pickle.HIGHEST_PROTOCOL)],
    "hashed": lambda x: [joblib.hash(x) == (x.sum(), joblib.hash(x))[1], joblib.hash(x.numpy())],
    "in shared memory": lambda x: [x.share_memory_() is x, x.is_shared(), x + 0],
    "held weakly": held_weakly,
    "numpy": lambda x: [x.numpy().tolist(), np.asarray(x).tolist(), np.from_dlpack(x).tolist(), x.__array__().tolist()],
    "no CUDA array": lambda x: hasattr(x, "__cuda_array_interface__"),
    "set": lambda x: torch.zeros(2).set_(x) + 0,
    "set to its storage": lambda x: torch.zeros(2).set_(x.untyped_storage(), 0, x.shape) + 0,
    "collated": lambda x: [torch.utils.data.default_collate([x, x]) + 0, torch.utils.data.default_convert({"x": x})["x"] + 0],
    "through a queue": through_a_queue,
    "graph of a model": graph_of,
    "compiled ahead": lambda x: aot_function(lambda y: y * 2, nop)(x.as_subclass(torch.Tensor)),
    "mask added": lambda x: [x + (x > 0.5), torch.add(x, x > 0.5), x.add_(x > 0.5)],
    "multiple added in place": lambda x: x.flatten(0, 1).add_(x.flatten(0, 1), alpha=2),
    "number added in place, by position": lambda x: x.add_(1, 2).flatten(),
    "data": lambda x: with_data(torch.zeros(2), x),
    "data of a parameter": lambda x: with_data(nn.Parameter(torch.zeros(2)), x),
    "dlpack": lambda x: torch.from_dlpack(torch.utils.dlpack.to_dlpack(x)).clone(),
    "its own dlpack": lambda x: torch.from_dlpack(x).clone(),
    "storage": lambda x: bytes(x.untyped_storage()),
    "pointer": lambda x: x.data_ptr() == x.untyped_storage().data_ptr(),
    "parameter": lambda x: nn.Parameter(x).detach(),
    "buffer": lambda x: nn.Buffer(x) + 0,
    "loaded into a module": loaded,
    "gradient of a function": lambda x: gradient_through(Twice.apply, x),
    "used, then the gradient of a function": used_then_with_gradient,
    "checkpoint": lambda x: gradient_through(lambda y: checkpoint(torch.sin, y, use_reentrant=True), x),
    "vmap, then written": written_under_vmap,
    "saved": saved,
    "traced": lambda x: torch.jit.trace(lambda y: y * 2, x, check_trace=False)(torch.ones_like(x)),
    "made into a graph": lambda x: torch.fx.experimental.proxy_tensor.make_fx(lambda y: y * 2)(x)(torch.ones_like(x)),
    "blurred under autocast": blurred_under_autocast,
    "made in inference mode": made_without_gradients,
}  # fmt: skip


def assert_same(made: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert_same_bits(made.materialize() if type(made) in HANDLES else made, expected)
    elif isinstance(expected, (tuple, list)):
        for one, other in zip(made, expected, strict=True):
            assert_same(one, other)
    else:
        assert made == expected


@pytest.mark.filterwarnings(
    "ignore:`torch.jit:FutureWarning",
    "ignore:`torch.jit:DeprecationWarning",
    "ignore:.*This overload of add_:UserWarning",
)
@pytest.mark.parametrize("use", USES)
@pytest.mark.sampled(100)
def test_what_reads_memory_finds_the_values(kind: str, use: str, unmoved: Callable[[str], Any]) -> None:
    with torch_sink.image_backend("PIL"):
        expected = USES[use](KINDS[kind]())
    assert_same(USES[use](unmoved(kind)), expected)


def test_an_image_whose_values_were_used_is_an_ordinary_tensor(kind: str, unmoved: Callable[[str], Any]) -> None:
    x = unmoved(kind)
    x.note = "kept"
    names = {x: "found"}
    x.sum()
    assert type(x) is (tv_tensors.Image if kind == "tv_tensors.Image" else torch.Tensor)
    assert vars(x) == {"note": "kept"}
    assert names[x] == "found"


def test_memory_that_is_not_there_is_never_read(kind: str, unmoved: Callable[[str], Any]) -> None:
    """A tensor that got it past all stand-ins, as C++ code may do it."""
    tensor = torch.zeros(2)
    torch._C.TensorBase.data.__set__(tensor, unmoved(kind))  # type: ignore[attr-defined]
    for read in (tensor.sum, tensor.tolist, tensor.data_ptr, tensor.zero_, tensor.numpy):
        with pytest.raises(RuntimeError, match="do not exist yet"):
            read()


MODEL = nn.Conv2d(3, 2, 3)


@pytest.mark.parametrize("kind", ["batch", "batch of one", "stack"], indirect=True)
def test_an_exported_model_has_no_picture_in_it(kind: str, unmoved: Callable[[str], Any]) -> None:
    exported = torch.export.export(MODEL, (unmoved(kind),)).module()
    other = torch.rand(KINDS[kind]().shape)
    torch.testing.assert_close(exported(other), MODEL(other))


class Holder:
    x: Any


def compiled(function: Callable[..., Any], frames: list[Any], **settings: Any) -> Any:
    """Traced and guarded as by any backend; the graph runs as it is."""

    def backend(graph: Any, inputs: Any) -> Any:
        frames.append(graph)
        return graph.forward

    return torch.compile(function, backend=backend, **settings)


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def needs_compilable(kind: str) -> None:
    """Skips where stock code's tensor cannot be compiled as a whole: torch 2.8 breaks off at a `tv_tensors.Image`."""
    if kind == "tv_tensors.Image":
        try:
            compiled(lambda x: x * 2, [], fullgraph=True)(tv_tensors.Image(torch.zeros(3, 2, 2)))
        except torch._dynamo.exc.Unsupported:
            pytest.skip("this torch compiles nothing of a tv_tensors.Image")
        torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_compiled_function_gets_real_tensors(kind: str, unmoved: Callable[[str], Any]) -> None:
    needs_compilable(kind)
    expected = KINDS[kind]().as_subclass(torch.Tensor) + 0
    frames: list[Any] = []
    function = compiled(lambda x: (x * 2 + 1).sum(), frames, fullgraph=True)
    for _ in range(3):
        assert torch.equal(function(unmoved(kind)), (expected * 2 + 1).sum())
    assert len(frames) == 1  # its guards hold for the next one


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_compiled_function_finds_real_tensors(kind: str, unmoved: Callable[[str], Any]) -> None:
    needs_compilable(kind)
    expected = KINDS[kind]().as_subclass(torch.Tensor) + 0
    held, held.x = Holder(), unmoved(kind)
    closed = unmoved(kind)
    function = compiled(lambda holder, y: holder.x * 2 + closed.detach() * y, [], fullgraph=True)
    for _ in range(2):
        assert torch.equal(function(held, 3.0), expected * 2 + expected * 3)


@pytest.mark.usefixtures("_fresh_compiler")
def test_functionals_are_compiled_without_a_warning() -> None:
    image = torch.rand(3, 4, 5)
    flip, normalize = v2.functional.horizontal_flip, v2.functional.normalize
    function = compiled(lambda x: normalize(flip(x), [0.5] * 3, [0.5] * 3), [], fullgraph=True)
    with torch_sink.image_backend("device", device="meta"):
        for _ in range(2):
            assert torch.equal(function(image), (image.flip(-1) - 0.5) / 0.5)


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_before_the_backend_was_set() -> None:
    with torch_sink.image_backend("PIL"):
        expected = image() * 2 + 1
        function = compiled(lambda x: x * 2 + 1, [], fullgraph=True)
    with torch_sink.image_backend("device", device="cpu"):
        for _ in range(3):
            assert torch.equal(function(image()), expected)


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_compiled_model_gets_real_tensors(unmoved: Callable[[str], Any]) -> None:
    expected = MODEL(unmoved("batch") + 0)
    frames: list[Any] = []
    model = compiled(MODEL, frames, fullgraph=True)
    for _ in range(2):
        assert torch.equal(model(unmoved("batch")), expected)
    assert len(frames) == 1
