"""What autograd needs to know of a run when its backward comes, and when another one follows.

Each call of a training graph hands a :class:`RepeatedForward` to its place in autograd's graph. ONNX Runtime keeps
nothing after the first backward, so that the forward runs again for a second one: the object holds references to the
inputs of the run, as long as PyTorch would let another backward come.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import onnx
import torch

from ort_zero.ortmodule.compat import ortmodule as ort_compat
from ort_zero.ortmodule.compat import torch_ddp
from ort_zero.ortmodule.compat.torch_autograd import has_backward_hooks
from ort_zero.ortmodule.compat.torch_modules import buffer_table, is_batch_norm, versions_of
from ort_zero.ortmodule.runtime.built_graph import BuiltGraph
from ort_zero.ortmodule.runtime.export.excluded_modules import ExcludedModules
from ort_zero.ortmodule.runtime.export.random_states import GlobalStates
from ort_zero.ortmodule.runtime.export.restored_buffers import BufferStates
from ort_zero.ortmodule.runtime.gradients_of_gradients import refused
from ort_zero.ortmodule.runtime.operators import torch_fallback
from ort_zero.ortmodule.runtime.result_dependencies import ResultDependencies, inputs_of_backward
from ort_zero.utils.text import shortened

_RANDOM = frozenset(
    {"Dropout", "BitmaskDropout", "BiasDropout", "BitmaskBiasDropout", "Bernoulli", "Multinomial"}
    | {f"Random{kind}{like}" for kind in ("Normal", "Uniform") for like in ("", "Like")}
)
"""ONNX operators that draw from a generator of ONNX Runtime."""
_DROPOUT_INPUTS = {"Dropout": 1, "BitmaskDropout": 1, "BiasDropout": 3, "BitmaskBiasDropout": 3}
"""At which input of a node with dropout the probability is; whether it is on comes behind it."""
_CURE = "add the losses up and call backward once, or call the model again"


class RepeatedForward:
    """Knows what the backward of one run leads to, and runs its forward again.

    Args:
        graph: is about to run the call.
        inputs: of that run, in the graph's order.
        excluded: submodules of the model that run in PyTorch.
        generators: states of the generators before the run; None if no code in PyTorch draws from them.
        draw_in_torch: called when a run is repeated whose masks ONNX Runtime has drawn: PyTorch draws the next ones.
        in_torch: returns, for the gradients of the results, those of the inputs as PyTorch computes them.
        leaves_out: whether inputs that a backward does not lead to have no gradient, as in PyTorch, or zeros.
    """

    def __init__(
        self,
        graph: BuiltGraph,
        inputs: Sequence[torch.Tensor],
        excluded: ExcludedModules,
        generators: GlobalStates | None,
        in_torch: Callable[[Sequence[Any]], Sequence[Any]],
        draw_in_torch: Callable[[], None],
        *,
        leaves_out: bool = True,
    ):
        self.inputs = inputs
        self._leaves_out = leaves_out
        self._in_ddp = torch_ddp.in_forward()
        """Whether DDP waits for a gradient of each weight."""
        self._graph = graph
        self._excluded = excluded
        self._generators = generators
        self._torch_state = torch.get_rng_state() if graph.python_ops else None
        self._in_torch = in_torch
        self._draw_in_torch = draw_in_torch
        self._number = graph.runs_begun
        """Number of runs of the session before this one; None if it is not known."""
        self._versions: list[int] | None = None
        """How often each input had been changed when the run ended; None before."""
        self._is_first = True
        self._spent: frozenset[int] = frozenset()
        """Groups of results through which a backward has gone that has not kept the graph."""

    def note_run(self) -> None:
        """Note that the run has ended: what changes the inputs from now on is not the run itself."""
        self._versions = versions_of(self.inputs)

    def note_backward(self, gradients: Sequence[Any], keeps_graph: bool) -> bool:
        """Note that a backward has run; return whether another one may come.

        Args:
            gradients: of the results, None where the backward has not come from.
            keeps_graph: whether it was called with ``retain_graph=True``.
        """
        self._is_first = False
        if keeps_graph:
            return True
        if all(gradient is not None for gradient in gradients):
            return False
        known = dependencies_of(self._graph)
        self._spent |= known.groups_of(gradients)
        return not self._spent.issuperset(known.groups)

    def is_new(self, gradients: Sequence[Any]) -> bool:
        """Return whether these results share nothing with those of a backward that has not kept the graph."""
        return self._spent.isdisjoint(dependencies_of(self._graph).groups_of(gradients))

    def begin_backward(self, gradients: Sequence[Any]) -> None:
        """Note that a backward is about to run, and which weights it does not lead to.

        Args:
            gradients: of the results, None where the backward has not come from.

        Raises:
            RuntimeError: the first one would read an input that has changed since the run; PyTorch's own message, with
                the names of the inputs.
        """
        executor = self._graph.executor
        if executor is not None and not executor.plan.gathers_weights:
            partly = self._leaves_out and not self._in_ddp and any(gradient is None for gradient in gradients)
            executor.without_gradient = dependencies_of(self._graph).left_out(gradients) if partly else frozenset()
        self._check_inputs(gradients)

    def _check_inputs(self, gradients: Sequence[Any]) -> None:
        if not self._is_first or versions_of(self.inputs) == self._versions:
            return
        graph = self._graph
        if graph.read_by_backward is None:
            weights = graph.info.onnx_graph_input_names_require_grad
            graph.read_by_backward = inputs_of_backward(graph.session.model.graph, weights)
        own = self._changed_by_runs() | {
            id(buffer_table(change.owner).get(change.name)) for change in graph.effects.buffers
        }
        own_names = set(graph.known.export.read.inputs.values()) if graph.effects.attributes else set()
        changed = [
            name
            for name, number in self._changed(gradients)
            if name in graph.read_by_backward and number not in own and name not in own_names
        ]
        if changed:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{shortened([_plain(name) for name in changed])}, between the forward call and its backward; call "
                "backward before you change it (optimizer.step() among others), or call the model again"
            )

    def left_out(self, gradients: Sequence[Any], found: Sequence[Any]) -> Sequence[Any]:
        """Return the gradients of the inputs that autograd sees, None for those that this backward does not lead to.

        Args:
            gradients: of the results, None where the backward has not come from.
            found: gradients of the inputs, zeros where it does not lead to.
        """
        if not self._leaves_out or all(gradient is not None for gradient in gradients):
            return found
        left_out = dependencies_of(self._graph).left_out(gradients)
        if not left_out:
            return found
        names = self._graph.info.onnx_graph_input_names
        return tuple(
            # PyTorch would not call a hook that is there, which cannot be had; it is not to be given None
            None if names[i] in left_out and not has_backward_hooks(self.inputs[i]) else gradient
            for i, gradient in zip(self._graph.session.differentiable, found, strict=True)
        )

    def differentiable(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """Return the gradients of the inputs that autograd sees, such that they can be differentiated themselves.

        Raises:
            RuntimeError: PyTorch would draw other random numbers than ONNX Runtime has drawn, or compute of values that
                have changed.
        """
        if random := random_nodes(self._graph.session.model.graph):
            why = f"the graph draws random numbers ({', '.join(random)}), and PyTorch would draw others"
            raise RuntimeError(refused(why))
        with self.prepared(gradients):
            return self._in_torch(gradients)

    @contextlib.contextmanager
    def prepared(self, gradients: Sequence[Any]) -> Iterator[Any]:
        """Let the inputs and generators be what they were in the run, for another one in the block.

        Yields:
            The agent that draws the numbers of the run again; None if the graph's own draws none.

        Args:
            gradients: of the results, None where the backward has not come from.

        Raises:
            RuntimeError: the run cannot be repeated.
        """
        self._refuse_unrepeatable(gradients)
        agent = self._agent_again()
        now, torch_now = GlobalStates() if self._generators is not None else None, torch.get_rng_state()
        buffers = BufferStates(self._excluded)
        try:
            if self._generators is not None:
                self._generators.restore()
            if self._torch_state is not None:
                torch.set_rng_state(self._torch_state)
            with torch_fallback.recorded_apart():
                yield agent
        finally:
            buffers.restore()
            torch.set_rng_state(torch_now)
            if now is not None:
                now.restore()

    def _agent_again(self) -> Any:
        """Return a new agent whose first run draws what this run has drawn; None where nothing is drawn."""
        graph = self._graph
        if not random_nodes(graph.session.model.graph):
            return None
        assert graph.draws_again is not None and self._number is not None, "such a run is refused"
        agent = graph.draws_again(self._number)
        if graph.surround is not None:
            ort_compat.guard_agent(agent, graph.surround)
        self._draw_in_torch()
        return agent

    def _refuse_unrepeatable(self, gradients: Sequence[Any]) -> None:
        graph, effects = self._graph, self._graph.effects
        random = random_nodes(graph.session.model.graph)
        counted = graph.draws_again is not None and self._number is not None
        if random and not (counted and draw_once_in_each_run(graph.session.model.graph)):
            raise RuntimeError(
                f"a second backward through one forward call: the graph draws random numbers ({', '.join(random)}), "
                f"and ONNX Runtime cannot draw the same ones again; {_CURE}"
            )
        changed = [f"buffer {change.name}" for change in effects.buffers]
        changed += [f"attribute {place.steps[-1][1]}" for place, _ in effects.attributes]
        if not changed:
            own = self._changed_by_runs()
            changed = [_plain(name) for name, number in self._changed(gradients) if number not in own]
        if changed:
            raise RuntimeError(
                "a second backward through one forward call: what it was computed from has been modified by an inplace "
                f"operation ({', '.join(changed[:3])}); {_CURE}"
            )

    def _changed(self, gradients: Sequence[Any]) -> list[tuple[str, int]]:
        """Return the name and the ``id()`` of each input that has changed since the run and counts for a backward."""
        if self._versions is None or (now := versions_of(self.inputs)) == self._versions:
            return []
        apart = dependencies_of(self._graph).left_out(gradients)
        names = self._graph.info.onnx_graph_input_names
        return [
            (name, id(tensor))
            for name, tensor, before, after in zip(names, self.inputs, self._versions, now, strict=True)
            if before != after and name not in apart
        ]

    def _changed_by_runs(self) -> set[int]:
        """Return ``id()`` of the running statistics, which no result in training depends on."""
        modules = [module for module in self._excluded.changing_buffers() if is_batch_norm(module)]
        return {id(buffer) for module in modules for buffer in module.buffers(recurse=False)}


def dependencies_of(graph: BuiltGraph) -> ResultDependencies:
    """Return which results of a graph depend on what."""
    if graph.dependencies is None:
        model = onnx.load_model_from_string(graph.exported.info.exported_model).graph
        wanted = graph.info.onnx_graph_input_names_require_grad
        graph.dependencies = ResultDependencies(model, wanted, graph.returned_logits)
    return graph.dependencies


def random_nodes(graph: onnx.GraphProto) -> list[str]:
    """Return the operators of a graph that draw random numbers; dropout with probability 0 draws none that matter."""
    return sorted({node.op_type for node, _ in _random(graph)})


def draw_once_in_each_run(graph: onnx.GraphProto) -> bool:
    """Return whether a run is known by its number: each node that draws is a Dropout with a seed, and always on.

    Such a node draws with its seed plus the number of times that it has drawn before.
    """
    return all(
        node.op_type == "Dropout" and settings == 2 and any(attribute.name == "seed" for attribute in node.attribute)
        for node, settings in _random(graph)
    )


def _random(graph: onnx.GraphProto) -> list[tuple[onnx.NodeProto, int]]:
    """Return the nodes that draw random numbers, and how many of the settings of a dropout are constants."""
    values = {initializer.name: initializer for initializer in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            values[node.output[0]] = node.attribute[0].t

    found = []
    for node in graph.node:
        if node.op_type in _RANDOM:
            first = _DROPOUT_INPUTS.get(node.op_type, len(node.input))
            given = [values[name] for name in node.input[first : first + 2] if name in values]
            if all(onnx.numpy_helper.to_array(value).any() for value in given):
                found.append((node, len(given)))
    return found


def _plain(name: str) -> str:
    """Return the name of a graph input as its user knows it."""
    return name.removeprefix("_original_module.")
