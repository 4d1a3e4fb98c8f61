"""Checks a config's model against the contract: `train check` reports, a run refuses breaches.

It could go once every model is one of this package, which the tests prove.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.arrays import IGNORED
from trainer.config.schema import ModelTable, RunConfig
from trainer.data.loader import MicroBatch, accepted_inputs, check_inputs
from trainer.errors import UserError
from trainer.import_path import users_code
from trainer.lab.nested_state import shapes_of
from trainer.lab.numbers import OnPositions, first_batch
from trainer.metrics.logger import get_logger
from trainer.model.protocol import FEW_TOKENS, evaluating
from trainer.training import Parts
from trainer.training.build import AUTOCAST, evaluated_rows, make_model, model_and_loss, runs_on
from trainer.training.plan import Plan, resolve_builder, weightless
from trainer.wording import few

if TYPE_CHECKING:
    from trainer.lab.contracts import Report

logger = get_logger(__name__)

MAX_PARAMETERS = 8_000_000  # two seconds of one core: 70 forwards, bound by reading the weights
MAX_LAYERS = 16  # the same of small layers, whose forwards are bound by their number
SMALL_PARAMETERS = 5_000_000  # of the smaller model that is checked in place of a larger one
LEAST_DIM = 32
MAX_PARAMETERS_ONCE = 200_000_000  # of a model that has no smaller size
# Parameters times tokens: under a second of one core. One row is as long as in training, since a
# model may need that length.
MAX_WORK = 20_000_000_000
MAX_LOGITS = 100_000_000

# Breaches that a run refuses: each spoils what is trained, in silence. Causes first: states hidden
# in modules and mixed rows break carry too.
REFUSED = ("forward", "purity", "isolation", "causality", "carry", "resets", "soak")
OFF = "model.contract is false"
_FORWARD = (
    "make it forward(tokens [B, T], state [B, state_width]) -> ModelOutput(logits [B, T, V], "
    "state [B, state_width]), as trainer.model.protocol.SequenceModel describes it, and losses "
    "as its loss_keys say (docs/models.md)"
)


class Size(NamedTuple):
    """Depth and width at which a model is checked."""

    dim: int
    num_layers: int
    parameters: int


def check_contract(plan: Plan, device: torch.device, *, model: nn.Module | None = None) -> Report | str:
    """Check a model of this config; a smaller one of the same make if it is large. Returns the
    report, or why nothing was checked. `model`: at its full size, which is copied; None: one is
    built.

    Raises UserError: the model cannot be built, needs inputs that the data do not have, or resets
    that it does not take; or a loss of the user's own cannot be computed of its output.
    """
    table, tokens = plan.config.model, plan.config.data.seq_len
    if not table.contract:
        return OFF
    from trainer.lab.contracts.check import check_model, needed_inputs  # takes a while, and few runs need it

    size = find_size(table, plan.vocab_size, tokens, plan.parts, plan.config)
    if isinstance(size, str):
        return size
    is_full = (size.dim, size.num_layers) == (table.dim, table.num_layers)
    reduced = table.model_copy(update={"dim": size.dim, "num_layers": size.num_layers})
    build = partial(make_model, plan, reduced)
    with torch.random.fork_rng(devices=[]):
        if model is None or not is_full:
            with users_code("model.target", "cannot be moved to a device", "cache no tensors outside the module"):
                model = build().to(device)
            model_and_loss(model, plan, device)
        accepted = accepted_inputs(model)
        is_read_here = all(source.table.target is None for source in plan.sources)
        if is_read_here:
            given = {"features" if plan.config.data.features else "tokens"}
            if lacking := sorted(needed_inputs(model) - given - {"resets"}):
                problem = f"forward needs {few(lacking)}, which the data do not have"
                raise UserError("model.target", problem, "give a default, or read data of your own that have it")
            if accepted is not None:
                refuse_align(plan, model, accepted)
                check_inputs(given, accepted)
        resets = accepted is not None and "resets" in accepted
        if is_read_here:
            resets = runs_on(plan, model)
        autocast, rows = AUTOCAST[plan.config.train.precision], evaluated_rows(plan)
        judge = partial(check_model, autocast=autocast, rows=rows, resets=resets)
        micro = first_batch(model, plan.config, plan.vocab_size)
        if micro is None:
            report = judge(model, vocab_size=plan.vocab_size, build=build, seq_len=tokens)
        else:
            judged, length = OnPositions(model, micro), micro.targets.shape[1]
            report = judge(
                judged, vocab_size=judged.num, build=lambda: OnPositions(build().to(device), micro), seq_len=length
            )
        if micro is not None or (plan.config.objective.target and report["forward"].status == "held"):
            _check_loss(plan, model, micro, device)
    if is_full:  # nothing to add to what was checked
        return report
    how = f"{report.how}, at dim {size.dim} and {size.num_layers} layers"
    return replace(report, how=f"{how} instead of {table.dim} and {table.num_layers}")


def _check_loss(plan: Plan, model: nn.Module, micro: MicroBatch | None, device: torch.device) -> None:
    """Refuse a loss that has no value, or no gradient, of a few tokens or the first batch."""
    run, loss = model_and_loss(model, plan, device)
    with evaluating(model), torch.no_grad():
        if micro is None:
            output = run_few_tokens(run, device, seq_len=plan.config.data.seq_len, below=plan.vocab_size).logits
            targets = torch.arange(output.shape[1], device=device)[None] % plan.vocab_size
            targets[:, 0] = IGNORED
        else:
            with users_code("model.target", f"forward fails on {shapes_of(micro)}"):
                output, targets = run(**micro.inputs, state=None).logits, micro.targets
    key = "objective.target" if plan.config.objective.target else "model.target"
    with users_code(key, f"fails on {shapes_of(micro) if micro else 'a few tokens'}"):
        if output.shape[:2] != targets.shape[:2]:
            raise ValueError(f"the output is {list(output.shape)}")
        with torch.enable_grad():
            found = loss(output.requires_grad_(), targets).loss_sum
        inputs = {} if micro is None else micro.inputs
        bad = [key for key, x in inputs.items() if isinstance(x, Tensor) and not x.isfinite().all()]
        if targets.is_floating_point() and targets.isinf().any():
            bad.append("targets")
        if bad and not found.isfinite():
            raise ValueError(f"the loss is {found.item()}; numbers of the batch are not finite: {few(bad)}")
        if not found.isfinite():
            raise ValueError(f"the loss is {found.item()}: with a sum, return the number of known targets")
        if found.requires_grad and not torch.autograd.grad(found, output)[0].isfinite().all():
            advice = ": compute with targets.nan_to_num()" * targets.is_floating_point()
            raise ValueError(f"the gradient is not finite{advice}")


def check_here(plan: Plan) -> Report | str:
    """`check_contract` on the CPU, for `train check`; a check must not occupy a device."""
    wanted = plan.config.train.device
    if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()):
        return "the run is for CUDA"  # its kernels may not exist on the CPU
    if plan.has_built_in_model and plan.config.objective.target is None:
        return "a built-in model, which the tests prove"
    return check_contract(plan, torch.device("cpu"))


def check_before_run(plan: Plan, model: nn.Module | None, device: torch.device, *, step: int) -> dict[str, Any]:
    """Check the model of a run that begins, or resumes, at `step`; the event for its record. Raises
    UserError: see `refuse_breaches`."""
    found = check_contract(plan, device, model=model)
    event: dict[str, Any] = {"event": "contract", "global_step": step}
    if isinstance(found, str):
        if found != OFF:  # chosen; diagnosis says it
            logger.warning("the model was not checked against its contract: %s", found)
        return {**event, "not_tried": found}
    refuse_breaches(plan, found)
    return {**event, **found.to_json()}


def refuse_breaches(plan: Plan, report: Report) -> None:
    """Refuse the first breach that spoils training. Warns of other breaches, and of what could not
    be checked. Raises UserError."""
    broken = {each.check: each for each in report.breaches}
    refused = [broken[check] for check in REFUSED if check in broken]
    if not refused:
        for verdict in [*report.breaches, *report.warnings]:
            logger.warning("model: %s: %s", verdict.check, verdict.text)
        if not report.breaches:  # which are why
            for verdict in report.unchecked[:1]:
                logger.warning("model: %s could not be checked: %s", verdict.check, verdict.text)
        return
    key, name, *_ = resolve_builder(plan.config.model, plan.parts)
    first, *others = refused
    problem = f"breaks {first.check}: {first.text}"
    if others:
        problem += f" (and breaks {' and '.join(verdict.check for verdict in others)})"
    fix = "fix the model (docs/contracts.md), or set model.contract = false to train it all the same"
    if first.check == "forward":
        problem, fix = first.text, _FORWARD
    raise UserError(key, f"{name}: {problem}", fix)


def find_size(
    table: ModelTable, vocab_size: int, tokens: int, parts: Parts, config: RunConfig | None = None
) -> Size | str:
    """The real size, or a smaller one that is checked faster; why none can be checked."""
    if tokens * vocab_size > MAX_LOGITS:
        return f"logits of {tokens:,} tokens and {vocab_size:,} ids would take long"

    def size(dim: int, layers: int) -> Size:
        model = weightless(table.model_copy(update={"dim": dim, "num_layers": layers}), vocab_size, config, parts)
        return Size(dim, layers, sum(parameter.numel() for parameter in model.parameters()))

    real, dim, layers = size(table.dim, table.num_layers), table.dim, min(table.num_layers, 2)
    work = real.parameters * tokens
    if real.parameters <= MAX_PARAMETERS and real.num_layers <= MAX_LAYERS and work <= MAX_WORK:
        return real
    while True:  # fewer layers, then half the width again and again: heads must divide the width
        with suppress(UserError):
            smaller = size(dim, layers)
            if smaller.parameters <= SMALL_PARAMETERS and smaller.parameters * tokens <= MAX_WORK:
                return smaller
        if dim % 2 or dim <= LEAST_DIM:  # narrower models say little about wide ones
            break
        dim //= 2
    if real.parameters <= MAX_PARAMETERS_ONCE and work <= 10 * MAX_WORK:
        return real
    text = f"{real.parameters:,} parameters and rows of {tokens:,} tokens"
    return f"{text} would take long, and no smaller model can be built"


def refuse_align(plan: Plan, model: nn.Module, accepted: Collection[str]) -> None:
    """Raises UserError: rows hold several documents, and the inputs of the model no `resets`."""
    if runs_on(plan, model) and "resets" not in accepted:
        _, name, *_ = resolve_builder(plan.config.model, plan.parts)
        problem = f"documents share a row, and {name} takes no resets, which keep them apart"
        fix = 'set it to "document", or let the model\'s forward take resets [B, T]'
        raise UserError("data.align", problem, fix)


def run_few_tokens(model: nn.Module, device: torch.device, *, seq_len: int, below: int) -> Any:
    """The output for a row of a few ids under `below`; of `seq_len` if it takes no such row."""
    few, cell = (torch.arange(length, device=device)[None] % below for length in (FEW_TOKENS, seq_len))
    try:
        return model(tokens=few, state=None)
    except Exception:  # noqa: BLE001 - a custom model may raise anything
        # Some take whole cells only.
        return model(tokens=cell, state=None)
