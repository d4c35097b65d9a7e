"""Kernels of the "CUDA" key: each queues the CPU's kernel for the same operator, on the same memory."""

from __future__ import annotations

import ctypes
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from .random_numbers import run_with

if TYPE_CHECKING:
    from .device import FakeCuda

# Operators without a kernel of their own for CUDA whose common code would choose one that the CPU lacks, or would
# resize its result.
ALSO = (
    "aten::copy_",
    "aten::convolution",
    "aten::convolution_backward",
    "aten::arange",
    "aten::arange.start",
    "aten::arange.start_step",
    "aten::linspace",
    "aten::randperm.generator",
)
# The host needs the result, or its shape, before it can go on.
WAITING = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_consecutive",
    "aten::bincount",
    "aten::equal",
}
# Of those that torch names in `use_deterministic_algorithms`, what models are likely to use.
NONDETERMINISTIC = {
    "aten::_adaptive_avg_pool2d_backward",
    "aten::adaptive_max_pool2d_backward.grad_input",
    "aten::cumsum.out",
    "aten::kthvalue.values",
    "aten::nll_loss2d_forward",
    "aten::upsample_bicubic2d_backward.grad_input",
    "aten::upsample_bilinear2d_backward.grad_input",
}
# Of cuBLAS, which works in memory that it keeps for each stream.
PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addmv"}
MASKED = {"aten::index.Tensor", "aten::_index_put_impl_"}
FACTORIES = {"aten::empty.memory_format", "aten::empty_strided"}
# Operators that take tensors of the host beside those of the device: copies, and indices.
ACROSS_DEVICES = {
    "aten::copy_",
    "aten::index.Tensor",
    "aten::_index_put_impl_",
    "aten::index_put_",
    "aten::record_stream",
    "aten::set_.source_Tensor",
}
INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
# Data types that the CPU has kernels for and CUDA has not, by the operator without its overload: those that torch's own
# list of operators (`op_db`) states, for what models are likely to use.
LACKING = {
    **{name: INTEGERS for name in ("mm", "addmm", "bmm", "baddbmm", "addmv", "dot", "vdot", "convolution")},
    **{name: INTEGERS for name in ("max_pool2d_with_indices", "max_pool3d_with_indices")},
    **{name: {torch.int64} for name in ("avg_pool2d", "avg_pool3d")},
    **{name: {torch.uint8} for name in ("upsample_bilinear2d", "upsample_bicubic2d")},
    **{name: {torch.uint8} for name in ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")},
    "histc": {torch.float16, torch.bfloat16},
}
# Which operators CUDA has for these depends on the release: few, beside those that make, fill and copy them.
WIDE_UNSIGNED = {torch.uint16, torch.uint32, torch.uint64}
FOR_WIDE_UNSIGNED = {"copy_", "fill_", "zero_", "set_", "resize_", "record_stream", "_to_copy", "clone", "cat"}


class Kernels:
    """Replaces the kernels of the "CUDA" key, for the life of the process or until `remove`."""

    def __init__(self) -> None:
        self._library = torch.library.Library("aten", "IMPL", "CUDA")
        self.cuda: FakeCuda | None = None
        registered = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is replaced
            for name in {n for n in registered if n.startswith("aten::") and not _is_view(n)}.union(ALSO):
                self._library.impl(name, partial(self._call, name), allow_override=True)

    def remove(self) -> None:
        """Put torch's own kernels back."""
        self._library._destroy()

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if self.cuda is None:
            raise RuntimeError(f"{name} on a CUDA device that is none any more")
        return run_kernel(self.cuda, name, args, kwargs)


def _is_view(name: str) -> bool:
    """Whether an operator gives another view of its argument, which needs no memory and no kernel."""
    try:
        schema = torch._C._get_schema(*(name.split(".") if "." in name else (name, "")))
    except RuntimeError:
        return False
    returned = [r.alias_info for r in schema.returns if r.alias_info is not None]
    sets = name.startswith("aten::set_")
    return sets or (bool(returned) and not any(info.is_write for info in returned))


def _operator(name: str) -> Any:
    space, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, space), packet), overload or "default")


def run_kernel(cuda: FakeCuda, name: str, args: Any, kwargs: Any) -> Any:
    """What the dispatcher calls for an operator on tensors of the fake device."""
    cuda.count(name)
    if name in FACTORIES:
        return _allocate(cuda, name, args, kwargs)
    _check_tensors(name, args, kwargs)
    if name == "aten::copy_":
        return _copy(cuda, *args, **kwargs)
    if name == "aten::record_stream":
        cuda.record_stream(args[0], cuda.stream_of(args[1]))
        return None
    if name in NONDETERMINISTIC and torch.are_deterministic_algorithms_enabled():
        text = f"{name} does not have a deterministic implementation"
        if not torch.is_deterministic_algorithms_warn_only_enabled():
            raise RuntimeError(text)
        warnings.warn(text, UserWarning, stacklevel=2)
    if name.startswith("aten::_foreach") and name.endswith(".Tensor") and args[0][0].dtype != args[1].dtype:
        cuda.calls["one tensor at a time"] += len(args[0])
    operator = _operator(name)
    if name in WAITING or (name in MASKED and _has_mask(args[1])):
        cuda.host_waits(name, stream=_stream(cuda, args))
        cuda.drain_stream(_stream(cuda, args))
        return _waiting(cuda, operator, args, kwargs)
    return _queue(cuda, operator, args, kwargs)


def _check_tensors(name: str, args: Any, kwargs: Any) -> None:
    """What CUDA's kernels say of tensors on several devices, and of data types that they were not made for.

    Raises:
        RuntimeError: a tensor with dimensions lies on the host, or two on different devices.
        NotImplementedError: there is no kernel for a data type.
    """
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if name not in ACROSS_DEVICES:
        # A number may be a tensor of the host, but not where tensors are compared as a whole.
        devices = {str(leaf.device) for leaf in tensors if leaf.is_cuda or leaf.dim() or name == "aten::equal"}
        if len(devices) > 1:
            found = " and ".join(sorted(devices))
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {found} ({name})")
    operator = name.removeprefix("aten::").partition(".")[0]
    dtypes = {leaf.dtype for leaf in tensors}
    lacking = dtypes & LACKING.get(operator, set())
    if operator not in FOR_WIDE_UNSIGNED:
        lacking |= dtypes & WIDE_UNSIGNED
    if lacking:
        raise NotImplementedError(f'"{operator}_cuda" not implemented for {min(map(str, lacking))}')


def _allocate(cuda: FakeCuda, name: str, args: Any, kwargs: Any) -> Tensor:
    size, dtype = args[0], kwargs.get("dtype") or torch.get_default_dtype()
    if name == "aten::empty_strided":
        stride = args[1]
    else:
        layout = kwargs.get("memory_format") or torch.contiguous_format
        stride = torch.empty(size, dtype=dtype, device="meta", memory_format=layout).stride()
    return cuda.allocator.tensor(size, stride, dtype, cuda.device_of(kwargs.get("device")))


def _has_mask(indices: Any) -> bool:
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _stream(cuda: FakeCuda, *arguments: Any) -> Any:
    for leaf in tree_leaves(arguments):
        if isinstance(leaf, Tensor) and leaf.is_cuda:
            return cuda.current_stream(leaf.device)
        if isinstance(leaf, torch.device) and leaf.type == "cuda":
            return cuda.current_stream(leaf)
    return cuda.current_stream()


def _on_host(cuda: FakeCuda, value: Any) -> Any:
    """An argument as the CPU's kernel takes it."""
    if isinstance(value, Tensor):
        return cuda.allocator.on_host(value) if value.is_cuda else value
    return _on_cpu(value)


def on_host(cuda: FakeCuda, values: Any) -> tuple[Any, ...]:
    """Some values, with tensors of the device as the CPU sees their memory."""
    return tuple(_on_host(cuda, value) for value in values)


def check_pointers(cuda: FakeCuda, arguments: Any) -> None:
    """What becomes of the arguments of a Triton kernel on a device: its launcher asks the driver for their addresses.

    Raises:
        ValueError: a tensor lies on the host, in memory that is not page-locked.
        RuntimeError: on a device that is not the current one, on which the kernel runs.
    """
    for number, argument in enumerate(arguments):
        if not isinstance(argument, Tensor) or argument.data_ptr() == 0:
            continue
        if argument.is_cuda and argument.device.index != cuda.index_of():
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if not argument.is_cuda and not cuda.is_pinned(argument):
            raise ValueError(f"Pointer argument (at {number}) cannot be accessed from Triton (cpu tensor?)")


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return None if isinstance(value, torch.Generator) else value


def _host_arguments(cuda: FakeCuda, args: Any, kwargs: Any) -> tuple[Any, Any]:
    leaves, spec = tree_flatten((args, kwargs))
    return tree_unflatten([_on_host(cuda, leaf) for leaf in leaves], spec)


def _waiting(cuda: FakeCuda, operator: Any, args: Any, kwargs: Any) -> Any:
    host_args, host_kwargs = _host_arguments(cuda, args, kwargs)
    stream = _stream(cuda, args)
    return tree_map_only(
        Tensor, lambda result: _to_device(cuda, result, stream.device), operator(*host_args, **host_kwargs)
    )


def _to_device(cuda: FakeCuda, value: Tensor, device: torch.device) -> Tensor:
    result = cuda.allocator.tensor(value.shape, value.stride(), value.dtype, device)
    cuda.allocator.on_host(result).copy_(value)
    return result


def _queue(cuda: FakeCuda, operator: Any, args: Any, kwargs: Any) -> Any:
    """Allocate the results now, and let the stream fill them later."""
    stream = _stream(cuda, args, kwargs)
    given = _aliased_arguments(operator, args, kwargs)
    for position, result in given.items():
        if isinstance(result, Tensor) and result.numel() == 0 and "out" in operator._overloadname:
            _grow(cuda, result, _shapes(operator, args, kwargs)[position])
    host_args, host_kwargs = _host_arguments(cuda, args, kwargs)
    if len(given) == len(operator._schema.returns):
        results, fresh = given, []
    else:
        shapes = _shapes(operator, args, kwargs)
        results = [
            given[position]
            if position in given
            else tree_map_only(Shape, partial(_like, cuda, stream), shape, is_leaf=_is_shape)
            for position, shape in enumerate(shapes)
        ]
        fresh = [position for position in range(len(results)) if position not in given]
    targets = [tree_map_only(Tensor, cuda.allocator.on_host, results[position]) for position in fresh]

    function = _for_numbers(operator, args)

    def run() -> None:
        values = function(*host_args, **host_kwargs)
        values = values if len(operator._schema.returns) > 1 else (values,)
        for target, position in zip(targets, fresh, strict=True):
            for memory, value in zip(tree_leaves(target), tree_leaves(values[position]), strict=True):
                if isinstance(memory, Tensor):
                    memory.copy_(value)

    if operator._schema.name in PRODUCTS:
        run = cuda.allocator.with_workspace(stream, run)
    if torch.Tag.nondeterministic_seeded in operator.tags:
        run = cuda.with_draws(stream, run)
    stream.issue(run, operator._schema.name)
    if not operator._schema.returns:
        return None
    return results[0] if len(operator._schema.returns) == 1 else tuple(results[i] for i in range(len(results)))


def _grow(cuda: FakeCuda, result: Tensor, shape: Shape) -> None:
    """Give an empty result the memory that its operator would make for it."""
    memory = cuda.allocator.tensor(*shape, result.device)
    result.set_(memory.untyped_storage(), 0, shape.shape, shape.stride)


def _aliased_arguments(operator: Any, args: Any, kwargs: Any) -> dict[int, Any]:
    """Results that are arguments, by their position."""
    places = {}
    for position, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            places[tuple(sorted(argument.alias_info.before_set))] = value
    return {
        position: places[tuple(sorted(result.alias_info.before_set))]
        for position, result in enumerate(operator._schema.returns)
        if result.alias_info is not None and tuple(sorted(result.alias_info.before_set)) in places
    }


def _for_numbers(operator: Any, args: Any) -> Any:
    """The operator; where the dispatcher has unwrapped a number in the place of a tensor, the overload that takes it."""
    takes_tensors = [str(argument.type) == "Tensor" for argument in operator._schema.arguments]
    numbers = any(takes and isinstance(value, (int, float)) for takes, value in zip(takes_tensors, args, strict=False))
    return operator._overloadpacket if numbers else operator


class Shape(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


_known_shapes: dict[Any, tuple[Any, ...]] = {}


def _shapes(operator: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """The results without their values, found once with zeros (the meta device would load a symbolic algebra)."""
    leaves, spec = tree_flatten((args, kwargs))
    key = (operator, str(spec), *((type(leaf), _shape(leaf)) for leaf in leaves))
    if key not in _known_shapes:
        trial_args, trial_kwargs = tree_unflatten([_zeros(leaf) for leaf in leaves], spec)
        function = _for_numbers(operator, args)
        result = run_with(0, 0, lambda: function(*trial_args, **trial_kwargs))
        results = result if len(operator._schema.returns) > 1 else (result,)
        _known_shapes[key] = tree_map_only(Tensor, _shape, results)
    return _known_shapes[key]


def _shape(value: Any) -> Any:
    return Shape(tuple(value.shape), value.stride(), value.dtype) if isinstance(value, Tensor) else value


def _is_shape(value: Any) -> bool:
    return isinstance(value, Shape)


def _zeros(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu").zero_()
    return _on_cpu(value)


def _like(cuda: FakeCuda, stream: Any, shape: Shape) -> Tensor:
    return cuda.allocator.tensor(*shape, stream.device)


def _unowned(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, which it does not keep: as a copy that is under way reads it."""
    memory = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


def _copy(cuda: FakeCuda, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copies between host and device: in order only with page-locked memory, and the host goes on only if asked to."""
    stream = cuda.current_stream(target.device if target.is_cuda else source.device)
    host_side = source if not source.is_cuda else target if not target.is_cuda else None
    to, of = _on_host(cuda, target), _on_host(cuda, source)
    if host_side is None:
        if target.device != source.device:
            cuda.queues.order(cuda.current_stream(source.device), stream)
        stream.issue(lambda: to.copy_(of), "aten::copy_")
    elif cuda.is_pinned(host_side) and non_blocking:
        if cuda.is_registered(source):
            of = _unowned(source)  # torch's own page-locked memory waits for copies before it is used again
        stream.issue(lambda: to.copy_(of), "memcpy")
    elif not source.is_cuda:
        staged = source.clone()  # the driver takes pageable memory over before it returns
        cuda.host_waits("copy from pageable memory", stream=stream, counts=not non_blocking)
        stream.issue(lambda: to.copy_(staged), "memcpy")
        if not non_blocking:
            cuda.drain_stream(stream)
    else:
        cuda.host_waits("copy to the host", stream=stream)
        stream.issue(lambda: to.copy_(of), "memcpy")
        cuda.drain_stream(stream)
    return target
