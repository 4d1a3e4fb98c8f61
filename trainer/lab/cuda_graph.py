"""Forward, loss and backward of a micro-batch as one CUDA graph instead of many launches.

There is a graph for each kind of micro-batch: the first of a step, whose gradients are new, those
that add to them, the last one where DDP averages gradients, and all of them again where the noise
scale measures more. They read their inputs, and leave gradients and results, in the same places.
What a first graph leaves as gradients stays in its memory, so that nothing is zeroed, and a
parameter that had no part in a step has no gradient.

The first step runs without graphs: it compiles, and lets libraries set themselves up. Python runs
while a graph is captured, not when it is replayed: a model whose Python chooses what to compute, or
draws random numbers of its own, must not be captured. It could go once a step launches few kernels,
such as one that is compiled whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from trainer.config.rules import reads_lanes
from trainer.errors import UserError
from trainer.metrics.logger import get_logger
from trainer.wording import error_text

if TYPE_CHECKING:
    from trainer.data.loader import MicroBatch
    from trainer.distributed.strategy import Strategy
    from trainer.objective import Auxiliary, ObjectiveOutput
    from trainer.training.plan import Plan
    from trainer.training.step import TrainStep

logger = get_logger(__name__)

STEPS_WITHOUT, STEPS_WITHOUT_OF_DDP = 1, 11  # DDP measures itself in its first ten


def make_graphs(plan: Plan, device: torch.device, strategy: Strategy, auxiliary: Auxiliary) -> MicroGraphs | None:
    """The graphs of a run on CUDA, or None. Raises UserError: asked for and impossible."""
    config, is_asked, stream = plan.config, plan.config.train.cuda_graph is True, strategy.stream
    # What their Python does is not known.
    if not is_asked and (not plan.has_built_in_model or config.objective.target is not None):
        return None
    has_ranks = plan.facts.world_size > 1
    reasons = {
        "FSDP gathers parameters within the backward": has_ranks and stream is None,
        "several devices were not tried; train.cuda_graph = true tries them": has_ranks and not is_asked,
        "only full rows have one shape": not reads_lanes(config),
        "losses and metrics of the model's output are looked at by Python": auxiliary.losses or auxiliary.metric_keys,
    }
    problem = next((reason for reason, holds in reasons.items() if holds), "")
    if problem and is_asked:
        raise UserError("train.cuda_graph", f"not possible here: {problem}", 'set it to "auto"')
    if problem:
        logger.info("the step runs without CUDA graphs: %s", problem)
        return None
    return MicroGraphs(device, is_asked=is_asked, stream=stream)


class Graph(NamedTuple):
    """One kind of micro-batch, captured."""

    graph: torch.cuda.CUDAGraph
    end: Tensor | None  # the state after its rows
    result: ObjectiveOutput
    gradients: Sequence[Tensor | None]  # of all parameters, after it
    trace: frozenset[int] | None  # the noise scale's hooks that ran


class MicroGraphs:
    """Stands for `TrainStep.run_micro` where micro-batches have the captured shapes."""

    def __init__(self, device: torch.device, *, is_asked: bool, stream: torch.cuda.Stream | None = None) -> None:
        self._is_asked = is_asked  # what cannot be captured is refused; otherwise a warning
        self._stream = stream  # on which DDP was made; None: nothing averages gradients
        self._steps_without = STEPS_WITHOUT if stream is None else STEPS_WITHOUT_OF_DDP
        self._num_steps, self._is_off = 0, False
        self._graphs: dict[Any, Graph] = {}
        self._inputs: dict[str, Tensor] = {}
        self._sums: Sequence[Tensor | None] = ()  # gradients to which later micro-batches add
        self._kappa = torch.zeros((), dtype=torch.float64, device=device)

    def __call__(
        self, step: TrainStep, micro: MicroBatch, state: Tensor | None, kappa: float, is_first: bool, is_last: bool
    ) -> tuple[Tensor | None, ObjectiveOutput]:
        """As `TrainStep.run_micro`. Raises UserError: it is asked for and cannot be captured."""
        self._num_steps += is_first  # steps, not micro-batches
        given = {**micro.inputs, "targets": micro.targets}
        if state is not None:
            given["state"] = state
        is_warm = self._num_steps > self._steps_without and not self._is_off
        if not is_warm or not self._fits(given) or not (is_first or self._adds(step)):
            return self._run_without(step, micro, state, kappa)
        averages = is_last and self._stream is not None
        kind = is_first, averages, None if step.gns is None else step.gns.kind
        try:
            self._place(given, kappa)
            if kind not in self._graphs:
                self._graphs[kind] = self._capture(step, micro, averages=averages)
        except Exception as error:  # noqa: BLE001 - whatever hinders it
            self._give_up(step, error, is_first=is_first)
            return self._run_without(step, micro, state, kappa)
        found = self._graphs[kind]
        found.graph.replay()
        if is_first or averages:
            _set_gradients(step, found.gradients)
        if step.gns is not None and found.trace is not None:
            step.gns.repeat(found.trace)
        if step.extensions.on_micro:  # it may keep what the next replay overwrites
            return found.end, _copied(found.result)
        return found.end, found.result

    def _fits(self, given: dict[str, Any]) -> bool:
        """Whether inputs have the shapes of the graphs' own, which the first ones decide."""
        if not self._inputs:
            return True
        kinds = {name: (value.shape, value.dtype) for name, value in given.items()}
        return kinds == {name: (own.shape, own.dtype) for name, own in self._inputs.items()}

    def _place(self, given: dict[str, Any], kappa: float) -> None:
        """Copy inputs to where the graphs read them. A TypeError if one is no tensor."""
        if not self._inputs:
            self._inputs = {name: torch.empty_like(value) for name, value in given.items()}
        self._kappa.fill_(kappa)  # a number given to Python would be a constant of the graph
        for name, value in given.items():
            self._inputs[name].copy_(value)

    def _adds(self, step: TrainStep) -> bool:
        """Whether the gradients are where graphs add to them: not after a first one without."""
        own = zip(step.parameters, self._sums, strict=False)
        return bool(self._sums) and all(parameter.grad is grad for parameter, grad in own)

    def _run_without(
        self, step: TrainStep, micro: MicroBatch, state: Tensor | None, kappa: float
    ) -> tuple[Tensor | None, ObjectiveOutput]:
        if self._stream is None:
            return step.run_micro(micro, state, kappa)
        # The nodes that add up gradients belong to the stream on which they are first used.
        here = torch.cuda.current_stream()
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            found = step.run_micro(micro, state, kappa)
        here.wait_stream(self._stream)
        return found

    def _capture(self, step: TrainStep, micro: MicroBatch, *, averages: bool) -> Graph:
        inputs, graph = dict(self._inputs), torch.cuda.CUDAGraph()
        targets, state = inputs.pop("targets"), inputs.pop("state", None)
        pool = next((each.graph.pool() for each in self._graphs.values()), None)  # one for all
        micro = replace(micro, inputs=inputs, targets=targets)
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            end, result = step.run_micro(micro, state, self._kappa)
            gradients: Sequence[Tensor | None] = [parameter.grad for parameter in step.parameters]
            if not averages:  # those averaged are in DDP's buckets
                gradients = self._at_one_place(gradients)
        # With its history a loss would keep the nodes of the backward, which belong to the capture.
        result = replace(result, loss_sum=result.loss_sum.detach())
        trace = None if step.gns is None else step.gns.trace()
        if end is not None:
            end = end.detach()
        return Graph(graph, end, result, gradients, trace)

    def _at_one_place(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The sums, to which another kind of first micro-batch copies its gradients."""
        self._sums = self._sums or gradients
        pairs = zip(self._sums, gradients, strict=True)
        moved = [(own, each) for own, each in pairs if own is not each]
        if any(own is None or each is None for own, each in moved):
            raise ValueError("its micro-batches do not use the same parameters")
        if moved:
            places, found = zip(*moved, strict=True)
            torch._foreach_copy_(places, found)
        return self._sums

    def _give_up(self, step: TrainStep, error: Exception, *, is_first: bool) -> None:
        """Continue without graphs. A UserError if they are asked for."""
        if self._is_asked:
            problem = f"the step cannot be captured: {error_text(error)}"
            raise UserError("train.cuda_graph", problem, 'set it to false, or to "auto"') from error
        text = "the step runs without CUDA graphs, since it cannot be captured: %s"
        logger.warning(text, error_text(error))
        self._is_off = True  # a second try would fail alike
        self._graphs.clear()
        if is_first:  # what the capture left is no gradient
            for parameter in step.parameters:
                parameter.grad = None
        else:
            _set_gradients(step, self._sums)
        if step.gns is not None:
            # Its hooks have seen the failed capture.
            step.diagnostics.best_effort("gns").run(step.gns.again)


def _set_gradients(step: TrainStep, gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(step.parameters, gradients, strict=True):
        parameter.grad = gradient


def _copied(result: ObjectiveOutput) -> ObjectiveOutput:
    """The result with tensors of its own."""
    clones: Any = {name: x.clone() for name, x in vars(result).items() if isinstance(x, Tensor)}
    parts = {name: type(term)(*map(torch.clone, term)) for name, term in result.parts.items()}
    return replace(result, **clones, parts=parts)
