"""A compiler backend: Inductor, with the random numbers of eager code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload

# Compiled code is cached under the options of the whole model, so they are those of a graph that draws.
OPTIONS: dict[str, Any] = {"fallback_random": True, "layout_optimization": False}


@functools.cache
def backend() -> Callable[..., Any]:
    """The backend, for `torch.compile(..., backend=backend(), options=...)`; the options are to hold `OPTIONS`.

    Every random operator runs as in eager code, and fills its result in the order of its memory. A layout of the
    compiler's choice (channels last for convolutions) would give a dropout mask another order, so graphs in which that
    could happen keep the layout of eager code. All others are compiled as ever.
    """
    from torch._dynamo import register_backend

    compiler: Any = inductor_with_eager_random
    compiler.reset = _reset  # torch._dynamo.reset() calls it
    return register_backend(compiler)


def inductor_with_eager_random(model: fx.GraphModule, inputs: Any, *, options: dict[str, Any]) -> Any:
    """Compile what Dynamo recorded; see `backend`."""
    from torch._inductor import compile_fx, config

    usual_layout: bool = config.layout_optimization

    def compile_graph(graph: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        with config.patch(layout_optimization=usual_layout and not draws_in_memory_order(graph)):
            return compile_fx.compile_fx_inner(graph, *args, **kwargs)

    return compile_fx.compile_fx(model, inputs, inner_compile=compile_graph, config_patches=options)


def _reset() -> None:
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    reset_cudagraph_trees()


def draws_in_memory_order(graph: fx.GraphModule) -> bool:
    """Whether the layout of convolutions could change which element gets which random number.

    It could not for noise without dimensions behind the second one: a number for each sample or channel (stochastic
    depth, `Dropout2d`), dropout of a classifier's features. Operators that hold graphs of their own count as drawing.

    Args:
        graph: of ATen operators, with the fake result of each in `meta["val"]`.
    """
    return any(_draws_in_memory_order(node) for node in graph.graph.nodes if node.op == "call_function")


def _draws_in_memory_order(node: fx.Node) -> bool:
    if isinstance(node.target, HigherOrderOperator):
        return True
    if not isinstance(node.target, OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    if _is_attention_without_dropout(node, node.target):
        return False
    if "val" not in node.meta:
        return True
    results = torch.utils._pytree.tree_leaves(node.meta["val"])
    return any(isinstance(result, Tensor) and any(size != 1 for size in result.shape[2:]) for result in results)


def _is_attention_without_dropout(node: fx.Node, operator: OpOverload) -> bool:
    for place, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[place] if place < len(node.args) else argument.default_value
            return bool(node.kwargs.get("dropout_p", given) == 0)
    return False
