"""Compilation: `JitConfig`, `jit`, compiled loss functions, and a compiler backend with eager code's random numbers."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal, TypeVar, get_args, overload

import torch
from torch import Tensor, fx, nn
from torch._ops import HigherOrderOperator, OpOverload

from torch_sink.common.arguments import check_bool, check_choice, explains_wrong_calls
from torch_sink.errors import add_note
from torch_sink.loop.core.batches import UsualShape, batch_shapes, batch_tensors, tensors_among
from torch_sink.loop.core.history import Reasons, first_line

# Dynamo caches compiled code by the options of the whole model, so these are the options for graphs that draw.
EAGER_RANDOM: dict[str, Any] = {"fallback_random": True, "layout_optimization": False}
Function = TypeVar("Function", bound=Callable[..., Any])
JitLevel = Literal["O0", "O1", "O2"]
ExcMode = Literal["auto", "sink", "no_sink"]


@explains_wrong_calls()
@dataclass(frozen=True)
class JitConfig:
    """How a step is compiled.

    Attributes:
        jit_level: "O0" does not compile, "O1" compiles, "O2" also captures CUDA graphs on CUDA.
        fullgraph: raise at a graph break instead of falling back to eager code.
        dynamic: one compiled function for all batch shapes; else the usual shape is compiled and others run eagerly.
        exc_mode: "sink" captures CUDA graphs, "no_sink" never does, "auto" leaves it to `jit_level`.
        fast_random: let the compiler draw random numbers in its own order; dropout then differs from eager code.
            Without it, a graph with dropout between its convolutions also keeps the memory layout of eager code; for
            speed convert such a model yourself: `model.to(memory_format=torch.channels_last)`.

    Raises:
        ValueError: a value that is not listed.
    """

    jit_level: JitLevel = "O1"
    fullgraph: bool = False
    dynamic: bool = False
    exc_mode: ExcMode = "auto"
    fast_random: bool = False

    def __post_init__(self) -> None:
        check_choice("jit_level", self.jit_level, get_args(JitLevel))
        check_choice("exc_mode", self.exc_mode, get_args(ExcMode))
        for name in ("fullgraph", "dynamic", "fast_random"):
            check_bool(name, getattr(self, name))

    @property
    def captures(self) -> bool:
        """Whether the settings ask for CUDA graphs."""
        return self.exc_mode == "sink" or (self.exc_mode == "auto" and self.jit_level == "O2")


_TOO_LATE = (
    "the compiler failed for a backward pass, inside of it, where the step cannot be run in eager code instead; "
    "torch 2.11 or later can, and mode='eager' compiles nothing"
)
_AHEAD = "force_non_lazy_backward_lowering"  # a setting of the compiler


def compile_function(
    function: Callable[..., Any], config: JitConfig, *, cuda_graphs: bool = False
) -> Callable[..., Any]:
    """Calls torch.compile with the settings of `config`; compilation starts at the first call of the result.

    `cuda_graphs` is always passed on, because an environment variable can change torch's default, and torch's graphs
    cannot be captured inside those of a loop.
    """
    options: dict[str, Any] = {"triton.cudagraphs": cuda_graphs, **({} if config.fast_random else EAGER_RANDOM)}
    compiled: Any = torch.compile(
        function, backend=inductor_backend, fullgraph=config.fullgraph, dynamic=config.dynamic, options=options
    )
    compiled.get_compiler_config = lambda: options  # as torch does for its own backends
    return compiled  # type: ignore[no-any-return]


def with_new_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function with a new code object, by which Dynamo counts recompilations up to its limit."""
    return FunctionType(function.__code__.replace(), function.__globals__, closure=function.__closure__)


def compiler_problem() -> str | None:
    """Why torch.compile cannot work here, or None."""
    try:
        from torch._inductor import cpp_builder

        cpp_builder.get_cpp_compiler()
    except Exception as error:  # any problem has the same remedy
        return f"no working C++ compiler ({first_line(error)})"
    return None


@overload
def jit(fn: Function, *, jit_level: JitLevel = ..., fullgraph: bool = ..., dynamic: bool = ...) -> Function: ...
@overload
def jit(
    fn: None = None, *, jit_level: JitLevel = ..., fullgraph: bool = ..., dynamic: bool = ...
) -> Callable[[Function], Function]: ...
@explains_wrong_calls()
def jit(fn: Any = None, *, jit_level: JitLevel = "O1", fullgraph: bool = False, dynamic: bool = False) -> Any:
    """Compile a function, a method or a module, as `fn = jit(fn)`, `@jit` or `@jit(fullgraph=True)`.

    A module is compiled in place and returned: parameters, attributes, `state_dict`, mode and hooks stay as they are.
    Without a working C++ compiler nothing is compiled, unless `fullgraph=True`.

    Args:
        fn: the function, method or module.
        jit_level: "O0" leaves the function as it is, "O1" compiles it, "O2" lets torch.compile use CUDA graphs too.
        fullgraph: raise at a graph break.
        dynamic: compile once for all shapes.

    Raises:
        ValueError: unknown `jit_level`.
        TypeError: `fn` is not callable, or a class.

    Examples:
        >>> model = jit(torch.nn.Linear(3, 2))
        >>> list(model.state_dict()), model.in_features, model.eval().training
        (['weight', 'bias'], 3, False)
    """
    config = JitConfig(jit_level=jit_level, fullgraph=fullgraph, dynamic=dynamic)
    if fn is None:
        return functools.partial(jit, jit_level=jit_level, fullgraph=fullgraph, dynamic=dynamic)
    if isinstance(fn, (type, staticmethod, classmethod)):
        kind = "class" if isinstance(fn, type) else type(fn).__name__
        raise TypeError(
            f"jit got the {kind} {fn.__name__}; decorate its methods, below @staticmethod or @classmethod, or compile "
            "an instance: model = jit(Model())"
        )
    if not callable(fn):
        raise TypeError(f"jit got {type(fn).__name__}; pass a function or a torch.nn.Module")
    return jit_with(fn, config)


def jit_with(fn: Any, config: JitConfig) -> Any:
    """Compile as `jit` does, with all settings of `config`; if they ask for CUDA graphs, torch.compile makes them."""
    if config.jit_level == "O0" or hasattr(fn, "_torchdynamo_orig_callable"):  # no compilation, or compiled already
        return fn
    if not config.fullgraph and compiler_problem():
        return fn
    cuda_graphs = config.captures and torch.cuda.is_available()
    if isinstance(fn, nn.Module):
        fn._compiled_call_impl = compile_function(_call_of(fn), config, cuda_graphs=cuda_graphs)
        return fn
    return functools.wraps(fn)(compile_function(fn, config, cuda_graphs=cuda_graphs))


def _call_of(module: nn.Module) -> Callable[..., Any]:
    """The function of a module to compile; the compiler runs hooks in Python and compiles the module's forward.

    Dynamo skips forwards of torch.nn, such as Sequential's, unless a function outside torch calls them.
    """
    if not type(module).forward.__module__.startswith("torch."):
        return module._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    return with_new_code(call)


class CompiledLoss:
    """A loss function that is compiled for the usual shape of batches; other shapes run the eager function.

    Recompiling for a short last batch costs tens of seconds and saves milliseconds. If compiling fails, the model's
    buffers and the random generators are restored and the eager function runs.

    Attributes:
        ran_compiled: whether the latest call ran compiled code.
        was_odd: whether its batch had another shape than the usual one.
    """

    def __init__(self, eager: Callable[[Any], Any], model: nn.Module, config: JitConfig, reasons: Reasons) -> None:
        self._eager, self._model, self._config, self._reasons = eager, model, config, reasons
        self._shape = UsualShape()
        # One for each usual shape there was: each has code of its own, whose recompilations Dynamo counts.
        self._compiled: dict[Any, Callable[[Any], Any]] = {}
        self._known: set[Any] = set()  # shapes that the compiler has seen, with the model as it is
        self._flags: Any = None
        self._failed = self.ran_compiled = self.was_odd = False

    def begin(self) -> None:
        """An epoch or an evaluation begins, whose batches may have another shape."""
        self._shape.unsettle()

    def follow(self) -> None:
        """The model may have changed: if other parameters need a gradient, or other modules train, it is recompiled."""
        model = self._model
        flags = [p.requires_grad for p in model.parameters()], [module.training for module in model.modules()]
        if flags != self._flags:
            self._flags = flags
            self._known.clear()

    def __call__(self, batch: Any, leaves: list[Any] | None = None) -> Any:
        """The loss of a batch; `leaves` are those of the batch, where they are known."""
        shapes = None
        self.ran_compiled = self.was_odd = False
        if not self._config.dynamic and not self._failed:
            tensors = batch_tensors(batch) if leaves is None else tensors_among(leaves)
            shapes = batch_shapes(tensors)
            self.was_odd = not self._shape.accepts(shapes)
        if self._failed or self.was_odd:
            if self.was_odd:
                self._reasons.count("batches of another shape than the usual one ran uncompiled")
            return self._eager(batch)
        if shapes not in self._compiled:
            eager = self._eager
            self._compiled[shapes] = compile_function(with_new_code(lambda batch: eager(batch)), self._config)
        if shapes not in self._known:
            self._known.add(shapes)
            return self._first(self._compiled[shapes], batch)
        self.ran_compiled = True
        return self._compiled[shapes](batch)

    def _first(self, compiled: Callable[[Any], Any], batch: Any) -> Any:
        """A call in which the compiler runs: for the backward pass too, if this torch can do that before it comes."""
        buffers = [buffer.detach().clone() for buffer in self._model.buffers()]
        draws = _RandomState(self._model)
        try:
            with warnings.catch_warnings(), _backward_compiled_ahead():
                # A program that turns warnings into errors does not mean those of the compiler about itself.
                warnings.filterwarnings("default", module=r"torch\b")
                result = compiled(batch)
            self.ran_compiled = True
            return result
        except Exception as error:
            is_compilers = type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "torch._functorch"))
            if self._config.fullgraph or not is_compilers:
                raise
            self._failed = True
            cause = getattr(error, "inner_exception", error)
            self._reasons.warn(f"compiling failed, so steps run in eager code: {first_line(cause)}")
        draws.restore()
        with torch.no_grad():
            for buffer, value in zip(self._model.buffers(), buffers, strict=True):
                buffer.copy_(value)
        return self._eager(batch)


def _backward_compiled_ahead() -> AbstractContextManager[Any]:
    """A context in which the compiler compiles a backward pass with its forward pass, where a failure can be undone.

    Otherwise it does so inside of `backward()`, on CUDA in a thread of autograd. torch 2.8 knows no other way.
    """
    from torch._functorch import config

    return config.patch({_AHEAD: True}) if hasattr(config, _AHEAD) else nullcontext()


class _RandomState:
    """The state of the generators that a model draws from: the CPU's, and those of its CUDA devices."""

    def __init__(self, model: nn.Module) -> None:
        devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
        self._cpu = torch.get_rng_state()
        self._states = {device: torch.cuda.get_rng_state(device) for device in devices}

    def restore(self) -> None:
        """Put it back."""
        torch.set_rng_state(self._cpu)
        for device, state in self._states.items():
            torch.cuda.set_rng_state(state, device)


def inductor_backend(model: fx.GraphModule, inputs: Any, *, options: dict[str, Any]) -> Any:
    """A compiler backend: Inductor, with the random numbers of eager code if `EAGER_RANDOM` is among the options.

    Every random operator then runs as in eager code, and fills its result in memory order. A layout of the compiler's
    choice (channels last for convolutions) would give a dropout mask another order, so graphs in which that could
    happen keep the layout of eager code. All others are compiled as usual.

    Warnings of the compiler stay warnings even if the program turns them into errors, which would be taken for a
    failure to compile.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import compile_fx, config

    usual_layout, is_eager = config.layout_optimization, EAGER_RANDOM.items() <= options.items()

    def compile_graph(graph: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        # Called for the backward pass too, after the function around it has returned.
        is_kept = is_eager and any(_draws_in_memory_order(node) for node in graph.graph.nodes)
        with config.patch(layout_optimization=usual_layout and not is_kept), warnings.catch_warnings():
            warnings.simplefilter("default")
            try:
                return compile_fx.compile_fx_inner(graph, *args, **kwargs)
            except Exception as error:
                if kwargs.get("is_backward") and not hasattr(functorch_config, _AHEAD):
                    add_note(error, _TOO_LATE)
                raise

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        return compile_fx.compile_fx(model, inputs, inner_compile=compile_graph, config_patches=options)


def _draws_in_memory_order(node: fx.Node) -> bool:
    """Whether the memory layout could change which element gets which random number; True if a node contains graphs.

    Not so for noise of at most two dimensions: one number per sample or channel, or dropout of a classifier's features.
    """
    if isinstance(node.target, HigherOrderOperator):
        return True
    if not isinstance(node.target, OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[place] if place < len(node.args) else argument.default_value
            if node.kwargs.get("dropout_p", given) == 0:  # attention without dropout
                return False
    if "val" not in node.meta:
        return True
    results = torch.utils._pytree.tree_leaves(node.meta["val"])
    return any(isinstance(result, Tensor) and any(size != 1 for size in result.shape[2:]) for result in results)
